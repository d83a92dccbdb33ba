"""A rogue peer costs itself its stream, and nobody else anything."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from paceline.protocol.messages import Bye, Hello, Pong, TargetMessage
from paceline.rpc.client import dial
from paceline.rpc.codec import encode_draft, encode_target
from paceline.rpc.errors import StreamClosed, StreamLost
from paceline.rpc.stream import TargetStream
from paceline.rpc.v1 import speculation_pb2 as pb
from tests.rpc import messages as m
from tests.rpc import wire

pytestmark = pytest.mark.timeout(60)
no_orphans = pytest.fixture(autouse=True)(wire.no_orphans)

CONFIG = wire.CONFIG.model_copy(update={"max_remote_errors": 3, "max_message_bytes": 64 << 10})


def sealed(frame: pb.DraftFrame) -> bytes:
    body = frame.SerializeToString()
    return pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()


def random_bytes() -> bytes:
    return random.Random(7).randbytes(200)


def random_body() -> bytes:
    body = random.Random(8).randbytes(200)
    return pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()


def foreign_token() -> bytes:
    frame = pb.DraftFrame()
    frame.draft_tokens.items.add(session_id=1, epoch=1, start=1, token_ids=[m.VOCAB_SIZE])
    return sealed(frame)


def wrong_epoch_type() -> bytes:
    """`epoch` as a string: field 2 with wire type 2 is not the field that we know."""
    item = b"\x08\x01" + b"\x12\x03abc" + b"\x18\x05"
    batch = b"\x0a" + bytes([len(item)]) + item
    body = b"\x1a" + bytes([len(batch)]) + batch
    return pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()


def huge_list() -> bytes:
    frame = pb.DraftFrame()
    for _ in range(1025):
        frame.nack.items.add()
    return sealed(frame)


def flipped_bit() -> bytes:
    (data,) = encode_draft([m.DRAFT_TOKENS], wire.LIMITS)
    damaged = bytearray(data)
    damaged[-3] ^= 0x10
    return bytes(damaged)


def second_hello() -> bytes:
    return encode_draft([m.HELLO], wire.LIMITS)[0]


def pong_without_ping() -> bytes:
    return encode_draft([Pong(1, 2)], wire.LIMITS)[0]


OFFENCES: list[tuple[Callable[[], bytes], str]] = [
    (random_bytes, "not a protobuf message"),
    (random_body, "not a protobuf message"),
    (foreign_token, "token id 1000 is outside the vocabulary of 1000"),
    (wrong_epoch_type, "an entry without token ids"),
    (huge_list, "a batch of 1025 entries, at most 1024 allowed"),
    (flipped_bit, "the checksum does not match: the message was damaged"),
    (second_hello, "a Hello in the middle of the stream"),
    (pong_without_ping, "a Pong without a Ping"),
]
offences = pytest.mark.parametrize(
    ("offence", "sentence"), OFFENCES, ids=[offence.__name__ for offence, _ in OFFENCES]
)


class Bystander:
    """Another draft on the same target."""

    def __init__(self, target: wire.Target, address: str) -> None:
        self.target = target
        self.address = address

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """It works before and after, on the same stream."""
        async with dial(self.address, CONFIG, m.HELLO) as (_, stream):
            draft = await self.target.attached.get()
            for step in range(2):
                stream.send(m.DRAFT_TOKENS)
                assert await draft.messages.get() == m.DRAFT_TOKENS
                draft.stream.send(m.VERDICT)
                assert await stream.receive() == [m.VERDICT]
                if step == 0:
                    yield
            assert draft.stream.num_remote_errors == 0


@offences
async def test_offences_cost_the_offender_its_stream(
    offence: Callable[[], bytes], sentence: str
) -> None:
    target = wire.Target()
    async with (
        wire.serving(target.on_stream, CONFIG) as server,
        Bystander(target, server.address).watching(),
        wire.raw_call(server.address) as raw,
    ):
        await raw.say(m.HELLO)
        rogue = await target.attached.get()
        await raw.say(offence(), m.NACK)
        assert await rogue.messages.get() == m.NACK  # one is forgiven
        assert rogue.stream.num_remote_errors == 1
        await raw.say(offence(), offence())
        bye = await raw.hear_until(Bye)
        code, details = await raw.status()
        assert code is grpc.StatusCode.ABORTED
        assert details.startswith("too many malformed messages, the last: ")
        assert sentence in details
        assert bye == Bye(details)
        assert str(await rogue.end) == details
        assert server.num_streams == 1


async def test_oversize_messages_cost_the_sender_its_stream() -> None:
    target = wire.Target()
    async with (
        wire.serving(target.on_stream, CONFIG) as server,
        Bystander(target, server.address).watching(),
        wire.raw_call(server.address) as raw,
    ):
        await raw.say(m.HELLO)
        rogue = await target.attached.get()
        await raw.say(bytes(CONFIG.max_message_bytes + 1))
        assert (await raw.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not isinstance(await rogue.end, StreamClosed)


async def test_a_rogue_target_costs_the_draft_only_that_stream() -> None:
    async def rogue(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.write(encode_target([m.WELCOME], wire.LIMITS)[0])
        for _ in range(3):
            await context.write(b"\x00\x01")
        while isinstance(await context.read(), bytes):
            pass

    async with wire.raw_server(rogue) as address, dial(address, CONFIG, m.HELLO) as (_, stream):
        with pytest.raises(StreamLost, match="too many malformed messages"):
            await stream.receive()


async def test_our_own_bug_in_one_stream_stays_there() -> None:
    async def on_stream(hello: Hello, stream: TargetStream) -> None:
        if hello.replica_id == "unlucky":
            raise KeyError("a secret")
        await wire.echo(hello, stream)

    async with (
        wire.serving(on_stream, CONFIG) as server,
        dial(server.address, CONFIG, m.HELLO) as (_, stream),
        wire.raw_call(server.address) as raw,
    ):
        unlucky = Hello(1, "b", "unlucky", "small", m.VOCAB_SIZE, "sha256:abc", 64, 1, ())
        await raw.say(unlucky)
        assert await raw.status() == (grpc.StatusCode.INTERNAL, "internal error")
        stream.send(m.DRAFT_TOKENS)
        answer: list[TargetMessage] = await stream.receive()
        assert answer == [m.VERDICT]


async def test_a_peer_that_does_not_read_overflows_its_outbox_only() -> None:
    """gRPC takes about 4 MiB before a write blocks; then our own limit ends the stream."""
    config = CONFIG.model_copy(update={"max_outbox_messages": 64, "ping_interval_s": 30.0})
    big = replace(m.OPEN, token_ids=(1,) * 20_000)
    target = wire.Target()
    async with (
        wire.serving(target.on_stream, config) as server,
        Bystander(target, server.address).watching(),
        wire.raw_call(server.address) as raw,
    ):
        await raw.say(m.HELLO)
        rogue = await target.attached.get()
        before = rogue.stream.bytes_sent
        while not rogue.end.done():
            sent = rogue.stream.bytes_sent
            rogue.stream.send(big)
            await _turns(5 if rogue.stream.bytes_sent > sent else 1)
        assert str(await rogue.end).startswith("outbox overflow: 64 messages wait")
        assert rogue.stream.bytes_sent - before < 64 << 20


async def _turns(count: int) -> None:
    """Let the other tasks run; no time passes on purpose."""
    for _ in range(count):
        await asyncio.sleep(0)
