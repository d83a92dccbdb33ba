"""Between one target's sequences and its drafts: opens, verdicts, credits.

As `target/draft_desk.py` does where nothing fails. It does not know passes or tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline.protocol.target_session import MAX_UNTOLD
from paceline.simulate.decider import Decider
from paceline.simulate.draft import Message, SimDraft
from paceline.simulate.line import Line
from paceline.simulate.places import NO_CONFLICT, NO_DRAFT, Ints, Places


class Desk:
    """`drafts` are the ones assigned to this target, with the line that leads from each."""

    def __init__(
        self, target_id: int, places: Places, decider: Decider, drafts: list[tuple[SimDraft, Line]]
    ) -> None:
        self._id = target_id
        self._places, self._decider = places, decider
        self._drafts = {draft.id: (draft, line) for draft, line in drafts}
        self._num_sessions = dict.fromkeys(self._drafts, 0)
        self.has_branches = any(draft.branches is not None for draft, _ in drafts)
        self.num_sessions = 0  # sequences that have a draft

    # -- proposals --------------------------------------------------------------------------

    def deliver(self, now_us: float) -> None:
        """Take what has arrived."""
        for _, line in self._drafts.values():
            line.deliver(now_us)
            self._decider.learn_rtt(2 * line.delay_us)

    def wait(self, low: int, high: int, call: Callable[[float], None]) -> None:
        for _, line in self._drafts.values():
            line.wait(self._id, low, high, call)

    def stop_waiting(self) -> None:
        for _, line in self._drafts.values():
            line.stop_waiting(self._id)

    # -- sequences --------------------------------------------------------------------------

    def try_open(self, index: Ints, now_us: float) -> None:
        """Hand those of `index` that have no draft to the least loaded one, if they may draft."""
        if not self._drafts:
            return
        index = index[self._places.draft_id[index] == NO_DRAFT]
        if not len(index) or not any(draft.has_room for draft, _ in self._drafts.values()):
            return
        self._decider.grant(index)
        for place in index[self._places.credit[index] > 0].tolist():
            choices = [
                (self._num_sessions[draft_id], draft_id)
                for draft_id, (draft, _) in self._drafts.items()
                if draft.has_room
            ]
            if not choices:
                return
            self._open(place, min(choices)[1], now_us)

    def _open(self, place: int, draft_id: int, now_us: float) -> None:
        places = self._places
        committed, end_len = int(places.committed[place]), int(places.end_len[place])
        if committed + 1 >= end_len:
            return
        self._num_sessions[draft_id] += 1
        self.num_sessions += 1
        places.draft_id[place] = draft_id
        places.chain[place] += 2  # the epoch: what an earlier draft sent is fenced
        places.granted[place] = min(committed + int(places.credit[place]), end_len - 1)
        places.told[place] = committed
        places.conflict_at[place] = NO_CONFLICT
        draft, line = self._drafts[draft_id]
        draft.open(place)
        draft.send(self._message(np.array([place]), is_open=True), now_us + line.delay_us)

    def close(self, place: int) -> None:
        """The sequence has ended or lost its KV."""
        draft_id = int(self._places.draft_id[place])
        if draft_id != NO_DRAFT:
            self._num_sessions[draft_id] -= 1
            self.num_sessions -= 1
            self._drafts[draft_id][0].close(place)
            self._places.draft_id[place] = NO_DRAFT

    def tell(self, index: Ints, now_us: float) -> None:
        """Verdicts after a pass. A draft that rests is told now and then."""
        if not self._drafts or not len(index):
            return
        places = self._places
        credit = places.credit[index]
        is_due = (credit > 0) | (places.committed[index] - places.told[index] >= MAX_UNTOLD)
        is_due &= places.draft_id[index] != NO_DRAFT
        if not is_due.all():
            index, credit = index[is_due], credit[is_due]
        limits = np.minimum(places.committed[index] + credit, places.end_len[index] - 1)
        places.granted[index] = np.maximum(places.granted[index], limits)
        draft_ids = places.draft_id[index]
        for draft_id, (draft, line) in self._drafts.items():
            mine = index if len(self._drafts) == 1 else index[draft_ids == draft_id]
            if len(mine):
                draft.send(self._message(mine, is_open=False), now_us + line.delay_us)
        places.told[index] = places.committed[index]
        places.conflict_at[index] = NO_CONFLICT

    def _message(self, index: Ints, is_open: bool) -> Message:
        places = self._places
        return Message(
            places=index,
            ends=places.committed[index],
            chains=places.chain[index],
            limits=places.granted[index],
            conflicts=places.conflict_at[index],
            misses=places.miss[index],
            ranks=places.rank[index],
            fan_outs=places.fan_out[index],
            is_open=is_open,
        )
