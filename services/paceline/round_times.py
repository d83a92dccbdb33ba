"""Where the time of one round went: every instant belongs to exactly one stage. Pure.

Knows neither clocks nor units: times are integers of any one clock and any one unit. A target
computes it from what it has seen, the trace viewer from spans.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from heapq import heappop, heappush
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
    for stage, starts, ends in segments(begin, end, intervals):
        times[stage] += ends - starts
    return RoundTimes(max(0, end - begin), *times)


def segments(begin: int, end: int, intervals: Iterable[Interval]) -> list[Interval]:
    """The same as a line: adjoining intervals from `begin` to `end`, in order, none empty.

    One sweep over them, since whoever sends much must not make us compute long.
    """
    coming = [each for each in intervals if each[1] < each[2] and each[0] != Stage.WINDOW]
    coming.sort(key=_start, reverse=True)
    nothing = (Stage.WINDOW, begin, end)
    here: list[Interval] = []  # a heap: what has begun, the winner first
    line: list[Interval] = []
    last, moment = None, begin
    while moment < end:
        while coming and coming[-1][1] <= moment:
            heappush(here, coming.pop())
        while here and here[0][2] <= moment:
            heappop(here)
        winner = here[0] if here else nothing
        until = min(end, winner[2])
        if coming:
            until = min(until, coming[-1][1])
        began = line.pop()[1] if winner is last else moment
        line.append((winner[0], began, until))
        last, moment = winner, until
    return line


def _start(interval: Interval) -> int:
    return interval[1]
