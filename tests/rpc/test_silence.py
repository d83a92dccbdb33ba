"""Peers that connect and then do nothing, at each layer below the Hello: none holds a place."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from paceline.protocol.messages import Hello
from paceline.rpc.client import dial
from paceline.rpc.errors import StreamLost
from paceline.rpc.stream import TargetStream
from tests.rpc import authority, wire
from tests.rpc import messages as m

pytestmark = pytest.mark.timeout(60)
no_orphans = pytest.fixture(autouse=True)(wire.no_orphans)

IMPATIENT = wire.CONFIG.model_copy(update={"hello_timeout_s": 0.2})


@pytest.mark.parametrize("has_tls", [False, True], ids=["plaintext", "tls"])
async def test_a_connection_that_says_nothing_is_closed(has_tls: bool, tmp_path: Path) -> None:
    """gRPC would wait for 120 s."""
    config = IMPATIENT
    if has_tls:
        folder = authority.both_roles(tmp_path, authority.Authority()).tls_dir
        config = config.model_copy(update={"tls_dir": folder})
    async with wire.serving(wire.echo, config) as server, asyncio.timeout(wire.DEADLINE_S):
        reader, writer = await asyncio.open_connection(wire.HOST, server.port)
        with suppress(ConnectionResetError):
            await reader.read()  # all of it: to the end
        writer.close()
        async with dial(server.address, config, m.HELLO) as (_, stream):
            stream.send(m.DRAFT_TOKENS)
            assert await stream.receive() == [m.VERDICT]


async def test_a_connection_without_a_call_is_closed() -> None:
    async with wire.serving(wire.echo, IMPATIENT) as server, asyncio.timeout(wire.DEADLINE_S):
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            await channel.channel_ready()
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def test_a_stream_is_a_call_however_idle() -> None:
    async with (
        wire.serving(wire.echo, IMPATIENT) as server,
        dial(server.address, IMPATIENT, m.HELLO) as (_, stream),
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.receive(), timeout=2.0)  # twice the idle time
        stream.send(m.DRAFT_TOKENS)
        assert await stream.receive() == [m.VERDICT]


class Wire:
    """A relay on loopback that can be cut: it then takes everything and delivers nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._ends: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._relay, wire.HOST, 0)
        self.address = f"{wire.HOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in list(self._ends):
            task.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    def cut(self) -> None:
        self._is_whole.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(wire.HOST, self._port)
        self._writers += (writer, far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                if self._is_whole.is_set():
                    sink.write(data)
        except ConnectionError:
            pass
        if self._is_whole.is_set():
            sink.close()


async def test_a_dead_wire_is_found_by_keepalive_at_both_ends() -> None:
    """Our own pings would take longer here: they are told to."""
    config = wire.CONFIG.model_copy(
        update={
            "keepalive_time_ms": 100,
            "keepalive_timeout_ms": 50,
            "ping_interval_s": 300.0,
            "peer_timeout_s": 600.0,
        }
    )
    ends: asyncio.Queue[StreamLost] = asyncio.Queue()

    async def on_stream(_hello: Hello, stream: TargetStream) -> None:
        try:
            await stream.receive()
        except StreamLost as lost:
            ends.put_nowait(lost)
            raise

    async with (
        wire.serving(on_stream, config) as server,
        Wire(server.port) as relay,
        asyncio.timeout(wire.DEADLINE_S),
    ):
        async with dial(relay.address, config, m.HELLO) as (_, stream):
            relay.cut()
            with pytest.raises(StreamLost, match="UNAVAILABLE"):
                await stream.receive()
        assert type(await ends.get()) is StreamLost
