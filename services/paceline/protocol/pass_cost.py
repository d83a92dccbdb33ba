"""What a pass costs: a staircase over its rows, measured while it is used. Pure.

Passes are kept apart by how many sequences they decode (powers of two) and by whether prompts were
in them. Each group has a level, a cost per row and per sequence (least squares around the level,
never negative, drawn to what the nearest group says, and at first to 1 % of a pass per row), and
what single row counts differ from that line: the stairs. Slopes are forgotten only as new ones are
learnt, so a long time at one shape does not wear them out; the level follows within some dozens of
passes. A pass that is far off is cut to a few deviations; only several in a row are believed.

It does not know proposals, acceptance or clocks; times are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

PRIOR_ROW_SHARE = 0.01  # of a pass: what a row costs until that is measured
MAX_STEPS = 256  # row counts that one group tells apart; others are on its line
MAX_CURVES = 64  # predictions kept until the next refresh

_MIN_PASSES = 8  # before anything is predicted
_LEVEL_WEIGHT = 1 / 48
_MAX_INFORMATIVE = 512  # passes that tell slopes; then older ones count half
_RIDGE = 3.0  # squared rows that the prior of a slope is worth
_OUTLIER_DEVIATIONS = 4.0
_OUTLIER_SHARE = 0.03  # of a pass; no smaller difference is an outlier
_BELIEVED = 6  # outliers in a row on one side are the new level
_STEP_WEIGHT = 1 / 16
_STEP_SHRINK = 8.0  # passes at a row count that its place on the line is worth
_FINE_ROWS = 64  # up to here each row count is a step of its own
_COARSE_ROWS = 8
_MIN_SHARE = 0.05  # no prediction below this share of the level


@dataclass(slots=True)
class _Step:
    """Mean distance of one row count from the line, and the passes that told it."""

    mean: float = 0.0
    count: int = 0


@dataclass(slots=True)
class _Group:
    """Passes of about the same number of sequences. Sums are around the moving level."""

    count: int = 0
    us: float = 0.0
    rows: float = 0.0
    sequences: float = 0.0
    deviation: float = 0.0
    row_us: float = 0.0
    sequence_us: float = 0.0
    num_informative: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # rr, rs, ss, ru, su
    steps: dict[int, _Step] = field(default_factory=dict)
    _num_far: int = 0

    def line(self, num_sequences: float, num_rows: float) -> float:
        return (
            self.us
            + self.row_us * (num_rows - self.rows)
            + self.sequence_us * (num_sequences - self.sequences)
        )

    def record(
        self, num_sequences: int, num_rows: int, us: float, prior: tuple[float, float] | None
    ) -> None:
        """`prior`: slopes of the nearest group, in microseconds per row and per sequence."""
        if self.count == 0:
            self.us, self.rows, self.sequences = us, float(num_rows), float(num_sequences)
            self.deviation = 0.05 * us
        us = self._tame(num_sequences, num_rows, us)
        self._learn_slopes(num_rows - self.rows, num_sequences - self.sequences, us - self.us)
        self.count += 1
        weight = max(1 / self.count, _LEVEL_WEIGHT)
        self.us += weight * (us - self.us)
        self.rows += weight * (num_rows - self.rows)
        self.sequences += weight * (num_sequences - self.sequences)
        self._solve(prior)
        self._learn_step(num_rows, us - self.line(num_sequences, num_rows))

    def _tame(self, num_sequences: int, num_rows: int, us: float) -> float:
        """The time with an outlier cut; when many agree the level jumps instead."""
        expected = self.line(num_sequences, num_rows)
        far = us - expected
        limit = _OUTLIER_DEVIATIONS * self.deviation + _OUTLIER_SHARE * abs(expected)
        self.deviation += 0.05 * (min(abs(far), limit) - self.deviation)
        if abs(far) <= limit:
            self._num_far = 0
            return us
        side = 1 if far > 0 else -1
        self._num_far = self._num_far + side if self._num_far * side > 0 else side
        if abs(self._num_far) >= _BELIEVED:
            self._num_far = 0
            self.us += far
            self.steps.clear()
            return us
        return expected + (limit if far > 0 else -limit)

    def _learn_slopes(self, rows: float, sequences: float, us: float) -> None:
        if abs(rows) < 0.5 and abs(sequences) < 0.5:
            return
        terms = (rows * rows, rows * sequences, sequences * sequences, rows * us, sequences * us)
        self.sums = [old + new for old, new in zip(self.sums, terms, strict=True)]
        self.num_informative += 1
        if self.num_informative > _MAX_INFORMATIVE:
            self.num_informative //= 2
            self.sums = [0.5 * value for value in self.sums]

    def _solve(self, prior: tuple[float, float] | None) -> None:
        """Two slopes by least squares with a prior; one that comes out negative is 0."""
        base = self.us / (1.0 + PRIOR_ROW_SHARE * self.rows)
        row_prior, sequence_prior = prior or (PRIOR_ROW_SHARE * base, 0.0)
        rr, rs, ss, ru, su = self.sums
        rr, ss = rr + _RIDGE, ss + _RIDGE
        ru, su = ru + _RIDGE * row_prior, su + _RIDGE * sequence_prior
        determinant = rr * ss - rs * rs
        row_us = (ru * ss - su * rs) / determinant
        sequence_us = (su * rr - ru * rs) / determinant
        if sequence_us < 0.0:
            row_us, sequence_us = ru / rr, 0.0
        elif row_us < 0.0:
            row_us, sequence_us = 0.0, su / ss
        self.row_us, self.sequence_us = max(0.0, row_us), max(0.0, sequence_us)

    def _learn_step(self, num_rows: int, distance: float) -> None:
        index = _step_index(num_rows)
        step = self.steps.get(index)
        if step is None:
            if len(self.steps) >= MAX_STEPS:
                return
            step = self.steps[index] = _Step()
        step.count += 1
        step.mean += max(1 / step.count, _STEP_WEIGHT) * (distance - step.mean)

    def curve(self, num_sequences: int, first: int, length: int) -> list[float]:
        """Predicted times of `first`, `first` + 1, ... rows; rising."""
        start, slope = self.line(num_sequences, first), self.row_us
        floor = _MIN_SHARE * self.us
        values = [max(floor, start + slope * index) for index in range(length)]
        if slope:  # a flat line has no stairs, only noise
            for index, step in self.steps.items():
                low, high = _step_rows(index)
                shift = step.mean * step.count / (step.count + _STEP_SHRINK)
                for place in range(max(0, low - first), min(length, high - first)):
                    values[place] = max(floor, values[place] + shift)
        upper = list(accumulate(values, max))
        lower = list(accumulate(reversed(values), min))
        lower.reverse()
        return [0.5 * (high + low) for high, low in zip(upper, lower, strict=True)]


def _step_index(num_rows: int) -> int:
    """Rows up to 64 one by one, then by eights (n + 1 .. n + 8: as graphs are padded)."""
    if num_rows <= _FINE_ROWS:
        return num_rows
    return _FINE_ROWS + -(-(num_rows - _FINE_ROWS) // _COARSE_ROWS)


def _step_rows(index: int) -> tuple[int, int]:
    if index <= _FINE_ROWS:
        return index, index + 1
    end = _FINE_ROWS + (index - _FINE_ROWS) * _COARSE_ROWS + 1
    return end - _COARSE_ROWS, end


class PassCost:
    """V(sequences, rows) of one target."""

    def __init__(self) -> None:
        self._groups: dict[tuple[bool, int], _Group] = {}  # <= 2 x 32: bit lengths
        self._curves: dict[tuple[int, int], list[float]] = {}
        self._num_passes = 0

    @property
    def is_measured(self) -> bool:
        return self._num_passes >= _MIN_PASSES

    def record(self, num_sequences: int, num_rows: int, num_other_rows: int, us: float) -> None:
        """One pass with at least one decoding sequence; `num_other_rows` were for prompts. One
        that took no time was not measured."""
        if us <= 0 or num_sequences < 1:
            return
        self._num_passes += 1
        key = (num_other_rows > 0, num_sequences.bit_length())
        near = self._nearest(key, exclude=key)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        slopes = None if near is None else (near.row_us, near.sequence_us)
        group.record(num_sequences, num_rows, us, slopes)

    def _nearest(
        self, key: tuple[bool, int], exclude: tuple[bool, int] | None = None
    ) -> _Group | None:
        """The group to ask about `key`: one of the same kind if there is one at all."""
        keys = [other for other in self._groups if other != exclude]
        if not keys:
            return None
        is_mixed, bits = key
        return self._groups[min(keys, key=lambda o: (o[0] != is_mixed, abs(o[1] - bits), o[1]))]

    def refresh(self) -> None:
        """Forget the curves: what was measured since counts from now on."""
        self._curves.clear()

    def curve(self, num_sequences: int, num_other_rows: int, length: int) -> list[float] | None:
        """Predicted times with 0, 1, ... proposals, at least `length` + 1 of them; None before
        anything was measured. Not to be changed."""
        if not self.is_measured:
            return None
        key = (num_sequences, num_other_rows)
        curve = self._curves.get(key)
        if curve is None or len(curve) <= length:
            group = self._nearest((num_other_rows > 0, num_sequences.bit_length()))
            if group is None:
                return None
            if len(self._curves) >= MAX_CURVES:
                self._curves.clear()
            curve = group.curve(num_sequences, num_sequences + num_other_rows, length + 1)
            self._curves[key] = curve
        return curve

    def row_us(self, num_sequences: int) -> float:
        """What a row costs beside so many sequences; 0.0 before anything was measured."""
        group = self._nearest((False, num_sequences.bit_length()))
        return 0.0 if group is None else group.row_us
