"""Every way in which a stream ends on a real connection, seen from both sides."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import pytest

from paceline.protocol.messages import Bye, Hello, Ping, Pong, TargetMessage
from paceline.rpc.client import dial
from paceline.rpc.codec import encode_target
from paceline.rpc.endpoint import client_options, server_options
from paceline.rpc.errors import StreamClosed, StreamLost
from paceline.rpc.server import SpeculationServer
from paceline.rpc.stream import DraftStream, TargetStream
from tests.rpc import messages as m
from tests.rpc import wire

pytestmark = pytest.mark.timeout(60)
no_orphans = pytest.fixture(autouse=True)(wire.no_orphans)


async def test_a_draft_that_leaves_says_bye() -> None:
    target = wire.Target()
    async with wire.serving(target.on_stream) as server:
        async with dial(server.address, wire.CONFIG, m.HELLO):
            draft = await target.attached.get()
        assert isinstance(await draft.end, StreamClosed)


@pytest.mark.parametrize("way", ["cancel", "half-close"])
async def test_eof_without_bye_is_a_lost_draft(way: str) -> None:
    target = wire.Target()
    async with wire.serving(target.on_stream) as server, wire.raw_call(server.address) as raw:
        await raw.say(m.HELLO)
        draft = await target.attached.get()
        await raw.say(m.NACK)
        assert await draft.messages.get() == m.NACK
        if way == "cancel":
            raw.call.cancel()
        else:
            await raw.call.done_writing()
        end = await draft.end
        assert type(end) is StreamLost
        assert "without a Bye" in str(end)


async def test_a_target_that_returns_says_bye() -> None:
    async def on_stream(_hello: Hello, stream: TargetStream) -> None:
        stream.send(m.VERDICT)

    async with wire.serving(on_stream) as server:
        async with dial(server.address, wire.CONFIG, m.HELLO) as (_, stream):
            assert await stream.receive() == [m.VERDICT]
            with pytest.raises(StreamClosed):
                await stream.receive()
        async with wire.raw_call(server.address) as raw:
            await raw.say(m.HELLO)
            assert await raw.hear_until(Bye) == Bye("")
            assert (await raw.status())[0] is grpc.StatusCode.OK


async def test_a_target_that_dies_is_lost() -> None:
    async def dying(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.write(encode_target([m.WELCOME], wire.LIMITS)[0])
        await context.read()  # the first Ping: nobody writes when the call ends

    async with (
        wire.raw_server(dying) as address,
        dial(address, wire.CONFIG, m.HELLO) as (_, stream),
    ):
        with pytest.raises(StreamLost, match="end of stream without a Bye") as lost:
            await stream.receive()
        assert type(lost.value) is StreamLost


async def test_a_bye_is_heard_while_we_write() -> None:
    """A call that ends during a write is done for gRPC, whatever is still unread.

    A race: with `call.read()`, 3 rounds of 100 lost the Bye, and each left a task behind.
    """

    async def on_stream(_hello: Hello, stream: TargetStream) -> None:
        for _ in range(3):
            stream.send(m.VERDICT)
            stream.send(m.NACK)

    async with wire.serving(on_stream) as server:
        for _ in range(100):
            async with dial(server.address, wire.CONFIG, m.HELLO) as (_, stream):
                for _ in range(200):
                    stream.send(m.DRAFT_TOKENS)
                    stream.send(m.NACK)
                heard: list[TargetMessage] = []
                with suppress(StreamClosed):
                    while True:
                        heard += await stream.receive()
                assert heard == [m.VERDICT, m.NACK] * 3


async def test_stop_says_bye_to_everybody_and_a_redial_finds_the_next_server() -> None:
    target = wire.Target()
    async with wire.serving(target.on_stream) as server:
        port, address = server.port, server.address
        async with (
            dial(address, wire.CONFIG, m.HELLO) as (_, one),
            dial(address, wire.CONFIG, m.HELLO) as (_, two),
        ):
            await target.attached.get()
            await target.attached.get()
            await server.stop(grace_s=5.0)
            for stream in (one, two):
                with pytest.raises(StreamClosed, match="the target is stopping"):
                    await stream.receive()
    with pytest.raises(StreamLost, match="UNAVAILABLE"):
        async with dial(address, wire.CONFIG, m.HELLO):
            pass
    async with (
        wire.serving(wire.echo, ports=(port, port)),
        dial(address, wire.CONFIG, m.HELLO) as (_, again),
    ):
        again.send(m.DRAFT_TOKENS)
        assert await again.receive() == [m.VERDICT]


async def test_stop_ends_owners_that_do_not_listen() -> None:
    """An owner stuck in its own work is cancelled, after the grace and not before."""
    is_stuck = asyncio.Event()
    was_cancelled = asyncio.Event()

    async def on_stream(_hello: Hello, _stream: TargetStream) -> None:
        is_stuck.set()
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async with wire.serving(on_stream) as server, wire.raw_call(server.address) as raw:
        await raw.say(m.HELLO)
        await is_stuck.wait()
        await server.stop(grace_s=0.0)
        assert was_cancelled.is_set()
        assert server.num_streams == 0


async def test_stop_ends_calls_without_a_hello() -> None:
    async with wire.serving(wire.echo) as server, wire.raw_call(server.address) as raw:
        await raw.say(m.PING)
        assert isinstance((await raw.hear())[0], Pong)  # the call has arrived
        stopping = asyncio.ensure_future(server.stop(grace_s=10.0))
        assert await raw.hear() == [Bye("the target is stopping")]
        assert (await raw.status())[0] is grpc.StatusCode.OK
        await stopping


async def test_a_silent_draft_is_lost() -> None:
    config = wire.CONFIG.model_copy(update={"ping_interval_s": 0.02, "peer_timeout_s": 0.1})
    target = wire.Target()
    async with (
        wire.serving(target.on_stream, config) as server,
        wire.raw_call(server.address) as raw,
    ):
        await raw.say(m.HELLO)
        draft = await target.attached.get()
        assert str(await draft.end) == "the peer was silent for 0.1 s"
        code, details = await raw.status()
        assert (code, details) == (grpc.StatusCode.ABORTED, "the peer was silent for 0.1 s")


async def test_answering_pings_is_enough_to_live() -> None:
    config = wire.CONFIG.model_copy(update={"ping_interval_s": 0.02, "peer_timeout_s": 0.1})
    target = wire.Target()
    async with (
        wire.serving(target.on_stream, config) as server,
        wire.raw_call(server.address) as raw,
    ):
        await raw.say(m.HELLO)
        draft = await target.attached.get()
        for _ in range(15):  # 3 x peer_timeout_s
            ping = await raw.hear_until(Ping)
            assert isinstance(ping, Ping)
            await raw.say(Pong(ping.sent_us, ping.sent_us))
        assert draft.stream.end is None
        assert draft.stream.num_remote_errors == 0


async def test_a_silent_target_is_lost() -> None:
    async def mute(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.write(encode_target([m.WELCOME], wire.LIMITS)[0])
        while isinstance(await context.read(), bytes):
            pass

    config = wire.CONFIG.model_copy(update={"ping_interval_s": 0.02, "peer_timeout_s": 0.1})
    async with wire.raw_server(mute) as address, dial(address, config, m.HELLO) as (_, stream):
        with pytest.raises(StreamLost, match=r"the peer was silent for 0\.1 s"):
            await stream.receive()


async def test_overflow_is_seen_by_the_owner_and_by_the_peer() -> None:
    config = wire.CONFIG.model_copy(update={"max_outbox_messages": 8})

    async def chatty(_hello: Hello, stream: TargetStream) -> None:
        for _ in range(9):
            stream.send(m.VERDICT)
        await stream.receive()

    async with wire.serving(chatty, config) as server, wire.raw_call(server.address) as raw:
        await raw.say(m.HELLO)
        assert await raw.status() == (
            grpc.StatusCode.ABORTED,
            "outbox overflow: 8 messages wait for a slow peer",
        )


async def test_a_cancelled_draft_leaves_nothing() -> None:
    target = wire.Target()
    is_attached = asyncio.Event()

    async def own(address: str) -> None:
        async with dial(address, wire.CONFIG, m.HELLO) as (_, stream):
            is_attached.set()
            await stream.receive()

    async with wire.serving(target.on_stream) as server:
        task = asyncio.ensure_future(own(server.address))
        await is_attached.wait()
        draft = await target.attached.get()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert isinstance(await draft.end, StreamClosed)


async def test_the_owners_exception_leaves_dial_unwrapped() -> None:
    async with wire.serving(wire.echo) as server:
        with pytest.raises(KeyError, match="mine"):
            async with dial(server.address, wire.CONFIG, m.HELLO):
                raise KeyError("mine")


async def test_idle_streams_survive_keepalive_pings() -> None:
    """More HTTP/2 pings than a default server forgives (2) before it sends too_many_pings."""
    config = wire.CONFIG.model_copy(
        update={"keepalive_time_ms": 100, "ping_interval_s": 60.0, "peer_timeout_s": 60.0}
    )

    async def hear_nothing(stream: DraftStream) -> None:
        async with asyncio.timeout(1.5):
            await stream.receive()

    async with (
        wire.serving(wire.echo, config) as server,
        dial(server.address, config, m.HELLO) as (_, stream),
    ):
        with pytest.raises(TimeoutError):
            await hear_nothing(stream)
        stream.send(m.DRAFT_TOKENS)
        assert await stream.receive() == [m.VERDICT]


def test_options_follow_the_configuration() -> None:
    config = wire.CONFIG.model_copy(
        update={
            "keepalive_time_ms": 700,
            "keepalive_timeout_ms": 300,
            "max_message_bytes": 1 << 20,
        }
    )
    for options in (dict(client_options(config)), dict(server_options(config))):
        assert options["grpc.keepalive_time_ms"] == 700
        assert options["grpc.keepalive_timeout_ms"] == 300
        assert options["grpc.http2.ping_timeout_ms"] == 300
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0
        assert options["grpc.max_receive_message_length"] == 1 << 20
        assert options["grpc.max_send_message_length"] == 1 << 20
    server = dict(server_options(config))
    assert server["grpc.so_reuseport"] == 0
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 350
    client = dict(client_options(config))
    assert client["grpc.enable_retries"] == 0
    assert client["grpc.enable_http_proxy"] == 0
    assert client["grpc.use_local_subchannel_pool"] == 1


async def test_a_server_that_never_started_may_be_stopped() -> None:
    server = SpeculationServer(wire.CONFIG, wire.HOST, *wire.PORTS, m.WELCOME, wire.echo)
    await server.stop(grace_s=1.0)
