"""Samples and what a report says of them: mean, percentiles, the spread of a ratio.

Pure. Percentiles are Hyndman and Fan's type 7, numpy's default: linear between the two nearest
ranks. Knows no clock, no HTTP and no units.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

# Of one kind; beyond it a uniform sample of so many stands for all (reservoir sampling).
MAX_SAMPLES = 2_000_000
SHOWN_PERCENTILES = (50, 90, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in rising order; 0 is the least, 100 the greatest. ValueError without values."""
    if not ordered:
        raise ValueError("no values have no percentile")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile lies in [0, 100], not at {percent}")
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Samples:
    """Values in no order. The count and the mean are exact, percentiles those of what is kept."""

    def __init__(self, max_samples: int = MAX_SAMPLES, seed: int = 0) -> None:
        self._max_samples = max_samples
        self._random = Random(seed)
        self._kept = array("d")
        self.total = 0.0
        self.count = 0

    def add(self, value: float, times: int = 1) -> None:
        for _ in range(times):
            self.count += 1
            self.total += value
            if len(self._kept) < self._max_samples:
                self._kept.append(value)
            elif (place := self._random.randrange(self.count)) < self._max_samples:
                self._kept[place] = value

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def summary(self, scale: float = 1.0) -> dict[str, Any]:
        """count, mean, p50, p90, p99 and max, times `scale`; null where there is no sample."""
        ordered = sorted(self._kept)
        figures: dict[str, float | None] = {"mean": self.mean}
        for percent in SHOWN_PERCENTILES:
            figures[f"p{percent}"] = percentile(ordered, percent) if ordered else None
        figures["max"] = ordered[-1] if ordered else None
        return {"count": self.count} | {
            name: None if value is None else round(value * scale, 4)
            for name, value in figures.items()
        }

    def quantiles(self, scale: float = 1.0) -> list[float]:
        """Percentiles 0, 1, ... 100, times `scale`: a CDF to draw. Empty without samples."""
        ordered = sorted(self._kept)
        if not ordered:
            return []
        return [round(percentile(ordered, percent) * scale, 4) for percent in range(101)]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and greatest of the same figure from several runs; nulls without any."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "median": None, "min": None, "max": None}
    return {
        "count": len(ordered),
        "median": round(percentile(ordered, 50), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
    }


def ratio(numerator: float, denominator: float) -> float | None:
    """Rounded for a report; null where there is nothing to divide by."""
    return round(numerator / denominator, 6) if denominator else None
