"""All sequences of all targets as arrays: one place each, of `max_num_seqs` per target.

Positions are absolute (prompt included). What a sequence's tokens are is not known, only how long
the draft's present chain of guesses is right: `miss` is the position of its first wrong guess,
drawn when the chain begins. A pass that verifies l proposals behind `committed` commits
min(l, miss - committed) + 1 tokens, and the chain ends when that goes beyond `miss`.

`chain` counts the chains of a place and never restarts, so it fences what is on the way between
target and draft: proposals count only while the chain that they belong to is the present one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

NO_DRAFT = -1
NO_CONFLICT = 1 << 60


class Places:
    """Arrays of one entry per place. Invariant while occupied: committed <= end_len, and
    committed <= miss; with a draft: told <= committed, draft_len <= draft_limit or the open's."""

    def __init__(self, num_targets: int, max_num_seqs: int) -> None:
        self.num_targets, self.max_num_seqs = num_targets, max_num_seqs
        self.size = num_targets * max_num_seqs
        # The truth, at the target.
        self.committed = self._ints()
        self.end_len = self._ints()
        self.miss = self._ints()
        self.rank = self._ints()  # the missed token is the draft's next guess no. so many; 0: none
        self.chain = self._ints()
        self.class_id = self._ints()
        self.is_decoding: Bools = np.zeros(self.size, dtype=np.bool_)
        # Proposals at the target: how far they reach, of which chain; where the lucky branch ends.
        self.arrived = self._ints()
        self.arrived_chain = self._ints()
        self.branch_end = self._ints()
        # What the draft may do, and has been told.
        self.draft_id = self._ints(NO_DRAFT)
        self.credit = self._ints()
        self.fan_out = self._ints()
        self.granted = self._ints()
        self.told = self._ints()
        self.conflict_at = self._ints(NO_CONFLICT)  # first correction that it has not been told
        # The draft's own state.
        self.draft_len = self._ints()
        self.draft_chain = self._ints()
        self.draft_limit = self._ints()
        self.draft_computed = self._ints()
        self.draft_miss = self._ints()
        self.draft_rank = self._ints()
        self.draft_fan_out = self._ints()
        self.draft_base = self._ints()  # committed length that it knows of
        # Times, microseconds.
        self.arrival_us = self._floats()
        self.first_us = self._floats()  # of the first token; < 0: none yet
        self.last_us = self._floats()  # of the last one
        self.last_draft_us = self._floats()  # when proposals arrived last
        self.prompt_len = self._ints()

    def _ints(self, value: int = 0) -> Ints:
        return np.full(self.size, value, dtype=np.int64)

    def _floats(self) -> Floats:
        return np.zeros(self.size, dtype=np.float64)

    def windows(self, places: Ints) -> Ints:
        """Proposals at hand for each of `places`."""
        have = self.arrived[places] - self.committed[places]
        have[(have < 0) | (self.arrived_chain[places] != self.chain[places])] = 0
        return have
