from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from paceline.bench import relay
from paceline.bench.processes import HelperError, helper
from paceline.bench.relay import Relay


class Shouter(asyncio.Protocol):
    """Answers in capitals."""

    def __init__(self, transports: list[asyncio.Transport]) -> None:
        self._transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transports.append(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        self._transports[-1].write(data.upper())


@asynccontextmanager
async def shouting() -> AsyncIterator[str]:
    transports: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Shouter(transports), "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for transport in transports:
            transport.abort()
    await asyncio.sleep(0)


@asynccontextmanager
async def through_relay(target: str, delay_us: float) -> AsyncIterator[tuple[Relay, str]]:
    relay = Relay()
    answer = await relay.set(target, delay_us)
    try:
        yield relay, answer["address"]
    finally:
        await relay.close()


async def hang_up(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("delay_us", [0, 2000])
async def test_a_relay_delivers_everything_in_order_and_then_the_end(delay_us: int) -> None:
    sent = b"".join(b"%d " % number for number in range(50_000))
    async with shouting() as target, through_relay(target, delay_us) as (_, address):
        reader, writer = await dial(address)
        for start in range(0, len(sent), 10_000):
            writer.write(sent[start : start + 10_000])
            await asyncio.sleep(0)
        assert await reader.readexactly(len(sent)) == sent
        writer.write_eof()
        assert await reader.read() == b""
        await hang_up(writer)


async def test_no_byte_arrives_before_its_delay_each_way() -> None:
    loop = asyncio.get_running_loop()
    async with shouting() as target, through_relay(target, 20_000) as (_, address):
        reader, writer = await dial(address)
        began = loop.time()
        writer.write(b"a")
        assert await reader.read(1) == b"A"
        assert loop.time() - began >= 0.04
        await hang_up(writer)


async def test_a_sender_waits_when_too_much_is_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_BYTES_IN_FLIGHT", 1000)
    sent = bytes(range(97, 107)) * 200_000
    async with shouting() as target, through_relay(target, 1000) as (_, address):
        reader, writer = await dial(address)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent.upper()
        await hang_up(writer)


async def test_a_relay_to_nobody_hangs_up() -> None:
    async with shouting() as target:
        pass
    async with through_relay(target, 0) as (_, address):
        reader, writer = await dial(address)
        assert await reader.read() == b""
        await hang_up(writer)


async def test_later_connections_lead_elsewhere() -> None:
    async with shouting() as target, through_relay("127.0.0.1:1", 0) as (relay, address):
        assert (await relay.set(target, 0))["address"] == address
        reader, writer = await dial(address)
        writer.write(b"b")
        assert await reader.read(1) == b"B"
        await hang_up(writer)


async def test_a_helper_answers_reports_its_errors_and_ends() -> None:
    async with helper("paceline.bench.relay") as child:
        answer = await child.ask("set", address="127.0.0.1:1", delay_us=0)
        assert answer["address"].startswith("127.0.0.1:")
        with pytest.raises(HelperError, match="KeyError"):
            await child.ask("dance")
        process = child._process
    assert process.returncode == 0


async def test_a_helper_that_is_gone_is_an_error() -> None:
    async with helper("paceline.no_such_module") as child:
        with pytest.raises(HelperError, match="no_such_module"):
            await child.ask("set")
