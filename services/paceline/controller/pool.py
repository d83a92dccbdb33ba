"""What the whole fleet knows of acceptance: class counts of all targets, pooled. Pure.

A target's own counts are already discounted by its rounds (the policy does that), so those of
living targets are simply added. Those of targets that left fade with time: a target that takes
another's place begins with what it had learned. Nobody gets its own counts back: it would believe
itself twice.

Counts are kept as whole numbers (`UNIT`), so that adding and taking away leaves no rounding behind
and a pool that is built again from the same reports is the same. It does not know what the counts
are for; time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from paceline.protocol.lookahead import AcceptanceClass, ClassCounts

# Counts are multiples of 1 / UNIT.
UNIT = 1 << 10
# Classes over all targets; one more is not taken in until another is gone.
MAX_POOLED_CLASSES = 256
# The classes that a target hears of: the heaviest.
MAX_PRIOR_CLASSES = 16
# However many agree, priors weigh no more than so many rounds: about one half-life of a target's
# own counts. Else a large fleet would never let one of its targets learn that it differs.
MAX_PRIOR_ROUNDS = 2000.0
# What a target knew that left, or died, counts half after so long. So many are remembered.
LEFT_HALF_LIFE_S = 600.0
MAX_LEFT = 64
# At the age of so many half-lives it is forgotten.
LEFT_HALF_LIVES = 6
# How old the sum over those who left may be: it changes by 1 % in this time.
LEFT_REFRESH_S = 10.0

Counts = Mapping[AcceptanceClass, ClassCounts]
# reached, accepted in 1 / UNIT.
_Row = tuple[list[int], list[int]]


@dataclass(slots=True)
class _Left:
    rows: dict[AcceptanceClass, _Row]
    at_s: float


class PriorPool:
    """Class counts by target. Invariant: `_total` is the sum of `_own`; its size is bounded by
    MAX_POOLED_CLASSES."""

    def __init__(self) -> None:
        self._own: dict[str, dict[AcceptanceClass, _Row]] = {}
        self._total: dict[AcceptanceClass, _Row] = {}
        self._num_holders: dict[AcceptanceClass, int] = {}
        # The oldest first.
        self._left: OrderedDict[str, _Left] = OrderedDict()
        self._left_total: dict[AcceptanceClass, _Row] = {}
        self._left_summed_s: float | None = None

    def report(self, replica_id: str, counts: Counts) -> None:
        """The newest counts of a target, in place of those before."""
        if self._left.pop(replica_id, None) is not None:
            self._left_summed_s = None  # it lives: what it knew is not to count twice
        self._take_out(replica_id)
        own: dict[AcceptanceClass, _Row] = {}
        for kind, each in counts.items():
            if kind not in self._total and len(self._total) >= MAX_POOLED_CLASSES:
                continue
            own[kind] = (_units(each.reached), _units(each.accepted))
            _add(self._total.setdefault(kind, ([], [])), own[kind])
            self._num_holders[kind] = self._num_holders.get(kind, 0) + 1
        self._own[replica_id] = own

    def leave(self, replica_id: str, now_s: float) -> None:
        """A target is gone; what it knew fades from now on."""
        rows = self._take_out(replica_id)
        if rows:
            self._left[replica_id] = _Left(rows, now_s)
            self._left_summed_s = None
            while len(self._left) > MAX_LEFT:
                self._left.popitem(last=False)

    def priors(self, replica_id: str, now_s: float) -> dict[AcceptanceClass, ClassCounts]:
        """What all others know, for one target: at most MAX_PRIOR_CLASSES, the heaviest."""
        own, left = self._own.get(replica_id, {}), self._sum_left(now_s)
        rows: dict[AcceptanceClass, _Row] = {}
        for kind in self._total.keys() | left.keys():
            row: _Row = ([], [])
            _add(row, self._total.get(kind, ([], [])))
            _add(row, own.get(kind, ([], [])), -1)
            _add(row, left.get(kind, ([], [])))
            if row[0] and row[0][0] > 0:
                rows[kind] = row
        heaviest = sorted(rows.items(), key=lambda item: (-item[1][0][0], _key(item[0])))
        return {kind: _counts(row) for kind, row in heaviest[:MAX_PRIOR_CLASSES]}

    def totals(self) -> dict[AcceptanceClass, ClassCounts]:
        """Of all living targets together, unscaled."""
        return {kind: _counts(row, float("inf")) for kind, row in self._total.items()}

    def _take_out(self, replica_id: str) -> dict[AcceptanceClass, _Row]:
        rows = self._own.pop(replica_id, {})
        for kind, row in rows.items():
            _add(self._total[kind], row, -1)
            self._num_holders[kind] -= 1
            if not self._num_holders[kind]:
                del self._total[kind], self._num_holders[kind]
        return rows

    def _sum_left(self, now_s: float) -> dict[AcceptanceClass, _Row]:
        summed_s = self._left_summed_s
        if summed_s is not None and now_s - summed_s < LEFT_REFRESH_S:
            return self._left_total
        self._left_total, self._left_summed_s = {}, now_s
        for replica_id, left in list(self._left.items()):
            half_lives = (now_s - left.at_s) / LEFT_HALF_LIFE_S
            if half_lives >= LEFT_HALF_LIVES:
                del self._left[replica_id]
                continue
            for kind, row in left.rows.items():
                weight = 0.5**half_lives
                _add(self._left_total.setdefault(kind, ([], [])), _scaled(row, weight))
        return self._left_total


def _units(values: tuple[float, ...]) -> list[int]:
    return [round(value * UNIT) for value in values]


def _scaled(row: _Row, weight: float) -> _Row:
    return ([int(v * weight) for v in row[0]], [int(v * weight) for v in row[1]])


def _add(row: _Row, other: _Row, sign: int = 1) -> None:
    """In place; `row` grows to the longer length."""
    for mine, theirs in zip(row, other, strict=True):
        mine[:] = [a + sign * b for a, b in zip_longest(mine, theirs, fillvalue=0)]


def _counts(row: _Row, max_rounds: float = MAX_PRIOR_ROUNDS) -> ClassCounts:
    """Scaled down as a whole to `max_rounds` rounds; positions that nobody reached are left out."""
    reached, accepted = row
    length = max((place + 1 for place, value in enumerate(reached) if value > 0), default=0)
    num_rounds = reached[0] / UNIT if length else 0.0
    scale = (max_rounds / num_rounds if num_rounds > max_rounds else 1.0) / UNIT
    return ClassCounts(
        tuple(value * scale for value in reached[:length]),
        tuple(value * scale for value in accepted[:length]),
    )


def _key(kind: AcceptanceClass) -> tuple[str, str, float]:
    return (kind.draft_model, kind.mode.value, kind.temperature)
