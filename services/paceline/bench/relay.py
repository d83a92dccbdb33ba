"""A network between a draft and a target: a TCP relay that delivers every byte late.

A process of its own, so that nobody's work delays it more. Knows no message. Run as a helper.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from typing import Any, cast

from paceline.bench.processes import serve

# In flight per direction; beyond it the sender waits, as on a real wire.
MAX_BYTES_IN_FLIGHT = 4 << 20


class Lane(asyncio.Protocol):
    """What comes in at one end leaves through the other `delay_s` later, in order."""

    def __init__(self, delay_s: float, open_lanes: set[Lane]) -> None:
        self._delay_s = delay_s
        self._open_lanes = open_lanes
        self._in: asyncio.Transport | None = None
        self._out: asyncio.Transport | None = None
        # None: the end.
        self._late: deque[bytes | None] = deque()
        self._num_bytes = 0

    def lead_to(self, transport: asyncio.Transport) -> None:
        self._out = transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._in = cast(asyncio.Transport, transport)
        self._open_lanes.add(self)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BYTES_IN_FLIGHT and self._in is not None:
            self._in.pause_reading()
        self._delay(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_lanes.discard(self)
        self._delay(None)

    def abort(self) -> None:
        if self._in is not None:
            self._in.abort()

    def _delay(self, data: bytes | None) -> None:
        self._late.append(data)
        asyncio.get_running_loop().call_later(self._delay_s, self._deliver)

    def _deliver(self) -> None:
        data = self._late.popleft()
        if self._out is None or self._out.is_closing():
            return
        if data is None:
            self._out.close()
            return
        self._out.write(data)
        was_full = self._num_bytes > MAX_BYTES_IN_FLIGHT
        self._num_bytes -= len(data)
        is_open = self._in is not None and not self._in.is_closing()
        if was_full and self._num_bytes <= MAX_BYTES_IN_FLIGHT and self._in is not None and is_open:
            self._in.resume_reading()


class Relay:
    """Listens on a port of its own; `set` says whereto new connections lead, and how late."""

    def __init__(self) -> None:
        self._target = ("127.0.0.1", 0)
        self._delay_s = 0.0
        self._server: asyncio.Server | None = None
        self.open_lanes: set[Lane] = set()
        self._dials: set[asyncio.Task[None]] = set()

    async def set(self, address: str, delay_us: float) -> dict[str, Any]:
        """`delay_us` each way. Answers the relay's own address."""
        host, _, port = address.rpartition(":")
        self._target, self._delay_s = (host, int(port)), delay_us / 1e6
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._accept, "127.0.0.1", 0)
        port_here = self._server.sockets[0].getsockname()[1]
        return {"address": f"127.0.0.1:{port_here}"}

    async def close(self) -> None:
        """Cut all connections and take no more."""
        if self._server is not None:
            self._server.close()
        for dial in self._dials:
            dial.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for lane in self.open_lanes:
            lane.abort()
        await asyncio.sleep(0)  # the loop closes them in its next turn

    def _accept(self) -> asyncio.Protocol:
        return _Door(self)

    def dial(self, lane: Lane, client: asyncio.Transport) -> None:
        """Connect onwards for a client whose bytes come through `lane`."""
        task = asyncio.get_running_loop().create_task(self._dial(lane, client))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, lane: Lane, client: asyncio.Transport) -> None:
        back = Lane(self._delay_s, self.open_lanes)
        back.lead_to(client)
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_connection(lambda: back, *self._target)
        except OSError:
            client.close()  # the client sees what it would see without us: nobody there
            return
        lane.lead_to(transport)
        client.resume_reading()

    @property
    def delay_s(self) -> float:
        return self._delay_s


class _Door(Lane):
    """The lane of a client that has just come: it reads nothing until the way on is open."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay.delay_s, relay.open_lanes)
        self._relay = relay

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        client = cast(asyncio.Transport, transport)
        client.pause_reading()
        self._relay.dial(self, client)


async def main() -> None:
    relay = Relay()
    try:
        await serve({"set": relay.set})
    finally:
        await relay.close()


if __name__ == "__main__":
    # Timers of the default loop are rounded up to whole milliseconds; of this one to microseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
