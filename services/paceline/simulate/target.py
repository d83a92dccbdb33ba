"""A target replica: continuous batching with never-wait passes, as `target/scheduler.py` plans.

Every decoding sequence is in every pass with the proposals that have arrived, as many as its
decider says; prompts are computed in chunks beside them. It does not know tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.protocol.lookahead import PassRecord
from paceline.simulate.clock import Clock
from paceline.simulate.config import TargetKind
from paceline.simulate.costs import PassCost
from paceline.simulate.decider import Decider
from paceline.simulate.desk import Desk
from paceline.simulate.draws import RunLengths
from paceline.simulate.lone_hold import Hold, LoneHold
from paceline.simulate.metrics import Metrics
from paceline.simulate.places import Bools, Floats, Ints, Places

WATERMARK = 0.02  # share of the KV kept free when a sequence starts: target.kv_watermark


@dataclass(slots=True)
class Request:
    """One request; `done` output tokens and `first_us` are left from before a preemption."""

    arrival_us: float
    prompt_tokens: int
    output_tokens: int
    class_id: int
    is_from_client: bool = False
    done: int = 0
    first_us: float = -1.0
    last_us: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pass:
    """`prefills`: (place, rows) of prompts; `done`: those of them that get to their end."""

    started_us: float
    index: Ints
    counts: Ints
    prefills: list[tuple[int, int]]
    done: list[int]
    num_rows: int
    idle_us: float | None


class SimTarget:
    """`on_finish(now_us, request)` is called for each request that has ended."""

    def __init__(
        self,
        target_id: int,
        kind: TargetKind,
        places: Places,
        clock: Clock,
        metrics: Metrics,
        runs: RunLengths,
        desk: Desk,
        decider: Decider,
        on_finish: Callable[[float, Request], None],
    ) -> None:
        self.id, self.kind, self.desk, self.decider = target_id, kind, desk, decider
        self.low = target_id * places.max_num_seqs
        self.high = self.low + places.max_num_seqs
        self.busy_us = 0.0
        self._places, self._clock, self._metrics, self._runs = places, clock, metrics, runs
        self._on_finish = on_finish
        self._cost = PassCost(kind)
        self.hold: Hold = LoneHold(places, decider)
        self._waiting: deque[Request] = deque()
        self._free = list(range(self.high - 1, self.low - 1, -1))
        self.running: dict[int, Request] = {}  # by place, in order of admission
        self._missing: dict[int, int] = {}  # rows that a place's prompt still needs
        self._kv_tokens = 0  # of all running sequences, proposals not counted
        self._pass: _Pass | None = None
        self._decoding: Ints | None = None
        self._busy_until_us: float | None = None
        self._ready_us = 0.0  # no pass before: the last one's results are being handled
        self._is_holding = False
        self._is_short = False  # a sequence has just given way

    @property
    def num_ongoing(self) -> int:
        return len(self.running) + len(self._waiting)

    # -- requests ---------------------------------------------------------------------------

    def add(self, request: Request, now_us: float) -> bool:
        """False: too many wait already."""
        is_free = bool(self._free) and not self._waiting
        if not is_free and len(self._waiting) >= self.kind.max_queued_seqs:
            return False
        self._waiting.append(request)
        if self._pass is None:
            # Requests of one moment share the first pass.
            self._clock.at(now_us, self._turn)
        return True

    def _admit(self, now_us: float) -> None:
        if self._is_short and self.running:
            return
        room = self.kind.kv_tokens * (1.0 - WATERMARK)
        while self._waiting and self._free:
            request = self._waiting[0]
            length = request.prompt_tokens + request.done
            if self.running and self._kv_tokens + length > room:
                return
            self._start(self._waiting.popleft(), length, now_us)

    def _start(self, request: Request, length: int, now_us: float) -> None:
        places, place = self._places, self._free.pop()
        self.running[place] = request
        self._missing[place] = length
        self._kv_tokens += length
        run, rank = self._runs.draw_one(request.class_id)
        places.class_id[place] = request.class_id
        places.committed[place] = places.prompt_len[place] = length
        places.prompt_len[place] -= request.done
        places.end_len[place] = request.prompt_tokens + request.output_tokens
        places.miss[place] = length + run
        places.rank[place] = rank
        places.chain[place] += 2  # nothing under way to its predecessor may be for it
        places.arrival_us[place] = request.arrival_us
        places.first_us[place] = request.first_us
        places.last_us[place] = request.last_us
        places.last_draft_us[place] = 0.0
        places.branch_end[place] = 0
        self.decider.add(place)
        self.desk.try_open(np.array([place]), now_us)

    def _release(self, place: int) -> Request:
        self.desk.close(place)
        self._places.is_decoding[place] = False
        self._decoding = None
        self._missing.pop(place, None)
        self._kv_tokens -= int(self._places.committed[place])
        self._free.append(place)
        return self.running.pop(place)

    def _preempt_newest(self) -> None:
        place = next(reversed(self.running))
        places = self._places
        request = self._release(place)
        request.done = int(places.committed[place] - places.prompt_len[place])
        request.first_us = float(places.first_us[place])
        request.last_us = float(places.last_us[place])
        self._waiting.appendleft(request)
        self._metrics.num_preemptions += self._metrics.is_measured(self._clock.now_us)

    # -- passes -----------------------------------------------------------------------------

    def _turn(self, now_us: float) -> None:
        """Start the next pass, unless one runs, nothing is there, or a lone sequence waits."""
        if self._pass is not None or now_us < self._ready_us:
            return
        self.desk.deliver(now_us)
        self._admit(now_us)
        if not self.running:
            self._busy_until_us = None
            return
        index = self._decoding_places()
        if self.desk.num_sessions < len(self.running):
            self.desk.try_open(np.fromiter(self.running, dtype=np.int64), now_us)
        if self._must_hold(index, now_us):
            return
        self._begin(index, now_us)

    def _decoding_places(self) -> Ints:
        if self._decoding is None:
            flags = self._places.is_decoding[self.low : self.high]
            self._decoding = self.low + np.flatnonzero(flags)
        return self._decoding

    def _must_hold(self, index: Ints, now_us: float) -> bool:
        is_lone = len(self.running) == 1 and len(index) == 1 and not self._waiting
        until_us = self.hold.until_us(int(index[0]), now_us) if is_lone else None
        if until_us is None:
            if self._is_holding:
                self._is_holding = False
                self.desk.stop_waiting()
            return False
        if not self._is_holding:
            self._is_holding = True
            self.desk.wait(self.low, self.high, self._turn)
        self._clock.at(until_us, self._turn)
        return True

    def _begin(self, index: Ints, now_us: float) -> None:
        places, kind = self._places, self.kind
        have = places.windows(index)
        np.minimum(have, places.end_len[index] - places.committed[index] - 1, out=have)
        rows_left = kind.max_rows_per_pass - len(index)
        num_missing = sum(self._missing.values())
        num_prefill = min(num_missing, -(-rows_left // 2))
        if self._is_short or self._kv_tokens + len(index) + int(have.sum()) > kind.kv_tokens:
            have[:] = 0  # proposals are bets: they go first
        counts = self.decider.plan(index, have, num_prefill, rows_left - num_prefill)
        num_draft = int(counts.sum())
        rows_left -= num_draft
        prefills, done = [], []
        for place, missing in self._missing.items():
            if rows_left < 1:
                break
            rows = min(missing, rows_left)
            prefills.append((place, rows))
            rows_left -= rows
            if rows == missing:
                done.append(place)
        num_prefill = sum(rows for _, rows in prefills)
        num_rows = len(index) + num_draft + num_prefill
        idle_us = None if self._busy_until_us is None else now_us - self._busy_until_us
        self._pass = _Pass(now_us, index, counts, prefills, done, num_rows, idle_us)
        engine_us = self._cost.us(num_rows, len(index))
        self._busy(now_us, engine_us)
        self._clock.at(now_us + engine_us, self._end)

    def _busy(self, now_us: float, engine_us: float) -> None:
        overlap_us = self._metrics.overlap_us(now_us, now_us + engine_us)
        self.busy_us += overlap_us
        self._metrics.target_busy_us += overlap_us

    def _end(self, now_us: float) -> None:
        done, self._pass = self._pass, None
        if done is None:
            return
        self._is_short = False
        self.desk.deliver(now_us)
        index, counts = done.index, done.counts
        for place, rows in done.prefills:
            self._missing[place] -= rows
        if done.done:
            for place in done.done:
                del self._missing[place]
            index = np.concatenate([index, np.array(done.done, dtype=np.int64)])
            counts = np.concatenate([counts, np.zeros(len(done.done), dtype=np.int64)])
            self._places.is_decoding[index] = True
            self._decoding = None
        num_committed = self._commit(index, counts, len(done.index), now_us)
        num_prefill = sum(rows for _, rows in done.prefills)
        self._busy_until_us = now_us
        record = PassRecord(
            num_sequences=len(done.index),
            num_rows=done.num_rows,
            num_prefill_rows=num_prefill,
            num_draft_tokens=int(counts.sum()),
            num_committed=num_committed,
            started_us=int(done.started_us),
            ended_us=int(now_us),
            idle_us=None if done.idle_us is None else int(done.idle_us),
        )
        self._admit(now_us)
        self.decider.end_pass(record)
        if self._metrics.is_measured(now_us):
            self._metrics.num_passes += 1
            self._metrics.num_rows += done.num_rows
        self._ready_us = now_us + 1000.0 * self.kind.overhead_ms
        self._clock.at(self._ready_us, self._turn)

    def _commit(self, index: Ints, counts: Ints, num_decoding: int, now_us: float) -> int:
        """Commit, correct, tell the drafts, let go who has finished; returns the tokens."""
        if not len(index):
            return 0
        places = self._places
        before, miss = places.committed[index], places.miss[index]
        accepted = np.minimum(counts, miss - before)
        after = before + accepted + 1
        is_corrected = after > miss
        np.minimum(after, places.end_len[index], out=after)
        committed = after - before
        np.minimum(accepted, committed, out=accepted)
        places.committed[index] = after
        self._kv_tokens += int(committed.sum())
        if is_corrected.any():
            self._correct(index[is_corrected], miss[is_corrected])
        self.decider.end_round(index, counts, accepted)
        self.decider.grant(index)
        is_over = after >= places.end_len[index]
        self._record(index, counts, accepted, committed, num_decoding, now_us)
        if is_over.any():
            self.desk.tell(index[~is_over], now_us)
            self._finish(index[is_over], now_us)
        else:
            self.desk.tell(index, now_us)
        if self._kv_tokens > self.kind.kv_tokens and len(self.running) > 1:
            self._is_short = True
            self._preempt_newest()
        return int(committed.sum())

    def _correct(self, index: Ints, miss: Ints) -> None:
        """The chains of these places have ended; what a branch holds becomes the window."""
        places = self._places
        if self.desk.has_branches:
            hit = places.arrived_chain[index] == places.chain[index]
            hit &= places.branch_end[index] > miss + 1
            lucky = index[hit]
            places.arrived[lucky] = places.branch_end[lucky]
            places.arrived_chain[lucky] += 1
            places.branch_end[index] = 0
        places.chain[index] += 1
        places.conflict_at[index] = np.minimum(places.conflict_at[index], miss)
        runs, ranks = self._runs.draw(places.class_id[index])
        places.miss[index] = miss + 1 + runs
        places.rank[index] = ranks

    def _record(
        self,
        index: Ints,
        counts: Ints,
        accepted: Ints,
        committed: Ints,
        num_decoding: int,
        now_us: float,
    ) -> None:
        places, metrics = self._places, self._metrics
        first_us = places.first_us[index]
        is_first = first_us < 0
        if is_first.any():
            places.first_us[index[is_first]] = now_us
        if metrics.is_measured(now_us):
            metrics.num_tokens += int(committed.sum())
            metrics.num_rounds += num_decoding
            metrics.num_round_tokens += int(committed[:num_decoding].sum())
            metrics.num_draft_tokens += int(counts.sum())
            metrics.num_accepted_tokens += int(accepted.sum())
            metrics.itl.add(self._gaps(index, is_first, now_us))
            if is_first.any():
                metrics.ttft.add(now_us - places.arrival_us[index[is_first]])
        places.last_us[index] = now_us

    def _gaps(self, index: Ints, is_first: Bools, now_us: float) -> Floats:
        gaps = now_us - self._places.last_us[index]
        return gaps[~is_first] if is_first.any() else gaps

    def _finish(self, index: Ints, now_us: float) -> None:
        places = self._places
        if self._metrics.is_measured(now_us):
            lengths = (places.committed[index] - places.prompt_len[index]).astype(np.float64)
            arrival_us, first_us = places.arrival_us[index], places.first_us[index]
            self._metrics.finish(arrival_us, first_us, now_us, lengths)
        for place in index.tolist():
            self._on_finish(now_us, self._release(place))
