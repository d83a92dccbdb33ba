"""What passes of a target take."""

from __future__ import annotations

from bisect import bisect_left

from paceline.simulate.config import TargetKind


class PassCost:
    """Microseconds of engine time; a measured staircase holds from one step to the next, and its
    last slope beyond."""

    def __init__(self, kind: TargetKind) -> None:
        self._base_us, self._row_us = 1000.0 * kind.base_ms, 1000.0 * kind.row_ms
        self._seq_us = 1000.0 * kind.seq_ms
        self._rows = [stair.rows for stair in kind.staircase]
        self._stairs_us = [1000.0 * stair.ms for stair in kind.staircase]
        self._slope_us = 0.0
        if len(self._rows) > 1:
            rise, run = self._stairs_us[-1] - self._stairs_us[-2], self._rows[-1] - self._rows[-2]
            self._slope_us = rise / run

    def us(self, num_rows: int, num_sequences: int) -> float:
        """`num_rows` include `num_sequences` decode rows and all proposals and prompt rows."""
        seqs_us = self._seq_us * num_sequences
        if not self._rows:
            return self._base_us + self._row_us * num_rows + seqs_us
        index = bisect_left(self._rows, num_rows)
        if index < len(self._rows):
            return self._stairs_us[index] + seqs_us
        return self._stairs_us[-1] + self._slope_us * (num_rows - self._rows[-1]) + seqs_us
