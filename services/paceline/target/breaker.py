"""Whether a draft may be given sequences: a circuit breaker per draft, as a table. Pure.

A draft that fails `rpc.breaker_failures` times in a row is DARK: it gets nothing new. When its
time is over one sequence probes it; a proposal of use closes the breaker, another failure makes
it dark again, for twice as long. What a dark draft serves already goes on. This file does not
know links, sequences or what a failure is; time is an argument (monotonic microseconds).
"""

from __future__ import annotations

from enum import StrEnum

from paceline.config import RpcConfig
from paceline.errors import LocalProtocolError

_US = 1_000_000
# Drafts that a target remembers, by replica id: those of its streams and some that have left.
# Invariant: > the streams that may live at a time in any sensible configuration; one forgotten
# too early is tried again too early, which costs a sequence its draft for a while.
MAX_BREAKERS = 1024


class BreakerState(StrEnum):
    CLOSED = "closed"  # healthy: takes sequences
    DARK = "dark"  # takes none until its time is over, then one
    PROBING = "probing"  # one sequence finds out


class BreakerEvent(StrEnum):
    TRIPPED = "tripped"
    PROBE = "probe"
    ABANDONED = "abandoned"  # the probing sequence ended without an answer
    KEPT = "kept"


TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIPPED): BreakerState.DARK,
    (BreakerState.DARK, BreakerEvent.TRIPPED): BreakerState.DARK,  # it broke a rule once more
    (BreakerState.DARK, BreakerEvent.PROBE): BreakerState.PROBING,
    (BreakerState.PROBING, BreakerEvent.TRIPPED): BreakerState.DARK,
    (BreakerState.PROBING, BreakerEvent.ABANDONED): BreakerState.DARK,
    (BreakerState.PROBING, BreakerEvent.KEPT): BreakerState.CLOSED,
}


def next_state(state: BreakerState, event: BreakerEvent) -> BreakerState:
    """The state after `event`. Raises `LocalProtocolError` for a move that is not in the table."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LocalProtocolError(f"breaker cannot take {event} in state {state}") from None


class Breaker:
    """One draft's. Methods that return a bool say whether the state has changed."""

    def __init__(self, config: RpcConfig) -> None:
        self.state = BreakerState.CLOSED
        self._max_failures = config.breaker_failures
        self._min_us = int(config.breaker_min_s * _US)
        self._max_us = int(config.breaker_max_s * _US)
        self._num_failures = 0  # in a row
        self._pause_us = 0  # the last one
        self._dark_until_us = 0
        self._closed_us = 0
        self._probe_id: int | None = None

    def may_open(self, now_us: int) -> bool:
        """Whether the draft may be given one more sequence."""
        if self.state is BreakerState.DARK:
            return now_us >= self._dark_until_us
        return self.state is BreakerState.CLOSED

    def open(self, session_id: int) -> bool:
        """The draft is given a sequence, which `may_open` allowed; True when it is the probe."""
        if self.state is BreakerState.CLOSED:
            return False
        self._move(BreakerEvent.PROBE)
        self._probe_id = session_id
        return True

    def keep(self, now_us: int) -> bool:
        """A proposal of use has come: whatever there was, it works."""
        self._num_failures = 0
        if self.state is not BreakerState.PROBING:
            return False
        self._move(BreakerEvent.KEPT)
        self._probe_id, self._closed_us = None, now_us
        return True

    def fail(self, session_id: int | None, now_us: int) -> bool:
        """The draft has failed a sequence (None: all that it serves).

        While it is dark, or probed by another sequence, that is no news.
        """
        if self.state is BreakerState.CLOSED:
            self._num_failures += 1
            if self._num_failures < self._max_failures:
                return False
        elif self.state is BreakerState.DARK or session_id not in (None, self._probe_id):
            return False
        self.trip(now_us)
        return True

    def trip(self, now_us: int) -> None:
        """Dark at once. One that falls again soon after it was closed goes on doubling."""
        is_soon = self.state is not BreakerState.CLOSED or now_us - self._closed_us < self._max_us
        doubled = min(self._max_us, 2 * self._pause_us)
        self._pause_us = doubled if self._pause_us and is_soon else self._min_us
        self._move(BreakerEvent.TRIPPED)
        self._dark_until_us = now_us + self._pause_us
        self._num_failures, self._probe_id = 0, None

    def release(self, session_id: int) -> None:
        """The draft has a sequence no more. If that was the probe, the next one is."""
        if session_id == self._probe_id:
            self._move(BreakerEvent.ABANDONED)
            self._probe_id = None

    def _move(self, event: BreakerEvent) -> None:
        self.state = next_state(self.state, event)


class Breakers:
    """By replica id, so that hanging up and dialling again clears nothing. At most `MAX_BREAKERS`;
    the one asked for longest ago is forgotten first."""

    def __init__(self, config: RpcConfig) -> None:
        self._config = config
        self._breakers: dict[str, Breaker] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def get(self, replica_id: str) -> Breaker:
        breaker = self._breakers.pop(replica_id, None) or Breaker(self._config)
        self._breakers[replica_id] = breaker
        if len(self._breakers) > MAX_BREAKERS:
            del self._breakers[next(iter(self._breakers))]
        return breaker
