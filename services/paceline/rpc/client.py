"""The draft's end: dial a target, shake hands, hand out the stream. Knows no session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from paceline.config import RpcConfig
from paceline.errors import ConfigError
from paceline.protocol.messages import Hello, Welcome
from paceline.rpc.codec import draft_codec
from paceline.rpc.endpoint import CALL_ERRORS, METHOD, SERVICE, client_options
from paceline.rpc.errors import HandshakeRefused, StreamClosed, StreamLost
from paceline.rpc.handshake import misfit
from paceline.rpc.limits import WireLimits
from paceline.rpc.stream import DraftStream, TransportError, monotonic_us
from paceline.rpc.tls import explain, is_refusal, open_channel

Call = grpc.aio.StreamStreamCall[bytes, bytes]


class _CallTransport:
    """Reads by iteration, not by `call.read()`: when the call ends during a write, gRPC takes the
    call for done, and `read` would withhold what the target said before, its Bye included.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._responses = aiter(call)

    async def read(self) -> bytes | None:
        try:
            return await anext(self._responses, None)
        except grpc.aio.AioRpcError as error:
            raise TransportError(f"{error.code().name}: {error.details()}") from error
        except CALL_ERRORS as error:
            raise TransportError(f"reading from the target failed: {error}") from error

    async def write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except CALL_ERRORS as error:
            raise TransportError(f"writing to the target failed: {error}") from error

    async def finish_writing(self) -> None:
        try:
            await self._call.done_writing()
        except CALL_ERRORS as error:
            raise TransportError(f"finishing the call failed: {error}") from error


@asynccontextmanager
async def dial(
    address: str,
    config: RpcConfig,
    hello: Hello,
    now_us: Callable[[], int] = monotonic_us,
) -> AsyncIterator[tuple[Welcome, DraftStream]]:
    """`async with dial(...) as (welcome, stream):` connects; leaving says Bye and hangs up.

    A context manager, because the stream has tasks and a channel, and neither may outlive its
    owner. Raises HandshakeRefused (they do not fit or do not trust each other, our certificates are
    unusable, or there is no room) or StreamLost.
    """
    codec = draft_codec(WireLimits.from_config(config, hello.vocab_size))
    try:
        channel = open_channel(address, config, client_options(config))
    except ConfigError as error:
        raise HandshakeRefused(str(error)) from error
    try:
        # Bytes in, bytes out: the codec parses, and counts garbage like any other offence.
        call: Call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        try:
            transport = _CallTransport(call)
            async with DraftStream(transport, codec, config, dials=True, now_us=now_us) as stream:
                welcome = await _shake_hands(stream, config, hello)
                yield welcome, stream
        finally:
            call.cancel()  # grpc#43462: a call that is merely dropped is never collected
    finally:
        await channel.close()


async def _shake_hands(stream: DraftStream, config: RpcConfig, hello: Hello) -> Welcome:
    stream.send(hello)
    try:
        welcome = _check_welcome(await stream.receive_first(), hello)
    except StreamClosed as refusal:
        raise HandshakeRefused(str(refusal)) from refusal
    except StreamLost as lost:
        kind = HandshakeRefused if is_refusal(str(lost)) else StreamLost
        raise kind(explain(str(lost), config)) from lost
    except HandshakeRefused as refusal:
        stream.close(str(refusal))
        raise
    stream.establish()
    return welcome


def _check_welcome(welcome: object, hello: Hello) -> Welcome:
    if not isinstance(welcome, Welcome):
        raise HandshakeRefused(f"the first message must be a Welcome, got {type(welcome).__name__}")
    sentence = misfit(hello, welcome)
    if sentence is not None:
        raise HandshakeRefused(sentence)
    return welcome
