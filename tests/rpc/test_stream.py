"""Messages between two real ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
import uvloop

from paceline.protocol.messages import Bye, Hello, Ping, Pong, TargetMessage, Verdict, Welcome
from paceline.rpc.client import dial
from paceline.rpc.codec import encode_draft
from paceline.rpc.errors import StreamClosed
from paceline.rpc.stream import Load, TargetStream
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.rpc.v1 import speculation_pb2_grpc as pb_grpc
from tests.rpc import messages as m
from tests.rpc import wire

pytestmark = pytest.mark.timeout(60)
no_orphans = pytest.fixture(autouse=True)(wire.no_orphans)

# What reaches the owner of a stream; the stream itself answers the rest.
FROM_DRAFT = [
    message for message in m.DRAFT_MESSAGES if not isinstance(message, Hello | Ping | Pong | Bye)
]
FROM_TARGET = [
    message for message in m.TARGET_MESSAGES if not isinstance(message, Welcome | Ping | Pong | Bye)
]


async def test_every_kind_travels_both_ways() -> None:
    target = wire.Target()
    async with (
        wire.serving(target.on_stream) as server,
        dial(server.address, wire.CONFIG, m.HELLO) as (welcome, stream),
    ):
        assert welcome == m.WELCOME
        draft = await target.attached.get()
        assert draft.hello == m.HELLO
        assert server.num_streams == 1
        for message in FROM_DRAFT:
            stream.send(message)
        for answer in FROM_TARGET:
            draft.stream.send(answer)
        assert [await draft.messages.get() for _ in FROM_DRAFT] == FROM_DRAFT
        got: list[TargetMessage] = []
        while len(got) < len(FROM_TARGET):
            got += await stream.receive()
        assert got == FROM_TARGET


async def test_one_pass_is_one_grpc_message() -> None:
    verdicts = [replace(m.VERDICT, session_id=n) for n in range(8)]

    async def on_stream(_hello: Hello, stream: TargetStream) -> None:
        for verdict in verdicts:
            stream.send(verdict)
        await stream.receive()

    async with wire.serving(on_stream) as server, wire.raw_call(server.address) as raw:
        await raw.say(m.HELLO)
        assert await raw.hear() == [m.WELCOME]
        while isinstance((heard := await raw.hear())[0], Ping):
            pass
        assert heard == verdicts


async def test_a_long_prompt_travels() -> None:
    prompt = tuple(n % m.VOCAB_SIZE for n in range(1_000_000))
    opened = replace(m.OPEN, token_ids=prompt, prompt_len=len(prompt))
    target = wire.Target()
    async with (
        wire.serving(target.on_stream) as server,
        dial(server.address, wire.CONFIG, m.HELLO) as (_, stream),
    ):
        (await target.attached.get()).stream.send(opened)
        assert await stream.receive() == [opened]


async def test_clocks_and_loads_are_exchanged() -> None:
    config = wire.CONFIG.model_copy(update={"ping_interval_s": 0.01})
    target = wire.Target()
    async with (
        wire.serving(target.on_stream, config) as server,
        dial(server.address, config, m.HELLO) as (_, stream),
    ):
        draft = await target.attached.get()
        stream.local_load = Load(num_sessions=3, queue_len=2)
        draft.stream.local_load = Load(num_sessions=7, queue_len=1)
        while stream.clock.rtt_us is None or stream.peer_load == Load():
            draft.stream.send(m.VERDICT)  # something to wait for
            await stream.receive()
        while draft.stream.clock.rtt_us is None or draft.stream.peer_load == Load():
            stream.send(m.NACK)
            await draft.messages.get()
        for clock in (stream.clock, draft.stream.clock):  # one machine, one monotonic clock
            assert clock.rtt_us is not None
            assert clock.offset_us is not None
            assert 2 * abs(clock.offset_us) <= clock.rtt_us + 2
        assert stream.peer_load == Load(7, 1)
        assert draft.stream.peer_load == Load(3, 2)


async def test_three_drafts_at_once_do_not_mix() -> None:
    target = wire.Target()
    async with wire.serving(target.on_stream) as server:

        async def one_draft(name: str) -> None:
            hello = replace(m.HELLO, replica_id=name)
            async with dial(server.address, wire.CONFIG, hello) as (_, stream):
                draft = await target.attached.get()
                answer = replace(m.VERDICT, session_id=int(draft.hello.replica_id))
                for _ in range(50):
                    draft.stream.send(answer)
                got: list[TargetMessage] = []
                while len(got) < 50:
                    got += await stream.receive()
                assert {one.session_id for one in got if isinstance(one, Verdict)} == {int(name)}

        async with asyncio.TaskGroup() as group:
            for name in ("1", "2", "3"):
                group.create_task(one_draft(name))
    assert server.num_streams == 0


async def test_the_generated_stub_speaks_our_wire() -> None:
    """A client that knows nothing but the .proto file."""
    async with (
        wire.serving(wire.echo) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = pb_grpc.SpeculationStub(channel).Speculate()
        (hello,) = encode_draft([m.HELLO], wire.LIMITS)
        await call.write(pb.SpeculateRequest.FromString(hello))
        response = await call.read()
        assert isinstance(response, pb.SpeculateResponse)
        frame = pb.TargetFrame.FromString(response.body)
        assert frame.welcome.replica_id == "target-0"
        call.cancel()


async def test_bye_of_the_draft_reaches_the_target() -> None:
    target = wire.Target()
    async with wire.serving(target.on_stream) as server:
        async with dial(server.address, wire.CONFIG, m.HELLO) as (_, stream):
            draft = await target.attached.get()
            stream.send(m.NACK)
            stream.close("spot instance is going away")
        assert await draft.messages.get() == m.NACK
        end = await draft.end
    assert isinstance(end, StreamClosed)
    assert str(end) == "spot instance is going away"


def test_the_same_on_uvloop() -> None:
    """Ray Serve runs replicas on uvloop."""

    async def main() -> None:
        async with (
            wire.serving(wire.echo) as server,
            dial(server.address, wire.CONFIG, m.HELLO) as (_, stream),
        ):
            for _ in range(100):
                stream.send(m.DRAFT_TOKENS)
                assert await stream.receive() == [m.VERDICT]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
