"""A draft that obeys nobody: it shakes hands, takes sequences and then lies, byte for byte.

gRPC is spoken by hand, because Paceline's own client refuses to say such things.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from paceline import models
from paceline.config import RpcConfig
from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import (
    PROTOCOL_VERSION,
    DraftMessage,
    DraftTokens,
    Hello,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    Ping,
    Pong,
    TargetMessage,
    Verdict,
)
from paceline.rpc.codec import decode_target, encode_draft
from paceline.rpc.endpoint import METHOD, SERVICE
from paceline.rpc.limits import WireLimits
from paceline.rpc.v1 import speculation_pb2 as pb
from paceline.sampling.params import VerificationMode

VOCAB_SIZE = models.TOY_VOCAB_SIZE
# Looser than the target's: what it would refuse can be said.
LIMITS = WireLimits.from_config(RpcConfig(max_message_bytes=64 << 20), VOCAB_SIZE)
MAX_REMEMBERED = 64
Call = grpc.aio.StreamStreamCall


class Rogue:
    """One stream to one target. It remembers what it said, to say it again when it is stale."""

    def __init__(self, call: Call[bytes, bytes], rng: random.Random) -> None:
        self._call = call
        self._rng = rng
        self._opens: dict[int, OpenSession] = {}
        self._said: list[bytes] = []

    async def introduce(self) -> None:
        """A Hello that fits: from here on the target gives it sequences."""
        await self._call.write(encode_draft([_hello(self._rng)], LIMITS)[0])

    async def listen(self) -> None:
        """Read until the end; pings are answered, so that it is not taken for dead."""
        async for data in self._call:
            with contextlib.suppress(RemoteProtocolError):
                for message in decode_target(data, LIMITS):
                    await self._hear(message)

    async def _hear(self, message: TargetMessage) -> None:
        if isinstance(message, Ping):
            await self._say(Pong(message.sent_us, message.sent_us))
        if isinstance(message, OpenSession):
            self._opens[message.session_id] = message
            if len(self._opens) > MAX_REMEMBERED:
                del self._opens[next(iter(self._opens))]
            status = self._rng.choice((OpenStatus.OK, OpenStatus.OK, OpenStatus.BUSY))
            await self._say(Opened(message.session_id, message.epoch, status))
        if isinstance(message, Verdict) and message.session_id in self._opens:
            await self._say(self._lie(message.start + len(message.token_ids), message))

    async def _say(self, message: DraftMessage) -> None:
        (data,) = encode_draft([message], LIMITS)
        self._said = [*self._said[-MAX_REMEMBERED:], data]
        await self._call.write(data)

    def _lie(self, start: int, about: OpenSession | Verdict) -> DraftTokens:
        """Proposals that look right and are not: of another text, place or time."""
        rng = self._rng
        return DraftTokens(
            session_id=about.session_id,
            epoch=max(0, about.epoch + rng.choice((0, 0, 1, -1))),
            start=max(1, start + rng.choice((0, 0, 1, -3, 1000))),
            context_hash=rng.getrandbits(64),
            token_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 4, 500)))),
            last_round=rng.choice((0, 1, 2**53 - 1)),
            draft_us=rng.choice((0, 2**53 - 1)),
            sent_us=rng.choice((0, 2**53 - 1)),
        )

    async def offend(self) -> None:
        """One more message that no honest draft would send."""
        await self._call.write(self._offence())

    def _offence(self) -> bytes:
        rng = self._rng
        victim = rng.choice(list(self._opens.values())) if self._opens else None
        match rng.randrange(8):
            case 0:
                return rng.randbytes(rng.randrange(1, 4096))
            case 1:
                return _sealed_bytes(rng.randbytes(200))
            case 2 if self._said:
                return rng.choice(self._said)  # a replay
            case 3 if victim is not None:
                return encode_draft([self._lie(len(victim.token_ids), victim)], LIMITS)[0]
            case 4:
                return _sealed(foreign_tokens(victim, rng))
            case 5 if victim is not None:
                return encode_draft([Nack(victim.session_id, victim.epoch, 2**31 - 1)], LIMITS)[0]
            case 6:
                return _sealed_bytes(b"\0" * (5 << 20))  # over rpc.max_message_bytes
            case _:
                return encode_draft([_hello(rng)], LIMITS)[0]  # in the middle of the stream


def foreign_tokens(victim: OpenSession | None, rng: random.Random) -> pb.DraftFrame:
    """Ids that the vocabulary does not have."""
    frame = pb.DraftFrame()
    frame.draft_tokens.items.add(
        session_id=victim.session_id if victim else rng.getrandbits(63),
        epoch=victim.epoch if victim else 1,
        start=len(victim.token_ids) if victim else 1,
        token_ids=[VOCAB_SIZE + rng.randrange(1000)],
    )
    return frame


def _hello(rng: random.Random) -> Hello:
    name = f"rogue-{rng.getrandbits(32):08x}"
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        boot_id=name,
        replica_id=name,
        model_id="rogue",
        vocab_size=VOCAB_SIZE,
        tokenizer_hash=models.TOY_TOKENIZER_HASH,
        max_model_len=512,
        max_sessions=64,
        modes=(VerificationMode.GREEDY, VerificationMode.COUPLED),
    )


def _sealed(frame: pb.DraftFrame) -> bytes:
    return _sealed_bytes(frame.SerializeToString())


def _sealed_bytes(body: bytes) -> bytes:
    return pb.SpeculateRequest(crc32=zlib.crc32(body), body=body).SerializeToString()


@asynccontextmanager
async def calling(address: str, rng: random.Random) -> AsyncIterator[Rogue]:
    """A rogue on a stream to `address`, until the block is left."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    channel = grpc.aio.insecure_channel(address, options=options)
    call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
    try:
        yield Rogue(call, rng)
    finally:
        call.cancel()
        await channel.close()
