"""One end of the stream between a draft and a target; both ends run this code.

Moves messages, answers pings, and notices when the peer is gone. Decides nothing about sequences
and does not know gRPC: a `Transport` carries the bytes.

    send() -> outbox -> writer task -> transport -> reader task -> inbox -> receive()

One task reads and one writes, and neither operation ever runs under a timeout of its own: in
grpc.aio, cancelling a pending read or write cancels the whole call. Timeouts are on our queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

from paceline.config import RpcConfig
from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import (
    Bye,
    DraftMessage,
    Hello,
    Ping,
    Pong,
    TargetMessage,
    Welcome,
)
from paceline.rpc.clock import ClockOffset
from paceline.rpc.codec import Codec
from paceline.rpc.errors import StreamClosed, StreamLost

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")

logger = logging.getLogger(__name__)

CLOSE_GRACE_S = 1.0  # for the Bye to leave and, at the dialling end, to be answered
MAX_PINGS_IN_FLIGHT = 64  # an older ping can no longer be answered


class TransportError(Exception):
    """The carrier failed; the text says how."""


class Transport(Protocol):
    """What carries the bytes. One reader and one writer at a time."""

    async def read(self) -> bytes | None:
        """The next message, None at the end. Raises TransportError."""

    async def write(self, data: bytes) -> None:
        """Returns when the carrier took it. Raises TransportError."""

    async def finish_writing(self) -> None:
        """Nothing more will be written. Raises TransportError."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a ping says about its sender."""

    num_sessions: int = 0
    queue_len: int = 0


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class PeerStream(Generic[SendT, ReceiveT]):
    """`async with stream:` runs it; leaving says Bye if nothing else ended it before.

    `local_load` is what our pings tell; `peer_load` what the peer's told last. `clock` relates
    the peer's monotonic clock to ours. `dials` is True at the draft's end.
    """

    def __init__(
        self,
        transport: Transport,
        codec: Codec[SendT, ReceiveT],
        config: RpcConfig,
        dials: bool,
        now_us: Callable[[], int] = monotonic_us,
    ) -> None:
        self.clock = ClockOffset()
        self.local_load = Load()
        self.peer_load = Load()
        self.num_remote_errors = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._transport = transport
        self._codec = codec
        self._config = config
        self._dials = dials
        self._now_us = now_us
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []
        # Invariant: at most max_outbox_messages, and one Bye.
        self._outbox: list[SendT] = []
        self._outbox_changed = asyncio.Event()
        # Invariant: the reader pauses while it holds max_outbox_messages or more.
        self._inbox: list[ReceiveT] = []
        self._inbox_changed = asyncio.Event()
        self._inbox_has_room = asyncio.Event()
        self._inbox_has_room.set()
        self._end: StreamLost | None = None  # set once, by whatever ends the stream first
        self._is_established = False
        self._is_first_message = True
        self._is_writable = True
        self._has_said_bye = False
        self._pings_in_flight: deque[int] = deque(maxlen=MAX_PINGS_IN_FLIGHT)
        self._heard_us = 0

    # -- for the owner ----------------------------------------------------------------------

    def send(self, message: SendT) -> None:
        """Queue a message. After the end it is dropped in silence: `receive` tells.

        Raises LocalProtocolError for a message that is too long to travel.
        """
        self._codec.check_sendable(message)
        if self._end is not None or not self._is_writable:
            return
        if len(self._outbox) >= self._config.max_outbox_messages:
            self.lose(f"outbox overflow: {len(self._outbox)} messages wait for a slow peer")
            return
        self._outbox.append(message)
        self._outbox_changed.set()

    async def receive(self) -> list[ReceiveT]:
        """Everything that has arrived, at least one message. Raises StreamLost at the end.

        What arrived before the end is handed out first. Safe to cancel.
        """
        await self._wait_for_inbox()
        messages, self._inbox = self._inbox, []
        self._inbox_has_room.set()
        return messages

    async def receive_first(self) -> ReceiveT:
        """The peer's Hello or Welcome, or whatever it said instead."""
        try:
            async with asyncio.timeout(self._config.hello_timeout_s):
                await self._wait_for_inbox()
        except TimeoutError:
            self.close("no handshake in time")
            raise StreamLost(f"no handshake within {self._config.hello_timeout_s} s") from None
        return self._inbox.pop(0)

    def establish(self) -> None:
        """The handshake is done: watch the peer from now on."""
        self._is_established = True
        self._heard_us = self._now_us()
        self._tasks.append(self._group.create_task(self._ping(), name="peer-stream-ping"))

    def close(self, reason: str = "") -> None:
        """Say Bye after what is queued, and end. Does not wait; leaving the context does."""
        self._say_bye(reason, StreamClosed(f"closed here: {reason}"))

    def lose(self, reason: str) -> None:
        """The peer is gone: end without a Bye, drop what is queued."""
        if self._end is None:
            self._outbox.clear()
            self._finish(StreamLost(reason))

    def report_remote_error(self, sentence: str) -> None:
        """The peer broke a rule: too many of these end the stream."""
        self.num_remote_errors += 1
        logger.warning("peer broke a rule (%d): %s", self.num_remote_errors, sentence)
        limit = self._config.max_remote_errors if self._is_established else 1
        if self.num_remote_errors >= limit:
            reason = f"too many malformed messages, the last: {sentence}"
            self._say_bye(reason, StreamLost(reason))

    @property
    def end(self) -> StreamLost | None:
        """Why the stream ended, None while it lives."""
        return self._end

    # -- life -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._tasks.append(self._group.create_task(self._read(), name="peer-stream-read"))
        self._tasks.append(self._group.create_task(self._write(), name="peer-stream-write"))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """The owner's exception is not the group's business: it leaves as it is, unwrapped."""
        self.close()
        try:
            last = self._tasks_to_let_end()
            if last:
                await asyncio.wait(last, timeout=CLOSE_GRACE_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)

    def _tasks_to_let_end(self) -> set[asyncio.Task[None]]:
        reader, writer = self._tasks[:2]
        last = set()
        if self._has_said_bye:
            last.add(writer)
            if self._dials:  # our hanging up cancels the call and would overtake our Bye
                last.add(reader)
        if not self._is_writable:
            # The call is over, but gRPC keeps it, beyond the reach of cancel, until somebody has
            # read what came before its end.
            last.add(reader)
        return last

    def _say_bye(self, reason: str, end: StreamLost) -> None:
        if self._end is None:
            self._has_said_bye = True
            self._outbox.append(cast(SendT, Bye(reason)))
            self._finish(end)

    def _finish(self, end: StreamLost) -> None:
        self._end = end
        self._inbox_changed.set()
        self._outbox_changed.set()
        self._inbox_has_room.set()

    # -- reading ----------------------------------------------------------------------------

    async def _wait_for_inbox(self) -> None:
        while not self._inbox:
            if self._end is not None:
                raise type(self._end)(str(self._end))
            self._inbox_changed.clear()
            await self._inbox_changed.wait()

    async def _read(self) -> None:
        try:
            while (data := await self._transport.read()) is not None:
                if self._end is None:  # else: linger until the peer has hung up
                    self._receive_data(data)
                    await self._inbox_has_room.wait()
            self.lose("the peer vanished: end of stream without a Bye")
        except TransportError as error:
            self.lose(str(error))
        finally:
            self.lose("the call was cancelled")

    def _receive_data(self, data: bytes) -> None:
        self._heard_us = self._now_us()
        self.bytes_received += len(data)
        try:
            messages = self._codec.decode(data)
        except RemoteProtocolError as error:
            self.report_remote_error(str(error))
            return
        is_first, self._is_first_message = self._is_first_message, False
        control = _CONTROL.get(type(messages[0]))  # a message on the wire has entries of one kind
        if control is not None and not (is_first and control is _HANDSHAKE):
            control(self, messages[0])
            return
        self._inbox.extend(messages)
        self._inbox_changed.set()
        if len(self._inbox) >= self._config.max_outbox_messages:
            self._inbox_has_room.clear()

    def _receive_ping(self, ping: Ping) -> None:
        self.peer_load = Load(ping.num_sessions, ping.queue_len)
        self.send(cast(SendT, Pong(ping.sent_us, self._heard_us)))

    def _receive_pong(self, pong: Pong) -> None:
        while self._pings_in_flight:
            if self._pings_in_flight.popleft() == pong.ping_sent_us:
                self.clock.receive_pong(pong.ping_sent_us, pong.received_us, self._heard_us)
                return
        self.report_remote_error("a Pong without a Ping")

    def _receive_bye(self, bye: Bye) -> None:
        if self._end is None:
            self._outbox.clear()
            self._finish(StreamClosed(bye.reason or "the peer said Bye"))

    def _receive_late_handshake(self, message: Hello | Welcome) -> None:
        self.report_remote_error(f"a {type(message).__name__} in the middle of the stream")

    # -- writing ----------------------------------------------------------------------------

    async def _write(self) -> None:
        try:
            while self._outbox or self._end is None:
                batch, self._outbox = self._outbox, []
                for data in self._codec.encode(batch):
                    await self._transport.write(data)
                    self.bytes_sent += len(data)
                if not self._outbox and self._end is None:
                    self._outbox_changed.clear()
                    await self._outbox_changed.wait()
            await self._transport.finish_writing()
        except TransportError:
            # Not the end: a Bye may still be on its way to the reader, who sees the end anyhow.
            self._is_writable = False
            self._outbox.clear()

    # -- watching ---------------------------------------------------------------------------

    async def _ping(self) -> None:
        interval_s = self._config.ping_interval_s
        while self._end is None:
            before_us = self._now_us()
            self._pings_in_flight.append(before_us)
            load = self.local_load
            self.send(cast(SendT, Ping(before_us, load.num_sessions, load.queue_len)))
            await asyncio.sleep(interval_s)
            now_us = self._now_us()
            if now_us - before_us > 2e6 * interval_s or not self._inbox_has_room.is_set():
                # We did not listen: our loop stood still, or our owner does not take its mail.
                self._heard_us = now_us
            elif now_us - self._heard_us > 1e6 * self._config.peer_timeout_s:
                self.lose(f"the peer was silent for {self._config.peer_timeout_s} s")


_HANDSHAKE = PeerStream._receive_late_handshake
_CONTROL: dict[type, Callable[[Any, Any], None]] = {
    Hello: _HANDSHAKE,
    Welcome: _HANDSHAKE,
    Ping: PeerStream._receive_ping,
    Pong: PeerStream._receive_pong,
    Bye: PeerStream._receive_bye,
}

DraftStream = PeerStream[DraftMessage, TargetMessage]  # the draft's end
TargetStream = PeerStream[TargetMessage, DraftMessage]  # the target's end
