"""A lookahead policy without sense: whatever a policy may decide, this one does at some time.

It rests and wakes, gives small credits after large ones, changes its mind about branches and cuts
windows at random. Nothing of it may show in a text. It does not look at tokens, as no policy may.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from paceline.protocol.lookahead import (
    Grant,
    LookaheadLimits,
    LookaheadPolicy,
    SequenceLookahead,
    Window,
)
from paceline.target.scheduler import Scheduler
from paceline.testing.scenario import Scenario

REST_SHARE = 0.3
MAX_MOOD = 10  # grants for which it stays with resting or not
CUT_SHARE = 0.4


class RandomLookahead(LookaheadPolicy):
    """`is_calm`: from then on it grants all that it may, and cuts nothing."""

    def __init__(self, limits: LookaheadLimits, rng: Random) -> None:
        super().__init__(limits)
        self._rng = rng
        self.is_calm = False
        self._is_resting = False
        self._mood_left = 0

    def plan(self, windows: Sequence[Window], num_other_rows: int, max_rows: int) -> list[int]:
        counts = super().plan(windows, num_other_rows, max_rows)
        if self.is_calm:
            return counts
        rng = self._rng
        return [rng.randrange(n + 1) if rng.random() < CUT_SHARE else n for n in counts]

    def grant(self, lookahead: SequenceLookahead) -> Grant:
        most = super().grant(lookahead).draft_ahead
        if self.is_calm or not most:
            return Grant(most, self.limits.max_fan_out if most else 0)
        rng = self._rng
        if self._mood_left == 0:
            self._is_resting = rng.random() < REST_SHARE
            self._mood_left = rng.randrange(1, MAX_MOOD)
        self._mood_left -= 1
        if self._is_resting:
            lookahead.cap = 0
            return Grant(0)
        draft_ahead = rng.choice((1, rng.randrange(1, most + 1), most, most, most))
        return Grant(draft_ahead, rng.randrange(self.limits.max_fan_out + 1))


def take_over(scheduler: Scheduler, scenario: Scenario, life: int, *, is_calm: bool) -> None:
    """The scheduler of one life of a target gets this policy, if the scenario wants that."""
    if scenario.lookahead == "random":
        policy = RandomLookahead(scheduler.policy.limits, Random(scenario.seed * 1000 + life))
        policy.is_calm = is_calm
        scheduler.policy = scheduler.drafts._policy = scheduler.local.policy = policy


def calm(scheduler: Scheduler) -> None:
    if isinstance(scheduler.policy, RandomLookahead):
        scheduler.policy.is_calm = True
