"""What a proposal must survive with to be worth its row: the K of full windows. Pure.

It is looked at every few passes and changes only for a predicted gain, so that K does not flutter.
It does not know sequences; times are microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from paceline.protocol import decision
from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.lookahead_types import SequenceLookahead, Window

PASSES_BETWEEN_LOOKS = 4
NEVER = 2.0  # no survival is that high
MIN_GAIN = 1.02  # predicted: a new price must be that much better than the one in force


MIN_PAY = 1.01  # predicted: less is not worth a draft's work, and what predictions cannot see
_LEAST_SURVIVAL = 0.02  # of proposals that K looks at: others gain next to nothing


def full_windows(
    windows: Sequence[Window],
    survivals_of: Callable[[SequenceLookahead], Survivals],
    ceiling: Callable[[SequenceLookahead], int],
) -> dict[tuple[Survivals, int], int]:
    """How many sequences whose K is not fixed have these survivals and may have so many proposals
    in a full window."""
    groups: dict[tuple[Survivals, int], int] = {}
    for window in windows:
        lookahead = window.lookahead
        if not lookahead.is_fixed:
            survivals = window.survivals or survivals_of(lookahead)
            most = min(ceiling(lookahead), len(survivals.negatives))
            key = (survivals, bisect_right(survivals.negatives, -_LEAST_SURVIVAL, 0, most))
            groups[key] = groups.get(key, 0) + 1
    return groups


class RowPrice:
    """`survival`: of the last proposal that a full window takes; None before anything was
    measured, NEVER: no proposal is worth a row. `row_tokens`: the tokens that the target makes
    elsewhere in the time of a row, so what a source that is not among the windows must promise."""

    def __init__(self) -> None:
        self.survival: float | None = None
        self.row_tokens: float | None = None
        self._num_sequences = 0

    def worth(self, negatives: Sequence[float], most: int) -> int | None:
        """How many of the first `most` proposals with these survivals are worth their rows, whoever
        else wants rows; None before anything was measured."""
        if self.row_tokens is None:
            return None
        return bisect_right(negatives, -self.row_tokens, 0, min(most, len(negatives)))

    def _is_far(self, num_sequences: int) -> bool:
        """Whether the batch is another one than the price was made for."""
        return abs(num_sequences - self._num_sequences) * 4 > self._num_sequences

    def is_due(self, num_sequences: int, num_passes: int) -> bool:
        return num_passes % PASSES_BETWEEN_LOOKS == 0 or self._is_far(num_sequences)

    def expire(self) -> None:
        """Look again before the next pass, and take what is best then."""
        self._num_sequences = 0

    def update(
        self,
        groups: Mapping[tuple[Survivals, int], int],
        max_rows: int,
        num_sequences: int,
        cost_us: Sequence[float],
        idle_us: float,
    ) -> None:
        """`groups`: how many sequences have these survivals and may have so many proposals;
        `cost_us` has at least `max_rows` + 1 entries."""
        best, rate, negatives = decision.best_level(
            groups, max_rows, num_sequences, cost_us, idle_us
        )
        if self.survival is not None and not self._is_far(num_sequences):
            old = decision.rate_at(self.survival, negatives, num_sequences, cost_us, idle_us)
            best = best if rate > MIN_GAIN * old else self.survival
        if rate < MIN_PAY * num_sequences / (cost_us[0] + idle_us):
            best = NEVER
        self.survival, self._num_sequences = best, num_sequences
        num_rows = max(1, min(max_rows, len(cost_us) - 1))
        if num_rows < len(cost_us):
            self.row_tokens = rate * (cost_us[num_rows] - cost_us[0]) / num_rows
