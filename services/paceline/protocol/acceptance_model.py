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

from paceline.methods import LOCAL_SOURCES
from paceline.sampling.params import VerificationMode

# Positions of a window that are told apart; those behind them fare like the last.
MAX_POSITIONS = 16
# Classes that are remembered; the one used longest ago is forgotten first, and its sequences start
# from the prior again.
MAX_CLASSES = 64
_BY = " by "
_MAX_NAME_CHARS = 256  # what a report to the Controller may have
# Rounds of a class that may pass before the shape of its survivals is made anew.
REFRESH_ROUNDS = 512
# Rounds of resting sequences of a class between two probes, and most passes between them.
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 16, 192
MAX_PROBE_PASSES = 48
_ROUNDS_PER_PASS = 12  # more do not count: large batches are not to probe all the time

_DECAY_EVERY = 32  # rounds; often enough, and cheap
_SLOW_DECAY = 0.5 ** (_DECAY_EVERY / 2000)  # the shape over positions: half-life 2000 rounds
_FAST_DECAY = 0.5 ** (_DECAY_EVERY / 256)  # the mean: half-life 256 rounds
_MAX_RECENT = 96.0  # positions: long windows and large batches must not make the mean slower
_MEAN_STEP = 0.02  # of the mean: sequences that learn nothing of their own hear of it
_RESTING_WEIGHT = 16.0  # most evidence for the mean of a class that rests
_PRIOR_RATE = 0.7
_PRIOR_WEIGHT = 2.0
_MAX_GUIDANCE_WEIGHT = 64.0  # of the fleet's counts: what is seen here soon counts for more
_FLEET_ROUNDS = 64  # own rounds after which they count half for the mean
_SHAPE_WEIGHT = 16.0  # reached positions that a ratio of 1 is worth
_MIN_HAZARD, _MAX_HAZARD = 0.005, 0.99  # low enough that no row pays for nothing
_NUM_BINS = 200  # of the acceptance rate: sequences in one bin share their survivals


@dataclass(frozen=True, slots=True)
class AcceptanceClass:
    """Sequences whose proposals are expected to fare alike: same draft, mode and temperature, and
    the same adapter of the target, which `of` makes part of the draft's name.

    `temperature` is rounded by `of`, so that there are few classes. `draft_model` "": it has none
    yet.
    """

    draft_model: str
    mode: VerificationMode
    temperature: float

    @property
    def is_local(self) -> bool:
        """Whether a source inside the target stands in the place of a draft."""
        return self.draft_model.rpartition(_BY)[2] in LOCAL_SOURCES

    @staticmethod
    def of(
        draft_model: str, mode: VerificationMode, temperature: float, adapter: str = ""
    ) -> AcceptanceClass:
        if draft_model and adapter:
            adapter = adapter[: max(0, _MAX_NAME_CHARS - len(_BY) - len(draft_model))]
            draft_model = f"{adapter}{_BY}{draft_model}"[:_MAX_NAME_CHARS]
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
    """When a class (or a sequence) that rests is tried again: after so many rounds of its
    sequences, one of them for a few passes. Probes that lose become rare, one that wins makes them
    frequent again."""

    first: int = MIN_PROBE_INTERVAL
    interval: int = 0  # 0: `first`
    _last: int = -2  # the last pass in which it rested
    _begin: int = 0  # the pass since which rounds are counted
    _num_rounds: int = 0

    def rest(self, num_passes: int) -> bool:
        """A sequence rests, after so many passes in all; True when it is to probe."""
        self.interval = self.interval or self.first
        if num_passes - self._last > 1:  # it did not rest in the last one
            self._begin, self._num_rounds = num_passes, 0
        self._last = num_passes
        self._num_rounds += 1
        passes = num_passes - self._begin
        is_due = self._num_rounds >= self.interval and passes >= self.interval // _ROUNDS_PER_PASS
        if not is_due and passes < MAX_PROBE_PASSES:
            return False
        self.interval = min(MAX_PROBE_INTERVAL, 2 * self.interval)
        self._begin, self._num_rounds = num_passes, 0
        return True

    def win(self) -> None:
        self.interval = self.first


@dataclass(slots=True)
class ClassProfile:
    """What is known of one class. `version` rises when its survivals have changed."""

    length: int
    reached: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    expected: list[float] = field(default_factory=lambda: [0.0] * MAX_POSITIONS)
    recent_reached: float = 0.0
    recent_accepted: float = 0.0
    prior: ClassCounts | None = None
    version: int = 0
    mean: float = _PRIOR_RATE
    probes: RestProbes = field(default_factory=RestProbes)
    watch_until: int = 0  # the pass: a probe was right, so the drafts of all are watched
    _num_rounds: int = 0
    _told_mean: float = _PRIOR_RATE
    _fleet_rate: float = 0.0
    _fleet_weight: float = 0.0
    _ratios: tuple[float, ...] = (1.0,) * MAX_POSITIONS
    _tables: dict[int, Survivals] = field(default_factory=dict)

    def update(
        self, num_draft_tokens: int, num_accepted_tokens: int, rate: float | None = None
    ) -> None:
        """One round in which `num_draft_tokens` (>= 1) were verified; `rate`: what was expected of
        the sequence before, by default the mean."""
        rate = self.mean if rate is None else rate
        num_reached = min(num_draft_tokens, num_accepted_tokens + 1)
        num_right = min(num_draft_tokens, num_accepted_tokens)
        for position in range(min(num_reached, MAX_POSITIONS)):
            self.reached[position] += 1.0
            self.expected[position] += rate
            if position < num_right:
                self.accepted[position] += 1.0
        self.recent_reached += num_reached
        self.recent_accepted += num_right
        self.forget(_MAX_RECENT)
        self._num_rounds += 1
        if self._num_rounds % _DECAY_EVERY == 0:
            self._decay()
        # The first rounds teach the most: powers of two.
        count = self._num_rounds
        if count % REFRESH_ROUNDS == 0 or (count < REFRESH_ROUNDS and not count & (count - 1)):
            self.refresh()
        else:
            self._set_mean()

    def forget(self, most: float = _RESTING_WEIGHT) -> None:
        """Let what was seen count for `most` positions of the mean. By default for so few that
        probes of a class that rests can overrule it."""
        if self.recent_reached > most:
            self.recent_accepted *= most / self.recent_reached
            self.recent_reached = most

    def _set_mean(self) -> None:
        fleet = self._fleet_weight * _FLEET_ROUNDS / (_FLEET_ROUNDS + self._num_rounds)
        self.mean = (
            self.recent_accepted + _PRIOR_WEIGHT * _PRIOR_RATE + fleet * self._fleet_rate
        ) / (self.recent_reached + _PRIOR_WEIGHT + fleet)
        if abs(self.mean - self._told_mean) > _MEAN_STEP:
            self._told_mean = self.mean
            self.version += 1

    def _decay(self) -> None:
        self.reached = [_SLOW_DECAY * count for count in self.reached]
        self.accepted = [_SLOW_DECAY * count for count in self.accepted]
        self.expected = [_SLOW_DECAY * count for count in self.expected]
        self.recent_reached *= _FAST_DECAY
        self.recent_accepted *= _FAST_DECAY

    def refresh(self) -> None:
        """Take what was counted into account."""
        expected, accepted = self._with_fleet()
        self._set_mean()
        # Against what was expected of each sequence, not of all alike: good ones reach more
        # positions, so that deep ones would seem to be easy.
        self._ratios = tuple(
            (right + _SHAPE_WEIGHT) / (wanted + _SHAPE_WEIGHT)
            for wanted, right in zip(expected, accepted, strict=True)
        )
        self._tables.clear()
        self.version += 1

    def _with_fleet(self) -> tuple[list[float], list[float]]:
        """Expected and accepted, with the fleet's counts; sets their share in the mean."""
        expected, accepted = list(self.expected), list(self.accepted)
        total = 0.0 if self.prior is None else sum(self.prior.reached)
        if self.prior is None or total <= 0.0:
            self._fleet_rate = self._fleet_weight = 0.0
            return expected, accepted
        scale = min(1.0, _MAX_GUIDANCE_WEIGHT / total)
        self._fleet_rate, self._fleet_weight = sum(self.prior.accepted) / total, scale * total
        pairs = zip(self.prior.reached, self.prior.accepted, strict=False)
        for position, (seen, right) in enumerate(pairs):
            if position < MAX_POSITIONS:
                expected[position] += scale * seen * self._fleet_rate
                accepted[position] += scale * right
        return expected, accepted

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
                is_alike = (known.mode, known.temperature) == (key.mode, key.temperature)
                if is_alike and not known.is_local:
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
