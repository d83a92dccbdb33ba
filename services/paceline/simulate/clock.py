"""The virtual clock: what is due, in order of time and then of asking. Times in microseconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Calls what was asked for at its time; `now_us` never goes back."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_asked = 0

    def at(self, time_us: float, call: Callable[[float], None]) -> None:
        """`call` gets the time, which is not before now."""
        self._num_asked += 1
        heapq.heappush(self._due, (max(time_us, self.now_us), self._num_asked, call))

    def run(self, until_us: float) -> None:
        """Everything that is due before `until_us`."""
        due = self._due
        while due and due[0][0] < until_us:
            self.now_us, _, call = heapq.heappop(due)
            call(self.now_us)
        self.now_us = until_us
