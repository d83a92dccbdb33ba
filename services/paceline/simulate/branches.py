"""What drafts prepare for corrections, as `protocol/draft_branches.py` and `draft_table.py` do.

A branch is a place's proposals behind a runner-up: (position, rank) and how many they are. Which
of them the target will commit is known here: the one at the chain's first wrong guess whose rank
is the right token's. It does not know targets, passes or time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.protocol.draft_branches import MAX_BRANCHES
from paceline.protocol.draft_table import MAX_BRANCH_ROWS
from paceline.simulate.places import Bools, Ints, Places

BLOCK_SIZE = 16  # a branch's first pass computes what its last block lacks
RANK_DISTANCE = 5  # a second runner-up is as likely as the first so many positions further
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class BranchWork:
    """The branches' share of a step: flat slots of the table, and where each of them began."""

    slots: Ints
    positions: Ints
    lengths: Ints
    chains: Ints
    is_lucky: Bools
    num_rows: int

    @property
    def places(self) -> Ints:
        return self.slots // MAX_BRANCHES


_NONE: Ints = np.zeros(0, dtype=np.int64)
NO_WORK = BranchWork(_NONE, _NONE, _NONE, _NONE, np.zeros(0, dtype=np.bool_), 0)


class BranchTable:
    """The branches of all places, MAX_BRANCHES slots each; `position` < 0: a free slot."""

    def __init__(self, places: Places, max_fan_out: int) -> None:
        self._places = places
        size = (places.size, MAX_BRANCHES)
        self.position: Ints = np.full(size, -1, dtype=np.int64)
        self.rank: Ints = np.zeros(size, dtype=np.int64)  # 0: the runner-up
        self.length: Ints = np.zeros(size, dtype=np.int64)  # proposals behind the runner-up
        self.is_begun: Bools = np.zeros(size, dtype=np.bool_)
        # By rank: the next position that has not had a branch.
        self._front: Ints = np.zeros((places.size, max_fan_out), dtype=np.int64)
        self._max_fan_out = max_fan_out

    # -- steps ------------------------------------------------------------------------------

    def begin(self, sessions: Ints, rows_left: int) -> BranchWork:
        """What a step does for the branches of these sessions, the most useful ones first."""
        sessions = sessions[self._places.draft_fan_out[sessions] > 0]
        if not len(sessions):
            return NO_WORK
        self._grow(sessions)
        slots, distances = self._ready(sessions)
        slots = slots[np.argsort(distances, kind="stable")]
        positions = self.position.ravel()[slots]
        rows = np.where(self.is_begun.ravel()[slots], 1, positions % BLOCK_SIZE + 1)
        sums = np.cumsum(rows)
        count = int(np.searchsorted(sums, min(rows_left, MAX_BRANCH_ROWS), side="right"))
        if not count:
            return NO_WORK
        slots, positions = slots[:count], positions[:count]
        self.is_begun.ravel()[slots] = True
        lengths, chains = (
            self.length.ravel()[slots],
            self._places.draft_chain[slots // MAX_BRANCHES],
        )
        is_lucky = self._is_lucky(slots)
        return BranchWork(slots, positions, lengths, chains, is_lucky, int(sums[count - 1]))

    def _is_lucky(self, slots: Ints) -> Bools:
        index, places = slots // MAX_BRANCHES, self._places
        lucky: Bools = self.position.ravel()[slots] == places.draft_miss[index]
        lucky &= self.rank.ravel()[slots] + 1 == places.draft_rank[index]
        return lucky

    def _ready(self, sessions: Ints) -> tuple[Ints, Ints]:
        """Flat slots of the branches that may draw a token, and how far each is from being of
        use; of one place together."""
        places = self._places
        base, limit = places.draft_base[sessions, None], places.draft_limit[sessions, None]
        position, length = self.position[sessions], self.length[sessions]
        end = position + 1 + length
        ready = (position >= 0) & (end < limit) & (length < (limit - base + 1) // 2)
        distance = end - base + RANK_DISTANCE * self.rank[sessions]
        flat = sessions[:, None] * MAX_BRANCHES + np.arange(MAX_BRANCHES)
        return flat[ready], distance[ready]

    def _grow(self, sessions: Ints) -> None:
        """New branches where there is a slot, nearest positions first."""
        places, ranks = self._places, np.arange(self._max_fan_out)
        sessions = sessions[(self.position[sessions] < 0).any(axis=1)]
        while len(sessions):
            front = self._front[sessions]
            can = front < places.draft_len[sessions, None]
            can &= ranks < places.draft_fan_out[sessions, None]
            able = can.any(axis=1)
            sessions, front, can = sessions[able], front[able], can[able]
            if not len(sessions):
                return
            rank = np.argmin(np.where(can, front + RANK_DISTANCE * ranks, _NEVER), axis=1)
            slot = np.argmax(self.position[sessions] < 0, axis=1)
            self.position[sessions, slot] = front[np.arange(len(sessions)), rank]
            self.rank[sessions, slot] = rank
            self.length[sessions, slot] = 0
            self.is_begun[sessions, slot] = False
            self._front[sessions, rank] += 1
            sessions = sessions[(self.position[sessions] < 0).any(axis=1)]

    def end(self, work: BranchWork) -> Ints:
        """A step is over; returns the places whose lucky branch has a proposal more."""
        position, length = self.position.ravel(), self.length.ravel()
        lives = (position[work.slots] == work.positions) & (length[work.slots] == work.lengths)
        slots = work.slots[lives]
        length[slots] += 1
        grown: Ints = slots[work.is_lucky[lives]] // MAX_BRANCHES
        return grown

    # -- verdicts ---------------------------------------------------------------------------

    def lucky_ends(self, index: Ints) -> Ints:
        """Where the branches end that will become the chains; 0 where there is none."""
        places = self._places
        lucky = self.position[index] == places.draft_miss[index, None]
        lucky &= self.rank[index] + 1 == places.draft_rank[index, None]
        lucky &= self.is_begun[index]
        ends = places.draft_miss[index] + 1 + (self.length[index] * lucky).sum(axis=1)
        return np.where(lucky.any(axis=1), ends, 0)

    def sent_ends(self, index: Ints) -> Ints:
        """As `lucky_ends`, but 0 where there is no proposal yet."""
        ends = self.lucky_ends(index)
        return np.where(ends > self._places.draft_miss[index] + 1, ends, 0)

    def commit(self, index: Ints, ends: Ints, is_cleared: Bools) -> None:
        """Verdicts have set these places up to `ends`; where the chain is another one, no branch
        fits."""
        gone = (self.position[index] < ends[:, None]) | is_cleared[:, None]
        self.position[index] = np.where(gone, -1, self.position[index])
        front = np.maximum(self._front[index], ends[:, None])
        self._front[index] = np.where(is_cleared[:, None], ends[:, None], front)
