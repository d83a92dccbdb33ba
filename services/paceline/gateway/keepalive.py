"""A streamed answer on its way out: the head once, then parts, and comments when nothing comes.

While a long prompt is being read nothing is sent, and proxies and clients take silence for a dead
connection. A comment line is sent then, which event readers skip. Knows no chunk's content; the
clock and the wait are arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Send

from paceline.gateway.http import EVENT_STREAM

KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", EVENT_STREAM.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events otherwise
]


class EventStream:
    """Sends the head before whatever comes first; after it an error can only be an event.

    `send` is called by one task at a time. Invariant: no comment lies inside a part.
    """

    def __init__(
        self,
        send: Send,
        interval_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._send = send
        self._interval_s = interval_s
        self._clock = clock
        self._sleep = sleep
        self._sent_s = clock()
        self._is_begun = False
        self._is_ended = False
        self._sending = asyncio.Lock()

    async def send_part(self, part: bytes) -> None:
        """Empty parts are not sent, but the head is."""
        async with self._sending:
            await self._begin()
            if part:
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            self._sent_s = self._clock()

    async def end(self) -> None:
        async with self._sending:
            self._is_ended = True
            await self._begin()
            await self._send({"type": "http.response.body", "body": b""})

    async def keep_alive(self) -> None:
        """Never returns: run it beside the work. Raises what `send` raises."""
        while True:
            rest_s = self._sent_s + self._interval_s - self._clock()
            if rest_s > 0:
                await self._sleep(rest_s)
            elif self._sending.locked():  # a part is on its way: the client is slow, not we
                await self._sleep(self._interval_s)
            else:
                await self._send_comment()

    async def _send_comment(self) -> None:
        async with self._sending:
            if not self._is_ended:
                await self._begin()
                await self._send(
                    {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                )
            self._sent_s = self._clock()

    async def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
