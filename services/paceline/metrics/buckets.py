"""A histogram in a hot path: observing bumps one int and one sum. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Buckets:
    """Counts per bucket, not cumulative; the last one is for what is above every bound.

    Invariant: len(counts) == len(bounds) + 1.
    """

    bounds: tuple[float, ...]
    counts: list[float] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def value(self) -> tuple[float, ...]:
        """As in a snapshot: the sum, then the counts."""
        return (self.total, *self.counts)
