"""What a run measured: latencies in a histogram, sums, and the row that a report shows.

Only what happens between the end of the warm-up and the end of the run counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from paceline.simulate.places import Floats

_RATIO = 1.01  # of a bucket's ends: percentiles are right within half a percent
_NUM_BUCKETS = 2800  # up to more than 10^6 s
_BUFFERED = 1 << 14
PERCENTS = (50, 90, 99)


class Histogram:
    """Times in microseconds, in buckets of 1 %."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._buffer: list[Floats] = []
        self._num_buffered = 0

    def add(self, values: Floats) -> None:
        self._buffer.append(values)
        self._num_buffered += len(values)
        if self._num_buffered >= _BUFFERED:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            values = np.maximum(np.concatenate(self._buffer), 1.0)
            index = np.minimum(np.log(values) / math.log(_RATIO), _NUM_BUCKETS - 1)
            self._counts += np.bincount(index.astype(np.int64), minlength=_NUM_BUCKETS)
        self._buffer, self._num_buffered = [], 0

    @property
    def count(self) -> int:
        self._flush()
        return int(self._counts.sum())

    def percentile_ms(self, percent: float) -> float | None:
        """None without values."""
        count = self.count
        if not count:
            return None
        rank = max(1, math.ceil(count * percent / 100))
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(_RATIO ** (index + 0.5)) / 1000.0

    def summary(self) -> dict[str, float | None]:
        """p50, p90 and p99 in milliseconds."""
        shown = {f"p{percent}": self.percentile_ms(percent) for percent in PERCENTS}
        return {name: None if ms is None else round(ms, 3) for name, ms in shown.items()}


@dataclass(slots=True)
class Metrics:
    """Sums over the measured time [from_us, to_us]. `num_rounds` are sequences' shares of decode
    passes; `num_good` requests kept the SLO, `num_good_tokens` are their tokens."""

    from_us: float
    to_us: float
    ttft_limit_us: float
    tpot_limit_us: float
    num_tokens: int = 0
    num_rounds: int = 0
    num_round_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_passes: int = 0
    num_rows: int = 0
    num_finished: int = 0
    num_good: int = 0
    num_good_tokens: int = 0
    num_refused: int = 0
    num_preemptions: int = 0
    target_busy_us: float = 0.0
    draft_busy_us: float = 0.0
    num_steps: int = 0
    num_drafted: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per sequence and decode pass; 0 before the first."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 0.0

    def is_measured(self, now_us: float) -> bool:
        return self.from_us < now_us <= self.to_us

    def overlap_us(self, start_us: float, end_us: float) -> float:
        """The part of [start_us, end_us] that is measured."""
        return max(0.0, min(end_us, self.to_us) - max(start_us, self.from_us))

    def finish(self, arrival_us: Floats, first_us: Floats, now_us: float, lengths: Floats) -> None:
        """Requests of `lengths` output tokens have ended."""
        self.e2e.add(now_us - arrival_us)
        ttft_us = first_us - arrival_us
        tpot_us = (now_us - first_us) / np.maximum(lengths - 1, 1)
        good = (ttft_us <= self.ttft_limit_us) & (tpot_us <= self.tpot_limit_us)
        self.num_finished += len(lengths)
        self.num_good += int(good.sum())
        self.num_good_tokens += int(lengths[good].sum())
