"""What is known of Medusa heads: how often each candidate is right, and whether to ask. Pure.

One table for each class of sequences (mode and temperature, adapter). What a head proposed for a
place is compared with what was committed there, whether it was verified or not. It does not know
tokens of a text beyond that, nor how trees are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from paceline.proposers.base import LocalProposal
from paceline.protocol.acceptance_model import Survivals

# Candidates that a head is asked for, where a tree is possible.
MAX_HEAD_CANDIDATES = 8
# Passes in a row in which heads were asked and nothing of theirs was worth a row, until they are
# left alone; and for how many passes, twice as many each time.
MAX_LOSSES = 4
FIRST_QUIET, MAX_QUIET = 16, 512

_PRIOR_FIRST, _PRIOR_BY_HEAD, _PRIOR_BY_RANK = 0.5, 0.75, 0.3
_PRIOR_WEIGHT = 8.0
_DECAY_EVERY, _DECAY = 64, 0.5 ** (64 / 2000)
_GRID = 40  # of probabilities: trees of equal tables are made once
_MIN_PROB, _MAX_PROB = 0.005, 0.98  # low enough that no row pays for nothing

Table = tuple[tuple[float, ...], ...]


class HeadStats:
    """Of one class. `table[h][r]`: how often head h's candidate of rank r is right, if all before
    it in the text were."""

    def __init__(self, num_heads: int) -> None:
        self._reached = [0.0] * num_heads
        self._right = [[0.0] * MAX_HEAD_CANDIDATES for _ in range(num_heads)]
        self._num_rounds = 0
        self._num_losses = 0
        self._quiet_left = 0
        self._quiet = FIRST_QUIET
        # Of the sequences of the open pass, any: had candidates worth a row, had some that were
        # not, did without since heads are left alone.
        self._has_won = self._has_lost = self._has_rested = False
        self.table: Table = ()
        self._refresh()

    def learn(self, head_token_ids: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        """What the heads said of the places where these were committed."""
        for head, (candidates, token_id) in enumerate(zip(head_token_ids, token_ids, strict=False)):
            if head >= len(self._reached):
                break
            self._reached[head] += 1.0
            ranks = candidates[:MAX_HEAD_CANDIDATES]
            if token_id in ranks:
                self._right[head][ranks.index(token_id)] += 1.0
        self._num_rounds += 1
        count = self._num_rounds
        if count % _DECAY_EVERY == 0:
            self._reached = [_DECAY * seen for seen in self._reached]
            self._right = [[_DECAY * seen for seen in row] for row in self._right]
        if count % _DECAY_EVERY == 0 or (count < _DECAY_EVERY and not count & (count - 1)):
            self._refresh()

    def _refresh(self) -> None:
        self.table = tuple(
            tuple(
                _on_grid((right + _PRIOR_WEIGHT * _prior(head, rank)) / (seen + _PRIOR_WEIGHT))
                for rank, right in enumerate(row)
            )
            for head, (seen, row) in enumerate(zip(self._reached, self._right, strict=True))
        )

    # -- whether to ask -----------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        """Whether to do without their candidates, as they have not been worth it."""
        return self._quiet_left > 0

    def rest(self) -> None:
        """A sequence of the open pass has done without them."""
        self._has_rested = True

    def win(self) -> None:
        """Something of theirs was verified, and not to try them."""
        self._has_won = True

    def lose(self) -> None:
        """They had candidates, and nothing of that was worth a row."""
        self._has_lost = True

    def end_pass(self) -> bool:
        """The pass is over, for all sequences; True when heads are to be tried again."""
        has_won, has_lost, has_rested = self._has_won, self._has_lost, self._has_rested
        self._has_won = self._has_lost = self._has_rested = False
        if has_won:
            self._num_losses, self._quiet = 0, FIRST_QUIET
        elif has_lost:
            self._num_losses += 1
            if self._num_losses >= MAX_LOSSES:
                self._num_losses, self._quiet_left = 0, self._quiet
                self._quiet = min(MAX_QUIET, 2 * self._quiet)
        elif has_rested and self._quiet_left:
            self._quiet_left -= 1
            return not self._quiet_left
        return False


def node_survivals(
    proposal: LocalProposal, head_token_ids: Sequence[Sequence[int]], table: Table
) -> Survivals:
    """How likely each node of a chain or tree is on the accepted path; nodes stand in falling
    order of that."""
    num = len(proposal.token_ids)
    parents = proposal.parents or tuple(range(-1, num - 1))
    places: list[tuple[int, int]] = []
    for token_id, parent in zip(proposal.token_ids, parents, strict=True):
        head = 0 if parent < 0 else places[parent][0] + 1
        places.append((head, tuple(head_token_ids[head]).index(token_id)))
    return _survivals(parents, tuple(places), table)


@lru_cache(maxsize=256)
def _survivals(
    parents: tuple[int, ...], places: tuple[tuple[int, int], ...], table: Table
) -> Survivals:
    probs: list[float] = []
    for parent, (head, rank) in zip(parents, places, strict=True):
        probs.append((1.0 if parent < 0 else probs[parent]) * table[head][rank])
    values = list(accumulate(probs, min))
    sums = tuple(accumulate(values, initial=0.0))
    return Survivals(tuple(-value for value in values), sums, values[0] if values else 0.0)


def _prior(head: int, rank: int) -> float:
    return _PRIOR_FIRST * _PRIOR_BY_HEAD**head * _PRIOR_BY_RANK**rank


def _on_grid(prob: float) -> float:
    return min(_MAX_PROB, max(_MIN_PROB, round(prob * _GRID) / _GRID))
