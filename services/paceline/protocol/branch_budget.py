"""How many rows of branches a draft's pass may have, by what rows cost. Pure.

On a GPU rows are nearly free, on a CPU they are not, and whatever they cost delays the main texts
of all sequences. The cost of a row is learnt from the passes as they come: a line through (rows,
time). Its slope is forgotten only as passes tell a new one: at a steady number of rows none does.
It does not know what rows are for, nor clocks; times are microseconds.
"""

from __future__ import annotations

# Branches may make a pass this much longer.
BRANCH_SHARE = 0.4

_PRIOR_ROW_SHARE = 0.001  # of a pass: what a row costs until that is measured
_RIDGE = 64.0  # squared rows that the prior is worth
_MAX_SPREAD = float(1 << 16)  # squared rows that are remembered
_LEVEL_WEIGHT = 1 / 64
_NO_BOUND = 1 << 20
_MAX_JUMP = 4.0  # no pass counts as more than so many usual ones


class BranchBudget:
    """The line's level and slope; nothing is known before the first pass."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._rows = 0.0
        self._us = 0.0
        self._rows_rows = 0.0  # sums around the moving means
        self._rows_us = 0.0

    def learn(self, num_rows: int, us: int) -> None:
        """A pass of one-row items has taken so long."""
        if us <= 0:
            return
        self._num_passes += 1
        if self._num_passes == 1:
            self._rows, self._us = float(num_rows), float(us)
            return
        weight = max(1 / self._num_passes, _LEVEL_WEIGHT)
        more_rows = num_rows - self._rows
        more_us = min(us, _MAX_JUMP * self._us) - self._us
        self._rows += weight * more_rows
        self._us += weight * more_us
        self._rows_rows += more_rows * more_rows
        self._rows_us += more_rows * more_us
        if self._rows_rows > _MAX_SPREAD:
            self._rows_us *= _MAX_SPREAD / self._rows_rows
            self._rows_rows = _MAX_SPREAD

    @property
    def row_us(self) -> float:
        """What a row more costs."""
        prior = _PRIOR_ROW_SHARE * self._us
        return max(0.0, (self._rows_us + _RIDGE * prior) / (self._rows_rows + _RIDGE))

    def max_rows(self, num_main_rows: int) -> int:
        """Rows of branches beside so many of main texts; at least one, or nothing would be learnt.

        No more than a pass can have in BRANCH_SHARE more time.
        """
        row_us = self.row_us
        main_us = self._us + row_us * (num_main_rows - self._rows)
        allowed_us = BRANCH_SHARE * max(main_us, row_us)
        return max(1, int(allowed_us / row_us)) if row_us > 0 else _NO_BOUND
