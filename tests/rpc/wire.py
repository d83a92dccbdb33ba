"""Real servers and dialling ends on loopback, and a raw peer that obeys nobody. For tests only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from paceline.config import RpcConfig
from paceline.protocol.messages import DraftMessage, Hello, TargetMessage, Welcome
from paceline.rpc.codec import decode_target, encode_draft
from paceline.rpc.endpoint import METHOD, SERVICE
from paceline.rpc.errors import StreamLost
from paceline.rpc.limits import WireLimits
from paceline.rpc.server import SpeculationServer
from paceline.rpc.stream import TargetStream
from tests.rpc import messages as m

CONFIG = RpcConfig()
LIMITS = WireLimits.from_config(CONFIG, m.VOCAB_SIZE)
HOST = "127.0.0.1"
PORTS = (53000, 53999)
DEADLINE_S = 60.0

OnStream = Callable[[Hello, TargetStream], Awaitable[None]]


class Attachment:
    """What one draft's stream looked like from the target's side."""

    def __init__(self, hello: Hello, stream: TargetStream) -> None:
        self.hello = hello
        self.stream = stream
        self.messages: asyncio.Queue[DraftMessage] = asyncio.Queue()
        self.end: asyncio.Future[StreamLost] = asyncio.get_running_loop().create_future()


class Target:
    """Records every draft; waits are on queues and futures, never on time."""

    def __init__(self) -> None:
        self.attached: asyncio.Queue[Attachment] = asyncio.Queue()

    async def on_stream(self, hello: Hello, stream: TargetStream) -> None:
        attachment = Attachment(hello, stream)
        self.attached.put_nowait(attachment)
        try:
            while True:
                for message in await stream.receive():
                    attachment.messages.put_nowait(message)
        except StreamLost as end:
            attachment.end.set_result(end)


async def echo(_hello: Hello, stream: TargetStream) -> None:
    """Answers everything with one verdict."""
    while True:
        for _ in await stream.receive():
            stream.send(m.VERDICT)


@asynccontextmanager
async def serving(
    on_stream: OnStream,
    config: RpcConfig = CONFIG,
    welcome: Welcome = m.WELCOME,
    ports: tuple[int, int] = PORTS,
) -> AsyncIterator[SpeculationServer]:
    server = SpeculationServer(config, HOST, *ports, welcome, on_stream)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.0)


class RawCall:
    """A call that says what it is told to, byte for byte."""

    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self.call = call

    async def say(self, *said: DraftMessage | bytes) -> None:
        for one in said:
            data = one if isinstance(one, bytes) else encode_draft([one], LIMITS)[0]
            await self.call.write(data)

    async def hear(self) -> list[TargetMessage]:
        """The messages of one gRPC message."""
        data = await self.call.read()
        assert isinstance(data, bytes), "the stream is over"
        return decode_target(data, LIMITS)

    async def hear_until(self, kind: type) -> TargetMessage:
        while True:
            for message in await self.hear():
                if isinstance(message, kind):
                    return message

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the call ended; gRPC tells only after everything that came before was read."""
        try:
            while isinstance(await self.call.read(), bytes):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return await self.call.code(), await self.call.details()


@asynccontextmanager
async def raw_call(address: str, method: str = METHOD) -> AsyncIterator[RawCall]:
    channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{method}")()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield RawCall(call)
    finally:
        call.cancel()
        await channel.close()


@asynccontextmanager
async def raw_server(
    answer: Callable[[grpc.aio.ServicerContext[bytes, bytes]], Awaitable[None]],
) -> AsyncIterator[str]:
    """A target that does whatever `answer` says; yields its address."""

    async def handle(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await answer(context)

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(handle)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(grace=0)


async def no_orphans() -> AsyncIterator[None]:
    """The body of an autouse fixture: a test leaves no task behind.

    Ours must be gone at once. gRPC's wrapper around a handler ends a few turns after it.
    """
    before = asyncio.all_tasks()
    yield
    leftover = asyncio.all_tasks() - before - {asyncio.current_task()}
    ours = {task for task in leftover if task.get_name().startswith(("peer-stream", "speculate"))}
    assert not ours, ours
    if leftover:
        _, pending = await asyncio.wait(leftover, timeout=DEADLINE_S)
        assert not pending, pending
