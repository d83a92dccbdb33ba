"""One client's connection at Serve's HTTP proxy: uvicorn's own, with the limits that it lacks.

Serve's proxy takes an answer from the gateway as fast as it is made, whether or not the client
reads it. Only here, at the socket, is it known that a client has stopped, and only here can the
connection be cut so that nothing of it stays: what follows is an ordinary disconnect.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.gateway.http import REQUEST_ID, REQUEST_ID_HEADER

# In Serve's proxy only Serve's own logger leads anywhere.
logger = logging.getLogger("ray.serve")

# Serve obeys these from anybody: with the second a client would leave and its work go on.
SERVE_CONTROL_HEADERS = frozenset({b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`write_timeout_s` is gateway.write_timeout_s. A head beyond `max_head_bytes` (request line
    and headers) is cut; from gateway.max_header_bytes up to there it gets a 431. The same bounds
    what may follow a body (trailers). `max_pipelined` are whole requests that wait for the answer
    to an earlier one."""

    write_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    max_head_bytes: int = 128 << 10
    max_pipelined: int = 64
    max_connections: int = 4096


class BoundedConnection(HttpToolsProtocol):  # type: ignore[misc]
    """Invariant: what waits for this client in this process is the piece being sent and no more;
    whenever something waits, `_stalled` is due within the write timeout."""

    limits = ConnectionLimits()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # Received since a head was whole, since a piece of body or since a request's end: the
        # parser keeps them (a head, trailers) or will not have them.
        self._num_loose_bytes = 0
        # A send waits as soon as the kernel takes no more: nothing queues up in this process.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.limits.max_connections:
            self._cut("too many connections")
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_write_timer()
        super().connection_lost(exc)

    # Heads. A connection that was used and is idle is uvicorn's to close.

    def data_received(self, data: bytes) -> None:
        self._num_loose_bytes += len(data)
        super().data_received(data)
        if self._num_loose_bytes > self.limits.max_head_bytes:
            self._cut("too large a head or trailer")
        elif len(self.pipeline) > self.limits.max_pipelined:
            self._cut("too many requests at once")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_loose_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_loose_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._head_timer is not None:
            self._end_head()  # it may have waited, unread, for this answer
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        known = name.lower()
        # Serve writes the request id into its log lines, whatever it is.
        is_bad_id = known == REQUEST_ID_HEADER and not REQUEST_ID.fullmatch(value)
        if known not in SERVE_CONTROL_HEADERS and not is_bad_id:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        self._num_loose_bytes = 0
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._head_is_due)

    def _head_is_due(self) -> None:
        if self.flow.read_paused:  # by us, until an earlier request is answered
            self._expect_head()
        else:
            self._cut("no whole head in time")

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # Answers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_progress()

    def resume_writing(self) -> None:
        self._end_write_timer()
        super().resume_writing()

    def _await_progress(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(
            self.limits.write_timeout_s, self._stalled, waiting
        )

    def _stalled(self, before: int) -> None:
        """Nothing is added while something waits, so less of it means that the client reads."""
        if self.transport.get_write_buffer_size() < before:
            self._await_progress()
        else:
            self._cut("it took nothing for too long")

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _cut(self, reason: str) -> None:
        logger.info("a client was cut off: %s", reason)
        # Not close(): that would wait for the client to take the rest.
        self.transport.abort()
