"""A client's connection at Serve's proxy: what is cut off, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn
from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
)
from ray.serve._private.http_util import validate_http_proxy_callback_return

from paceline.cli.proxy import CALLBACK_ENV, WRITE_TIMEOUT_ENV, install, proxy_env
from paceline.config import AppConfig, GatewayConfig
from paceline.gateway.connection import (
    SERVE_CONTROL_HEADERS,
    BoundedConnection,
    ConnectionLimits,
)

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
PIECE = b"x" * 65536
WAIT_S = 30.0


class App:
    """Answers with so many pieces; remembers how far it came and how it ended."""

    def __init__(self, num_pieces: int = 1, piece: bytes = PIECE) -> None:
        self.num_pieces = num_pieces
        self._piece = piece
        self.num_sent = 0
        self.num_requests = 0
        self.left: list[asyncio.Event] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_requests += 1
        left = asyncio.Event()
        self.left.append(left)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.num_pieces):
            await send({"type": "http.response.body", "body": self._piece, "more_body": True})
            self.num_sent += 1
        await send({"type": "http.response.body", "body": b""})
        assert (await receive())["type"] == "http.disconnect"
        left.set()


async def until(is_true: Callable[[], bool]) -> None:
    """uvicorn has no event for what it does to a connection."""
    async with asyncio.timeout(WAIT_S):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Server:
    def __init__(self, port: int, server: uvicorn.Server) -> None:
        self.port = port
        self._server = server

    @property
    def connections(self) -> list[BoundedConnection]:
        return list(self._server.server_state.connections)

    async def until_empty(self) -> None:
        await until(lambda: not self.connections)


@contextlib.asynccontextmanager
async def listening(app: Any, **limits: Any) -> AsyncIterator[Server]:
    class Connection(BoundedConnection):
        pass

    Connection.limits = ConnectionLimits(**limits)
    config = uvicorn.Config(
        app, http=Connection, lifespan="off", access_log=False, log_level=None, log_config=None
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.ensure_future(server.serve(sockets=[sock]))
        try:
            yield Server(sock.getsockname()[1], server)
        finally:
            server.should_exit = server.force_exit = True
            await task


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """What came before the other side ended or cut the connection."""
    got = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            while part := await reader.read(1 << 16):
                got += part
    return got


async def test_heads_that_never_end_are_cut() -> None:
    app = App()
    async with listening(app, head_timeout_s=0.05) as server:
        for begin in (b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: y"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(begin)
            assert await read_to_end(reader) == b""
            writer.close()
        await server.until_empty()
    assert app.num_requests == 0


async def test_heads_beyond_the_limit_are_cut() -> None:
    app = App()
    async with listening(app, max_head_bytes=100_000, head_timeout_s=600.0) as server:
        for begin in (b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"):
            unit = b"X: y\r\n" if begin.endswith(b"\n") else b"y" * 6
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(begin + unit * 50_000)
            assert await read_to_end(reader) == b""
            writer.close()
        await server.until_empty()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\nX: " + b"y" * 90_000 + b"\r\n\r\n")
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
    assert app.num_requests == 1


async def test_bodies_and_later_requests_are_no_heads() -> None:
    """The limits of a head begin anew with each request and end with it."""
    app = App()
    async with listening(app, max_head_bytes=1000, head_timeout_s=600.0) as server:
        address = ("127.0.0.1", server.port)
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
        for number in (1, 2, 3):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n")
            await until(lambda number=number: app.num_requests == number)
            assert server.connections[0]._head_timer is None
            writer.write(b"b" * 5000)
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"GET / HTTP/1.1\r\n")
        await until(lambda: server.connections[0]._head_timer is not None)
        writer.write(b"X: " + b"y" * 2000)
        assert await read_to_end(reader) == b""
        writer.close()
    assert app.num_requests == 3


async def test_trailers_and_chunk_extensions_beyond_the_limit_are_cut() -> None:
    """The parser keeps trailers; a long body with a little between its chunks is no offence."""
    begin = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nb\r\n"
    async with listening(App(), max_head_bytes=100_000, head_timeout_s=600.0) as server:
        address = ("127.0.0.1", server.port)
        for tail in (b"0\r\nX: " + b"y" * 600_000, b"0\r\n" + b"X: y\r\n" * 100_000):
            reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
            writer.write(begin)
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"0\r\n\r\n")
            writer.write(tail)
            assert await read_to_end(reader) == b""
            writer.close()
        await server.until_empty()
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
        writer.write(begin + (b"2;x=" + b"y" * 90 + b"\r\nbb\r\n") * 5_000 + b"0\r\nX: y\r\n\r\n")
        writer.write(HEAD.replace(b"Host", b"Connection: close\r\nHost"))
        answers = await read_to_end(reader)
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == 2
        writer.close()


async def test_pipelined_requests_are_bounded() -> None:
    app = App()
    async with listening(app, max_pipelined=3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        last = HEAD.replace(b"Host", b"Connection: close\r\nHost")
        writer.write(HEAD * 3 + last)
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 OK\r\n") == app.num_requests == 4
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD * 5)
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 OK\r\n") < 5
        writer.close()
        await server.until_empty()


async def test_a_head_behind_a_long_answer_may_wait() -> None:
    """Its rest is not read before the answers to earlier requests are out."""
    gate, is_running = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        is_running.set()
        await gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with listening(app, head_timeout_s=0.5) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        last = HEAD.replace(b"Host", b"Connection: close\r\nHost")
        writer.write(HEAD * 2 + last[:9])
        await is_running.wait()
        (connection,) = server.connections
        first = connection._head_timer
        await until(lambda: connection._head_timer is not first)
        writer.write(last[9:])
        gate.set()
        assert (await read_to_end(reader)).count(b"HTTP/1.1 200 OK\r\n") == 3
        writer.close()


async def test_headers_that_serve_would_obey() -> None:
    """A client may not tell Serve to go on after it left, nor what stands in its logs."""
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent = [
        (b"x-request-timeout-seconds", b"0"),
        (b"X-Request-Disconnect-Disabled", b"?1"),
        (b"X-Request-Id", b"a b"),
        (b"x-request-id", b"y" * 129),
        (b"x-request-id", b"good-1"),
        (b"Connection", b"close"),
    ]
    async with listening(app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % pair for pair in sent))
        writer.write(b"\r\n")
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
    assert seen == [[(b"x-request-id", b"good-1"), (b"connection", b"close")]]
    names = {SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER, SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER}
    assert {name.decode() for name in SERVE_CONTROL_HEADERS} == names


async def test_too_many_connections() -> None:
    async with listening(App(), max_connections=2) as server:
        both = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        reader, third = await asyncio.open_connection("127.0.0.1", server.port)
        assert await read_to_end(reader) == b""
        third.close()
        both[0][1].close()
        await both[0][1].wait_closed()
        await until(lambda: len(server.connections) == 1)
        reader, again = await asyncio.open_connection("127.0.0.1", server.port)
        again.write(HEAD.replace(b"Host", b"Connection: close\r\nHost"))
        assert (await read_to_end(reader)).startswith(b"HTTP/1.1 200 OK\r\n")
        for writer in (again, both[1][1]):
            writer.close()


@pytest.mark.parametrize("num_pieces", [400, 1])
async def test_a_client_that_stops_reading_is_cut(num_pieces: int) -> None:
    """25 MB are more than the kernel holds for it. Also when the app has sent it all."""
    app = App(num_pieces, PIECE * (400 // num_pieces))
    async with listening(app, write_timeout_s=0.2) as server:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
        client.send(HEAD)
        await until(lambda: bool(app.left))
        (connection,) = server.connections
        async with asyncio.timeout(WAIT_S):
            await app.left[0].wait()  # the app hears of it as of any disconnect
        await server.until_empty()
        assert connection.transport.get_write_buffer_size() == 0
        client.close()


async def test_no_more_than_one_piece_waits() -> None:
    app = App(400)
    async with listening(app) as server:
        client = socket.socket()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
        client.send(HEAD)
        seen, last = 0, -1
        async with asyncio.timeout(WAIT_S):
            while not app.left or app.num_sent != last:
                last = app.num_sent
                await asyncio.sleep(0.05)
                if server.connections:
                    waiting = server.connections[0].transport.get_write_buffer_size()
                    seen = max(seen, waiting)
        assert 0 < app.num_sent < 400
        assert 0 < seen <= len(PIECE) + 16  # and how a chunk is framed
        client.close()
        await server.until_empty()


async def test_a_slow_reader_gets_everything() -> None:
    """It takes longer than the limit in all, but never nothing for so long."""
    app = App(100)
    async with listening(app, write_timeout_s=0.5) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
        writer.write(HEAD.replace(b"Host", b"Connection: close\r\nHost"))
        num = 0
        async with asyncio.timeout(WAIT_S):
            while part := await reader.read(128 << 10):
                num += len(part)
                await asyncio.sleep(0.01)
        assert num > 100 * len(PIECE)
        assert app.num_sent == 100
        writer.close()


# How it gets into Serve's proxy


def test_what_ray_is_told() -> None:
    apps = [AppConfig(gateway=GatewayConfig(write_timeout_s=t)) for t in (7.5, 3.0, 30.0)]
    assert proxy_env(apps) == {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "paceline.cli.proxy:install",
        "PACELINE_WRITE_TIMEOUT_S": "3.0",
    }
    assert CALLBACK_ENV in proxy_env(apps)


@pytest.mark.parametrize(("value", "limit"), [("3.5", 3.5), (None, 30.0)])
def test_serve_gets_our_connections(
    value: str | None, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from uvicorn import config

    monkeypatch.setattr(config, "HTTP_PROTOCOLS", dict(config.HTTP_PROTOCOLS))
    monkeypatch.setattr(BoundedConnection, "limits", ConnectionLimits())
    if value:
        monkeypatch.setenv(WRITE_TIMEOUT_ENV, value)
    else:
        monkeypatch.delenv(WRITE_TIMEOUT_ENV, raising=False)
    assert validate_http_proxy_callback_return(install()) == []
    # As Serve makes its server: it names no protocol.
    served = uvicorn.Config(App(), log_config=None)
    served.load()
    assert served.http_protocol_class is BoundedConnection
    assert BoundedConnection.limits == ConnectionLimits(write_timeout_s=limit)
    assert ConnectionLimits().write_timeout_s == GatewayConfig().write_timeout_s
