"""How likely proposals are to be accepted: by class and position, and by request. Pure.

A class is a draft model, a mode and a temperature. Its discounted counts give a mean, and how much
better or worse each position of a window fares than that mean. A sequence has two discounted
counts of its own that are drawn to the mean of its class while it is young.
Both together give survivals: the probability that a proposal is accepted, with all before it.

Only positions that were reached teach something (censoring): behind a rejection nobody knows. The
file knows no costs, no passes and no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from paceline.sampling.params import VerificationMode

# Positions of a window that are told apart; those behind them fare like the last.
MAX_POSITIONS = 16
# Classes that are remembered; the one used longest ago is forgotten first, and its sequences start
# from the prior again.
MAX_CLASSES = 64
# Rounds of a class that may pass before its survivals are made anew.
REFRESH_ROUNDS = 32
# Rounds of resting sequences of a class between two probes.
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 16, 256

_DECAY_EVERY = 32  # rounds; often enough, and cheap
_SLOW_DECAY = 0.5 ** (_DECAY_EVERY / 2000)  # the shape over positions: half-life 2000 rounds
_FAST_DECAY = 0.5 ** (_DECAY_EVERY / 256)  # the mean: half-life 256 rounds
_RESTING_WEIGHT = 16.0  # most evidence for the mean of a class that rests
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 2.0
_MAX_GUIDANCE_WEIGHT = 64.0  # of the fleet's counts: what is seen here soon counts for more
_SHAPE_WEIGHT = 16.0  # reached positions that a ratio of 1 is worth
_MIN_HAZARD, _MAX_HAZARD = 0.005, 0.99  # low enough that no row pays for nothing
_NUM_BINS = 200  # of the acceptance rate: sequences in one bin share their survivals


@dataclass(frozen=True, slots=True)
class AcceptanceClass:
    """Sequences whose proposals are expected to fare alike: same draft, mode and temperature.

    `temperature` is rounded by `of`, so that there are few classes. `draft_model` "": it has none
    yet.
    """

    draft_model: str
    mode: VerificationMode
    temperature: float

    @staticmethod
    def of(draft_model: str, mode: VerificationMode, temperature: float) -> AcceptanceClass:
        return AcceptanceClass(draft_model, mode, round(4 * temperature) / 4)


@dataclass(frozen=True, slots=True)
class ClassCounts:
    """Discounted counts of one class: proposals at position k (0-based) of a window that were
    verified with all before them accepted (`reached`), and those that were `accepted`."""

    reached: tuple[float, ...]
    accepted: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Survivals:
    """`negatives[k]` is minus the probability that proposals 0..k are all accepted (rising, so that
    `bisect` works on it); `sums[k]` the expected accepted tokens of k proposals."""

    negatives: tuple[float, ...]
    sums: tuple[float, ...]
    alpha: float


@dataclass(slots=True)
class RestProbes:
    """When a class that rests is tried again: after so many rounds of its sequences, one sequence
    for a few passes. Probes that lose become rare, one that wins makes them frequent again."""

    first: int = MIN_PROBE_INTERVAL
    interval: int = 0  # 0: `first`
    num_rested: int = 0

    def rest(self) -> bool:
        """A sequence has rested for a round; True when it is to probe."""
        self.num_rested += 1
        self.interval = self.interval or self.first
        if self.num_rested < self.interval:
            return False
        self.num_rested = 0
        self.interval = min(MAX_PROBE_INTERVAL, 2 * self.interval)
        return True

    def win(self) -> None:
        self.interval = self.first


@dataclass(slots=True)
class ClassProfile:
    """What is known of one class. `version` rises when its survivals have changed."""

    length: int
    reached: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    recent_reached: float = 0.0
    recent_accepted: float = 0.0
    prior: ClassCounts | None = None
    version: int = 0
    mean: float = _PRIOR_RATE
    probes: RestProbes = field(default_factory=RestProbes)
    _num_rounds: int = 0
    _num_stale: int = 0
    _ratios: tuple[float, ...] = (1.0,) * MAX_POSITIONS
    _tables: dict[int, Survivals] = field(default_factory=dict)

    def update(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """One round in which `num_draft_tokens` (>= 1) were verified."""
        num_reached = min(num_draft_tokens, num_accepted_tokens + 1)
        num_right = min(num_draft_tokens, num_accepted_tokens)
        for position in range(min(num_reached, MAX_POSITIONS)):
            self.reached[position] += 1.0
            if position < num_right:
                self.accepted[position] += 1.0
        self.recent_reached += num_reached
        self.recent_accepted += num_right
        self._num_rounds += 1
        if self._num_rounds % _DECAY_EVERY == 0:
            self._decay()
        self._num_stale += 1
        # The first rounds teach the most.
        if self._num_stale >= REFRESH_ROUNDS or self._num_rounds <= REFRESH_ROUNDS:
            self.refresh()

    def forget(self) -> None:
        """Its sequences rest: the mean must not be older news than probes can overrule."""
        if self.recent_reached > _RESTING_WEIGHT:
            self.recent_accepted *= _RESTING_WEIGHT / self.recent_reached
            self.recent_reached = _RESTING_WEIGHT

    def _decay(self) -> None:
        self.reached = [_SLOW_DECAY * count for count in self.reached]
        self.accepted = [_SLOW_DECAY * count for count in self.accepted]
        self.recent_reached *= _FAST_DECAY
        self.recent_accepted *= _FAST_DECAY

    def refresh(self) -> None:
        """Take what was counted into account."""
        self._num_stale = 0
        prior_rate, prior_weight, reached, accepted = self._with_prior()
        self.mean = (self.recent_accepted + prior_weight * prior_rate) / (
            self.recent_reached + prior_weight
        )
        mean = (sum(accepted) + prior_weight * prior_rate) / (sum(reached) + prior_weight)
        mean = min(max(mean, _MIN_HAZARD), _MAX_HAZARD)
        self._ratios = tuple(
            (right + _SHAPE_WEIGHT * mean) / ((seen + _SHAPE_WEIGHT) * mean)
            for seen, right in zip(reached, accepted, strict=True)
        )
        self._tables.clear()
        self.version += 1

    def _with_prior(self) -> tuple[float, float, list[float], list[float]]:
        """The prior of the mean and its weight; the counts with the fleet's added."""
        reached, accepted = list(self.reached), list(self.accepted)
        total = 0.0 if self.prior is None else sum(self.prior.reached)
        if self.prior is None or total <= 0.0:
            return _PRIOR_RATE, _PRIOR_WEIGHT, reached, accepted
        scale = min(1.0, _MAX_GUIDANCE_WEIGHT / total)
        pairs = zip(self.prior.reached, self.prior.accepted, strict=False)
        for position, (seen, right) in enumerate(pairs):
            if position < MAX_POSITIONS:
                reached[position] += scale * seen
                accepted[position] += scale * right
        fleet = sum(self.prior.accepted) / total
        weight = scale * total
        rate = (weight * fleet + _PRIOR_WEIGHT * _PRIOR_RATE) / (weight + _PRIOR_WEIGHT)
        return rate, weight + _PRIOR_WEIGHT, reached, accepted

    def survivals(self, alpha: float) -> Survivals:
        """Of a sequence with the acceptance rate `alpha`; the same object for about the same."""
        index = int(alpha * _NUM_BINS + 0.5)
        table = self._tables.get(index)
        if table is None:
            table = self._tables[index] = self._make(index / _NUM_BINS)
        return table

    def _make(self, alpha: float) -> Survivals:
        last = MAX_POSITIONS - 1
        hazards = (
            min(max(alpha * self._ratios[min(k, last)], _MIN_HAZARD), _MAX_HAZARD)
            for k in range(self.length)
        )
        values = tuple(accumulate(hazards, mul))
        return Survivals(
            tuple(-value for value in values), tuple(accumulate(values, initial=0.0)), alpha
        )

    def counts(self) -> ClassCounts:
        return ClassCounts(tuple(self.reached), tuple(self.accepted))


class AcceptanceModel:
    """All classes that a target has met, at most `MAX_CLASSES`."""

    def __init__(self, length: int) -> None:
        """`length`: survivals that are wanted (the largest K)."""
        self.length = length
        self._profiles: dict[AcceptanceClass, ClassProfile] = {}
        self._priors: dict[AcceptanceClass, ClassCounts] = {}

    def __len__(self) -> int:
        return len(self._profiles)

    def profile(self, key: AcceptanceClass) -> ClassProfile:
        """The class's; a sequence without a draft borrows the one used last that is like it."""
        if not key.draft_model:
            for known in reversed(self._profiles):
                if (known.mode, known.temperature) == (key.mode, key.temperature):
                    return self._profiles[known]
        profile = self._profiles.pop(key, None)
        if profile is None:
            profile = ClassProfile(self.length, prior=self._priors.get(key))
            profile.refresh()
        self._profiles[key] = profile
        if len(self._profiles) > MAX_CLASSES:
            del self._profiles[next(iter(self._profiles))]
        return profile

    def set_length(self, length: int) -> None:
        self.length = length
        for profile in self._profiles.values():
            profile.length = length
            profile.refresh()

    def set_priors(self, priors: Mapping[AcceptanceClass, ClassCounts]) -> None:
        """The fleet's counts, without ours; at most `MAX_CLASSES` of them are kept."""
        self._priors = dict(list(priors.items())[:MAX_CLASSES])
        for key, profile in self._profiles.items():
            profile.prior = self._priors.get(key)
            profile.refresh()

    def counts(self) -> dict[AcceptanceClass, ClassCounts]:
        """What was seen here, without priors; classes of which nothing was seen are left out."""
        return {
            key: profile.counts()
            for key, profile in self._profiles.items()
            if profile.recent_reached and key.draft_model
        }
