"""How far apart two monotonic clocks are, from pings. Pure: all times are arguments."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One ping. `offset_us` is the peer's clock minus ours, wrong by at most half of `rtt_us`."""

    rtt_us: int
    offset_us: int


class ClockOffset:
    """The sample with the least round trip among the last `window` ones, as NTP's clock filter.

    Queueing only ever lengthens a round trip, so the fastest one has the least of it in it; the
    window lets the estimate follow a drifting clock or a changed route.
    """

    def __init__(self, window: int = WINDOW_SAMPLES) -> None:
        self._samples: deque[ClockSample] = deque(maxlen=window)
        self._best: ClockSample | None = None

    def receive_pong(self, sent_us: int, peer_us: int, now_us: int) -> None:
        """`sent_us` and `now_us` are our clock at ping and pong, `peer_us` the peer's between."""
        if now_us < sent_us:
            raise ValueError(f"the pong came before its ping: {now_us} < {sent_us}")
        midpoint_us = (sent_us + now_us) // 2
        self._samples.append(ClockSample(now_us - sent_us, peer_us - midpoint_us))
        self._best = min(self._samples, key=lambda sample: sample.rtt_us)

    @property
    def rtt_us(self) -> int | None:
        """Least recent round trip, None before the first pong."""
        return None if self._best is None else self._best.rtt_us

    @property
    def offset_us(self) -> int | None:
        """The peer's clock minus ours, None before the first pong."""
        return None if self._best is None else self._best.offset_us

    def to_local_us(self, peer_us: int) -> int | None:
        """The time on our clock when the peer's showed `peer_us`, None before the first pong."""
        return None if self._best is None else peer_us - self._best.offset_us
