"""Where the time of one round went: every instant belongs to exactly one stage. Pure.

Knows neither clocks nor units: times are integers of any one clock and any one unit. A target
computes it from what it has seen, the trace viewer from spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class Stage(IntEnum):
    """In the order of precedence: where two overlap, the round was in the one named first."""

    SAMPLE = 0
    VERIFY = 1
    QUEUE = 2
    WIRE_OUT = 3
    DRAFT = 4
    REWIND = 5
    WIRE_BACK = 6
    WINDOW = 7  # whatever no other explains

    @property
    def span_name(self) -> str:
        return self.name.lower()


STAGE_OF_SPAN = {stage.span_name: stage for stage in Stage}

# A stage, its begin and its end.
Interval = tuple[Stage, int, int]


class RoundTimes(NamedTuple):
    """Invariant: none is negative, and all but `wall` add up to `wall` exactly."""

    wall: int
    sample: int
    verify: int
    queue: int
    wire_out: int
    draft: int
    rewind: int
    wire_back: int
    window: int


def partition(begin: int, end: int, intervals: Iterable[Interval]) -> RoundTimes:
    """How long a round over [begin, end) was in each stage. Intervals may overlap each other, stick
    out of the round, be empty or run backwards (then they count for nothing)."""
    times = [0] * len(Stage)
    wall = left = max(0, end - begin)
    free = [(begin, end)]
    for stage, starts, ends in sorted(intervals):
        if not left:
            break
        if stage is Stage.WINDOW:
            continue
        taken = _take(free, starts, ends)
        times[stage] += taken
        left -= taken
    times[Stage.WINDOW] = left
    return RoundTimes(wall, *times)


def segments(begin: int, end: int, intervals: Iterable[Interval]) -> list[Interval]:
    """The same as a line: adjoining intervals from `begin` to `end`, in order, none empty."""
    free = [(begin, end)] if end > begin else []
    line: list[Interval] = []
    for stage, starts, ends in sorted(intervals):
        if stage is Stage.WINDOW:
            continue
        pieces = [(max(a, starts), min(b, ends)) for a, b in free]
        line += [(stage, a, b) for a, b in pieces if a < b]
        _take(free, starts, ends)
    line += [(Stage.WINDOW, a, b) for a, b in free]
    line.sort(key=lambda piece: piece[1])
    return line


def _take(free: list[tuple[int, int]], starts: int, ends: int) -> int:
    """Remove [starts, ends) from the free pieces; returns how much of it was free."""
    taken = 0
    for index in range(len(free) - 1, -1, -1):
        a, b = free[index]
        if starts >= b or ends <= a or starts >= ends:
            continue
        low, high = max(a, starts), min(b, ends)
        taken += high - low
        free[index : index + 1] = [piece for piece in ((a, low), (high, b)) if piece[0] < piece[1]]
    return taken
