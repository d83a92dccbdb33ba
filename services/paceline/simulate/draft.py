"""A draft replica: one token per step for every session that may go on, of all its targets.

As `draft_table` and `draft_session` do: a verdict that fits lets the session go on, one that does
not rewinds it, and a token whose context has changed during its step is dropped. It does not know
tokens, only how long each chain is and where it goes wrong.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from paceline.simulate.branches import NO_WORK, BranchTable, BranchWork
from paceline.simulate.clock import Clock
from paceline.simulate.config import DraftKind
from paceline.simulate.line import Delivery, Line
from paceline.simulate.metrics import Metrics
from paceline.simulate.places import Ints, Places


@dataclass(frozen=True, slots=True)
class Message:
    """What a target tells one draft of some sequences: all arrays have one entry for each.

    `ends`: committed lengths; `conflicts`: positions of the first corrections that the draft has
    not been told; `is_open`: the texts are new to this draft.
    """

    places: Ints
    ends: Ints
    chains: Ints
    limits: Ints
    conflicts: Ints
    misses: Ints
    ranks: Ints
    fan_outs: Ints
    is_open: bool

    def only(self, chosen: Ints) -> Message:
        """The same for some of them."""
        names = (name for name in self.__slots__ if name != "is_open")
        arrays = {name: getattr(self, name)[chosen] for name in names}
        return Message(**arrays, is_open=self.is_open)


@dataclass(frozen=True, slots=True)
class _Step:
    started_us: float
    duration_us: float
    places: Ints
    lengths: Ints
    chains: Ints
    branches: BranchWork


class SimDraft:
    """`lines` has one line for each distance at which it has targets, `line_of` its number by
    target."""

    def __init__(
        self,
        draft_id: int,
        kind: DraftKind,
        places: Places,
        clock: Clock,
        metrics: Metrics,
        branches: BranchTable | None,
    ) -> None:
        self.id, self.kind, self.branches = draft_id, kind, branches
        self.lines: list[Line] = []
        self.line_of: Ints = np.full(places.num_targets, -1, dtype=np.int64)
        self.sessions: dict[int, None] = {}
        # Since the start: time in steps, steps, and tokens that they drew for sessions.
        self.busy_us, self.num_steps, self.num_tokens = 0.0, 0, 0
        self._session_array: Ints | None = None
        self._places, self._clock, self._metrics = places, clock, metrics
        self._inbox: list[tuple[float, int, Message]] = []
        self._num_received = 0
        self._step: _Step | None = None

    # -- sessions ---------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return len(self.sessions) < self.kind.max_sessions

    def open(self, place: int) -> None:
        self.sessions[place] = None
        self._session_array = None

    def close(self, place: int) -> None:
        del self.sessions[place]
        self._session_array = None

    def _array(self) -> Ints:
        if self._session_array is None:
            count = len(self.sessions)
            self._session_array = np.fromiter(self.sessions, dtype=np.int64, count=count)
        return self._session_array

    # -- messages ---------------------------------------------------------------------------

    def send(self, message: Message, arrives_us: float) -> None:
        """A target's message has left."""
        self._num_received += 1
        heapq.heappush(self._inbox, (arrives_us, self._num_received, message))
        if self._step is None:
            self._clock.at(arrives_us, self.wake)

    def wake(self, now_us: float) -> None:
        if self._step is None:
            self._receive(now_us)
            self._begin(now_us)

    def _receive(self, now_us: float) -> None:
        inbox = self._inbox
        while inbox and inbox[0][0] <= now_us:
            self._apply(heapq.heappop(inbox)[2])

    def _apply(self, message: Message) -> None:
        places, index = self._places, message.places
        chosen = places.draft_id[index] == self.id
        chosen &= message.chains >= places.draft_chain[index]
        if not chosen.all():
            message = message.only(np.flatnonzero(chosen))
            index = message.places
        ends, old_chains = message.ends, places.draft_chain[index]
        is_new = np.ones(len(index), np.bool_) if message.is_open else message.chains > old_chains
        lengths = np.where(is_new, ends, np.maximum(places.draft_len[index], ends))
        kept = 0 if message.is_open else message.conflicts
        computed = np.minimum(places.draft_computed[index], kept)
        if self.branches is not None:
            if not message.is_open:
                # One correction, and it was prepared for: the branch is the chain now.
                ready = self.branches.lucky_ends(index)
                fits = is_new & (message.chains == old_chains + 1) & (ready > 0)
                lengths = np.where(fits, np.maximum(lengths, ready), lengths)
                computed = np.where(fits, ready - 1, computed)
            self.branches.commit(index, ends, is_new)
        places.draft_len[index] = lengths
        places.draft_computed[index] = computed
        places.draft_chain[index] = message.chains
        places.draft_limit[index] = message.limits
        places.draft_miss[index] = message.misses
        places.draft_rank[index] = message.ranks
        places.draft_fan_out[index] = message.fan_outs
        places.draft_base[index] = ends

    # -- steps ------------------------------------------------------------------------------

    def _begin(self, now_us: float) -> None:
        places, sessions, kind = self._places, self._array(), self.kind
        lengths = places.draft_len[sessions]
        able = lengths < places.draft_limit[sessions]
        index, lengths = sessions[able], lengths[able]
        rows = np.maximum(lengths - places.draft_computed[index], 1)
        num_rows = int(rows.sum())
        if num_rows > kind.max_rows_per_pass:
            index, lengths, num_rows = self._cut(index, lengths, rows)
        work = NO_WORK
        if self.branches is not None:
            work = self.branches.begin(sessions, kind.max_rows_per_pass - num_rows)
            num_rows += work.num_rows
        if not num_rows:
            if self._inbox:
                self._clock.at(self._inbox[0][0], self.wake)
            return
        duration_us = 1000.0 * (kind.base_ms + kind.row_ms * num_rows + kind.overhead_ms)
        chains = places.draft_chain[index]
        self._step = _Step(now_us, duration_us, index, lengths, chains, work)
        self._clock.at(now_us + duration_us, self._end)

    def _cut(self, index: Ints, lengths: Ints, rows: Ints) -> tuple[Ints, Ints, int]:
        """The sessions that get to draw a token within the rows of a step, least rows first; the
        next one has a part of its text computed. At least one row is."""
        order = np.argsort(rows, kind="stable")
        sums = np.cumsum(rows[order])
        limit = self.kind.max_rows_per_pass
        count = int(np.searchsorted(sums, limit, side="right"))
        done = int(sums[count - 1]) if count else 0
        if count < len(order) and done < limit:
            place = index[order[count]]
            computed = min(int(self._places.draft_computed[place]), int(lengths[order[count]]) - 1)
            self._places.draft_computed[place] = computed + limit - done
            done = limit
        chosen = order[:count]
        return index[chosen], lengths[chosen], done

    def _end(self, now_us: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        self._receive(now_us)
        places, index = self._places, step.places
        same = places.draft_chain[index] == step.chains
        same &= places.draft_id[index] == self.id
        computed = places.draft_computed[index]
        places.draft_computed[index] = np.where(same, np.maximum(computed, step.lengths), computed)
        same &= places.draft_len[index] == step.lengths
        sent = index[same]
        places.draft_len[sent] = step.lengths[same] + 1
        self._account(step, now_us, len(sent))
        if self.branches is not None and len(step.branches.slots):
            sent = np.union1d(sent, self._end_branches(self.branches, step.branches))
        if len(sent):
            self._ship(sent, step, now_us)
        self._begin(now_us)

    def _end_branches(self, branches: BranchTable, work: BranchWork) -> Ints:
        """Places of which something of use was drawn: for their lucky branches, or for those that
        have become the chain during this step."""
        places, index = self._places, work.places
        ends = work.positions + 1 + work.lengths
        promoted = (places.draft_len[index] == ends) & (places.draft_base[index] > work.positions)
        promoted &= (places.draft_chain[index] == work.chains + 1) & work.is_lucky
        mine = index[promoted]
        places.draft_len[mine] += 1
        places.draft_computed[mine] = ends[promoted]
        return np.concatenate([branches.end(work), mine])

    def _account(self, step: _Step, now_us: float, num_drafted: int) -> None:
        metrics = self._metrics
        engine_end_us = now_us - 1000.0 * self.kind.overhead_ms
        self.busy_us += engine_end_us - step.started_us
        self.num_steps += 1
        self.num_tokens += len(step.places)
        metrics.draft_busy_us += metrics.overlap_us(step.started_us, engine_end_us)
        if metrics.is_measured(now_us):
            metrics.num_steps += 1
            metrics.num_drafted += num_drafted

    def _ship(self, sent: Ints, step: _Step, now_us: float) -> None:
        if len(self.lines) == 1:
            self._ship_on(self.lines[0], sent, step, now_us)
            return
        numbers = self.line_of[sent // self._places.max_num_seqs]
        for number, line in enumerate(self.lines):
            mine = sent[numbers == number]
            if len(mine):
                self._ship_on(line, mine, step, now_us)

    def _ship_on(self, line: Line, sent: Ints, step: _Step, now_us: float) -> None:
        places, branches = self._places, self.branches
        line.ship(
            Delivery(
                arrives_us=now_us + line.delay_us,
                places=sent,
                lengths=places.draft_len[sent],
                chains=places.draft_chain[sent],
                branch_ends=None if branches is None else branches.sent_ends(sent),
                step_us=step.duration_us - 1000.0 * self.kind.overhead_ms,
            )
        )
