"""Virtual time: a queue of actions, each at a microsecond. Ties run in the order they were made.

Nothing waits for real time and nothing runs by itself; the owner calls `run_next`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

Action = Callable[[], None]


class VirtualClock:
    """Starts at 0 and moves only when an action is run."""

    def __init__(self) -> None:
        self.now_us = 0
        self._queue: list[tuple[int, int, Action]] = []
        self._num_made = 0

    def __len__(self) -> int:
        return len(self._queue)

    def call_after(self, delay_us: int, action: Action) -> None:
        self.call_at(self.now_us + delay_us, action)

    def call_at(self, at_us: int, action: Action) -> None:
        """Run `action` at `at_us`, or at once if that has passed."""
        self._num_made += 1
        heappush(self._queue, (max(at_us, self.now_us), self._num_made, action))

    def run_next(self) -> bool:
        """Advance to the next action and run it; False when there is none."""
        if not self._queue:
            return False
        self.now_us, _, action = heappop(self._queue)
        action()
        return True


@dataclass(frozen=True, slots=True)
class LocalClock:
    """One process's clock: its own zero, and its own rate in thousandths of the true one.

    Nobody may compare two of them; only differences of one mean anything.
    """

    clock: VirtualClock
    offset_us: int = 0
    permille: int = 1000

    @property
    def now_us(self) -> int:
        return self.offset_us + self.clock.now_us * self.permille // 1000

    def call_at(self, at_us: int, action: Action) -> None:
        """Run `action` as soon as this clock shows `at_us`."""
        since_us = at_us - self.offset_us
        self.clock.call_at(-(-since_us * 1000 // self.permille), action)
