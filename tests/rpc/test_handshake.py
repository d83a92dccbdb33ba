"""Who may attach, and with which sentence everybody else is sent away."""

from __future__ import annotations

import asyncio
import errno
import itertools
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import grpc
import pytest

from paceline.errors import ConfigError
from paceline.protocol.messages import Bye, DraftMessage, Hello, TargetMessage
from paceline.rpc.client import dial
from paceline.rpc.codec import encode_target
from paceline.rpc.endpoint import METHOD, SERVICE
from paceline.rpc.errors import HandshakeRefused, StreamClosed, StreamLost
from paceline.rpc.server import SpeculationServer
from tests.rpc import messages as m
from tests.rpc import wire

pytestmark = pytest.mark.timeout(60)
no_orphans = pytest.fixture(autouse=True)(wire.no_orphans)

MISFITS = [
    (
        replace(m.HELLO, protocol_version=2),
        "protocol versions differ: draft 2, target 1; upgrade the older one",
    ),
    (
        replace(m.HELLO, vocab_size=1001),
        "vocabulary sizes differ: draft 1001 (small), target 1000 (large)",
    ),
    (
        replace(m.HELLO, tokenizer_hash="sha256:def"),
        "tokenizers differ: draft sha256:def (small), target sha256:abc (large)",
    ),
]
misfits = pytest.mark.parametrize(
    ("hello", "sentence"), MISFITS, ids=["version", "vocabulary", "tokenizer"]
)


async def attach(address: str, hello: Hello = m.HELLO) -> None:
    """Dial and hang up."""
    async with asyncio.timeout(wire.DEADLINE_S), dial(address, wire.CONFIG, hello):
        pass


async def attach_when_possible(address: str) -> None:
    """As a draft does: dial until the target has noticed that the others are gone."""
    async with asyncio.timeout(wire.DEADLINE_S):
        while True:
            with suppress(StreamLost):
                return await attach(address)


@misfits
async def test_the_dialling_end_is_told_why(hello: Hello, sentence: str) -> None:
    async with wire.serving(wire.echo) as server:
        with pytest.raises(HandshakeRefused) as refused:
            await attach(server.address, hello)
        assert str(refused.value) == sentence
        assert server.num_streams == 0
        await attach(server.address)  # and nobody else suffers


@misfits
async def test_the_refusal_is_a_bye_and_a_status(hello: Hello, sentence: str) -> None:
    async with wire.serving(wire.echo) as server, wire.raw_call(server.address) as raw:
        await raw.say(hello)
        assert await raw.hear() == [Bye(sentence)]
        assert await raw.status() == (grpc.StatusCode.FAILED_PRECONDITION, sentence)


@pytest.mark.parametrize("first", [m.DRAFT_TOKENS, m.NACK], ids=["draft tokens", "nack"])
async def test_the_first_message_must_be_a_hello(first: DraftMessage) -> None:
    sentence = f"the first message must be a Hello, got {type(first).__name__}"
    async with wire.serving(wire.echo) as server, wire.raw_call(server.address) as raw:
        await raw.say(first)
        assert await raw.hear() == [Bye(sentence)]
        assert await raw.status() == (grpc.StatusCode.INVALID_ARGUMENT, sentence)


async def test_a_garbled_hello_is_not_given_a_second_try() -> None:
    async with wire.serving(wire.echo) as server, wire.raw_call(server.address) as raw:
        await raw.say(b"\x07garbage")
        code, details = await raw.status()
        assert code is grpc.StatusCode.ABORTED
        assert details.startswith("too many malformed messages, the last: ")


async def test_silence_instead_of_a_hello_is_ended() -> None:
    config = wire.CONFIG.model_copy(update={"hello_timeout_s": 0.05})
    async with wire.serving(wire.echo, config) as server, wire.raw_call(server.address) as raw:
        assert await raw.hear() == [Bye("no handshake in time")]
        assert (await raw.status())[0] is grpc.StatusCode.OK


async def test_max_streams_is_enforced_and_a_place_is_given_back() -> None:
    config = wire.CONFIG.model_copy(update={"max_streams": 1})
    target = wire.Target()
    async with wire.serving(target.on_stream, config) as server:
        async with dial(server.address, config, m.HELLO):
            first = await target.attached.get()
            with pytest.raises(HandshakeRefused) as refused:
                await attach(server.address)
            assert str(refused.value) == "this target is full: it serves 1 drafts"
            async with wire.raw_call(server.address) as raw:
                await raw.say(m.HELLO)
                code, _ = await raw.status()
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert first.stream.end is None
        await first.end
        await attach(server.address)


async def test_calls_that_wait_for_a_hello_are_bounded() -> None:
    config = wire.CONFIG.model_copy(update={"max_streams": 1, "hello_timeout_s": 10.0})
    async with wire.serving(wire.echo, config) as server, asyncio.timeout(wire.DEADLINE_S):
        async with grpc.aio.insecure_channel(server.address) as channel:
            method: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            method = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            calls = [method() for _ in range(200)]
            endings = [asyncio.ensure_future(call.code()) for call in calls]
            for ended in itertools.islice(asyncio.as_completed(endings), 200 - 64):
                # ended by newer ones, or refused by gRPC while many are ending
                assert await ended in (
                    grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED,
                )  # fmt: skip
            waiting = [ending for ending in endings if not ending.done()]
            assert len(waiting) == 64
            await attach(server.address)  # an honest draft gets in at once
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for call in calls:
                call.cancel()
            await asyncio.wait(endings)
        await attach_when_possible(server.address)


async def test_the_oldest_silent_call_makes_room() -> None:
    config = wire.CONFIG.model_copy(update={"hello_timeout_s": 10.0})
    async with wire.serving(wire.echo, config) as server, AsyncExitStack() as silent:
        calls = [await silent.enter_async_context(wire.raw_call(server.address)) for _ in range(65)]
        for call in calls:
            await call.call.wait_for_connection()
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(call.status()) for call in calls],
            timeout=wire.DEADLINE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert [ending.result() for ending in done] == [
            (grpc.StatusCode.ABORTED, "no Hello yet, and 64 newer calls wait for theirs")
        ]


async def test_nobody_listens() -> None:
    async with wire.serving(wire.echo) as server:
        address = server.address
    with pytest.raises(StreamLost, match="UNAVAILABLE") as lost:
        await attach(address)
    assert not isinstance(lost.value, StreamClosed)


async def test_another_service_listens() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{wire.HOST}:0")
    await server.start()
    with pytest.raises(StreamLost, match="UNIMPLEMENTED"):
        await attach(f"{wire.HOST}:{port}")
    await server.stop(grace=0)


async def test_a_target_that_never_answers() -> None:
    async def mute(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while isinstance(await context.read(), bytes):
            pass

    config = wire.CONFIG.model_copy(update={"hello_timeout_s": 0.05})
    async with wire.raw_server(mute) as address:
        with pytest.raises(StreamLost, match=r"no handshake within 0\.05 s"):
            async with dial(address, config, m.HELLO):
                raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (m.VERDICT, "the first message must be a Welcome, got Verdict"),
        (
            replace(m.WELCOME, tokenizer_hash="sha256:xyz"),
            "tokenizers differ: draft sha256:abc (small), target sha256:xyz (large)",
        ),
        (
            replace(m.WELCOME, protocol_version=3),
            "protocol versions differ: draft 1, target 3; upgrade the older one",
        ),
    ],
    ids=["verdict", "tokenizer", "version"],
)
async def test_the_draft_refuses_too(answer: TargetMessage, sentence: str) -> None:
    async def impostor(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.write(encode_target([answer], wire.LIMITS)[0])
        while isinstance(await context.read(), bytes):
            pass

    async with wire.raw_server(impostor) as address:
        with pytest.raises(HandshakeRefused) as refused:
            await attach(address)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("nonsense.invalid", r"target\.host 'nonsense\.invalid' cannot be resolved \("),
        ("a" * 70, r"target\.host 'a+' cannot be resolved \("),
        ("192.0.2.1", r"cannot listen on target\.host '192\.0\.2\.1' \("),
    ],
)
async def test_a_host_that_is_not_ours(host: str, sentence: str) -> None:
    server = SpeculationServer(wire.CONFIG, host, *wire.PORTS, m.WELCOME, wire.echo)
    with pytest.raises(ConfigError, match=sentence):
        await server.start()


async def test_only_a_busy_port_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def problem(family: int, address: str, port: int) -> int | None:
        asked.append(port)
        return {0: None, wire.PORTS[0]: errno.EADDRINUSE}.get(port, errno.EACCES)

    monkeypatch.setattr("paceline.rpc.server._bind_problem", problem)
    server = SpeculationServer(wire.CONFIG, wire.HOST, *wire.PORTS, m.WELCOME, wire.echo)
    with pytest.raises(ConfigError, match=r"cannot listen on .*:53001 \(Permission denied"):
        await server.start()
    assert asked == [0, 53000, 53001]


async def test_a_host_may_be_a_name() -> None:
    server = SpeculationServer(wire.CONFIG, "localhost", *wire.PORTS, m.WELCOME, wire.echo)
    await server.start()
    await attach(server.address)
    await server.stop(grace_s=0.0)


async def test_two_servers_never_share_a_port() -> None:
    async with wire.serving(wire.echo) as first, wire.serving(wire.echo) as second:
        assert first.port != second.port
        assert first.address == f"127.0.0.1:{first.port}"
        taken = SpeculationServer(
            wire.CONFIG, wire.HOST, first.port, first.port, m.WELCOME, wire.echo
        )
        with pytest.raises(ConfigError, match=f"no free port in {first.port}..{first.port}"):
            await taken.start()
        await taken.stop(grace_s=0.0)
