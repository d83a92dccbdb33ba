"""When texts are not looked up, as nothing that is found would be verified. Pure.

A lookup costs the target's time before a pass, and so does telling it what is committed. Where the
deal rests, or a class of sequences is worth no row, its sequences go without both, but for trials:
a few of them for a few passes, twice as rare each time. Their guesses are compared with the text
at no cost, so that a class which has become good is found again. It knows no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.protocol.acceptance_model import AcceptanceClass
from paceline.protocol.lookahead import LookaheadPolicy
from paceline.protocol.lookahead_types import SequenceLookahead

# Passes of a class that rests until its next trial, twice as many after each.
FIRST_REST, MAX_REST = 16, 256
# Passes with a lookup that a trial has, beyond the last one that found what was right.
TRIAL_PASSES = 8
MAX_SCOUTS = 4  # sequences that take part in a trial
MAX_REST_CLASSES = 64  # of which something is known; one more, and all begin anew


@dataclass(slots=True)
class _Rest:
    """Of one class, as of pass `num_passes`. `scouts`: when each was last asked for."""

    num_passes: int = -1
    is_resting: bool = False
    is_hopeless: bool = False
    num_rested: int = 0
    interval: int = FIRST_REST
    trial_left: int = 0
    has_looked: bool = False
    scouts: dict[int, int] = field(default_factory=dict)


class LookupRests:
    """Of one target. `num_trials`: since start."""

    def __init__(self, policy: LookaheadPolicy) -> None:
        self.policy = policy
        self.num_trials = 0
        self._rests: dict[AcceptanceClass, _Rest] = {}

    def may_look(
        self, lookahead: SequenceLookahead, sequence_id: int, num_passes: int, can_scout: bool
    ) -> bool:
        """Whether the sequence is to look its text up for the next pass, after `num_passes`.
        `can_scout`: the next pass could verify what is found."""
        if self.policy.is_fixed(lookahead):
            return True
        rest = self._rests.get(lookahead.key)
        if rest is None:
            if len(self._rests) >= MAX_REST_CLASSES:
                self._rests.clear()
            rest = self._rests[lookahead.key] = _Rest()
        if rest.num_passes != num_passes:
            self._begin(rest, lookahead, num_passes)
        if not rest.is_resting:
            return True
        if not self.policy.profit.deal.is_resting and self.policy.aim(lookahead):
            return True  # it fares better than its class
        if not (rest.trial_left and can_scout):
            return False
        if sequence_id not in rest.scouts and len(rest.scouts) >= MAX_SCOUTS:
            return False
        rest.scouts[sequence_id] = num_passes
        return True

    def look(self, lookahead: SequenceLookahead) -> None:
        """One that `may_look` has looked its whole text up."""
        rest = self._rests.get(lookahead.key)
        if rest is not None:
            rest.has_looked = True

    def learn(self, lookahead: SequenceLookahead, num_right: int) -> None:
        """So many of its guesses were right: where that can change something, the trial goes on."""
        rest = self._rests.get(lookahead.key)
        if rest is not None and rest.is_hopeless and rest.trial_left and num_right:
            rest.trial_left = TRIAL_PASSES + 1

    def _begin(self, rest: _Rest, lookahead: SequenceLookahead, num_passes: int) -> None:
        """The first question of its class for a pass."""
        rest.is_hopeless = self._is_hopeless(lookahead)
        rest.is_resting = rest.is_hopeless or self.policy.profit.deal.is_resting
        last, rest.num_passes = rest.num_passes, num_passes
        has_looked, rest.has_looked = rest.has_looked, False
        if not rest.is_resting:
            rest.num_rested = rest.trial_left = 0
            rest.interval = FIRST_REST
            rest.scouts.clear()
        elif rest.trial_left:
            rest.scouts = {i: asked for i, asked in rest.scouts.items() if asked >= last}
            rest.trial_left -= has_looked
        else:
            rest.num_rested += 1
            if rest.num_rested >= rest.interval:
                rest.num_rested, rest.interval = 0, min(MAX_REST, 2 * rest.interval)
                rest.trial_left = TRIAL_PASSES
                rest.scouts.clear()
                self.num_trials += 1

    def _is_hopeless(self, lookahead: SequenceLookahead) -> bool:
        """Whether an average sequence of the class has nothing that is worth a row."""
        if not self.policy.ceiling(lookahead) or self.policy.profit.deal.is_resting:
            return False
        self.policy.aim(lookahead)
        profile = lookahead.profile
        if profile is None:
            return False
        return self.policy.aim(lookahead, profile.survivals(profile.mean)) == 0
