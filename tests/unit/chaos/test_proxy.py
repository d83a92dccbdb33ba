"""The TCP proxy against a real echo server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from chaos.proxy import Proxy, obey
from chaos.shape import Shape

PLAIN = Shape()
HELD = Shape(is_held=True)
TTL_S = 60.0


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1024):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # the other end was reset
    writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, str]]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(seed=1)
    try:
        port = server.sockets[0].getsockname()[1]
        yield proxy, await proxy.map(f"127.0.0.1:{port}")
    finally:
        await proxy.stop()
        server.close()


@asynccontextmanager
async def connected(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_bytes_pass_and_an_upstream_keeps_its_address() -> None:
    async with proxied() as (proxy, address):
        async with connected(address) as (reader, writer):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        assert proxy.counts.connections == 1
        assert proxy.counts.bytes == 10
        upstream = next(iter(proxy._servers))
        assert await proxy.map(upstream) == address


@pytest.mark.parametrize(("up", "down"), [(HELD, PLAIN), (PLAIN, HELD), (HELD, HELD)])
async def test_a_partition_holds_bytes_until_it_heals(up: Shape, down: Shape) -> None:
    async with proxied() as (proxy, address), connected(address) as (reader, writer):
        writer.write(b"1")
        assert await reader.readexactly(1) == b"1"
        proxy.set(up, down, TTL_S)
        writer.write(b"2")
        answer = asyncio.create_task(reader.readexactly(1))
        while not proxy.counts.held:  # noqa: ASYNC110  turns of the loop, no time
            await asyncio.sleep(0)
        assert not answer.done()
        proxy.clear()
        assert await answer == b"2"


async def test_a_reset_ends_every_connection() -> None:
    async with proxied() as (proxy, address), connected(address) as (reader, writer):
        writer.write(b"1")
        await reader.readexactly(1)
        assert proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)


async def test_flips_damage_and_are_counted() -> None:
    async with proxied() as (proxy, address), connected(address) as (reader, writer):
        proxy.set(Shape(flip=1.0), PLAIN, TTL_S)
        writer.write(b"\0" * 8)
        damaged = await reader.readexactly(8)
        assert sum(byte.bit_count() for byte in damaged) == 1
        assert proxy.counts.flips == 1


async def test_a_shape_ends_with_its_time_to_live() -> None:
    async with proxied() as (proxy, address), connected(address) as (reader, writer):
        proxy.set(HELD, HELD, 0.01)
        writer.write(b"1")
        assert await reader.readexactly(1) == b"1"
        assert proxy.up == PLAIN


async def test_the_last_words_get_through() -> None:
    async with proxied() as (proxy, address), connected(address) as (reader, writer):
        proxy.set(Shape(slice_bytes=3, delay_s=0.01), PLAIN, TTL_S)
        writer.write(b"goodbye")
        writer.write_eof()
        assert await reader.read() == b"goodbye"


async def test_orders() -> None:
    proxy = Proxy()
    shape = {"up": {"delay_s": 0.5}, "down": {}, "ttl_s": TTL_S}
    assert await obey(proxy, {"do": "set", **shape}) == {}
    assert proxy.up == Shape(delay_s=0.5)
    assert (await obey(proxy, {"do": "stats"}))["resets"] == 0
    assert await obey(proxy, {"do": "reset"}) == {"cut": 0}
    assert await obey(proxy, {"do": "clear"}) == {}
    assert proxy.up == PLAIN
    with pytest.raises(ValueError, match="no such order: fly"):
        await obey(proxy, {"do": "fly"})
