"""Continuous batching of one target. Pure: plans passes and applies their results.

Never-wait rule: every runnable sequence is in every pass, with whatever proposals have arrived
(capped), so with no drafts a pass *is* plain decoding. Only a lone sequence may hold a pass for a
bounded time, when that is predicted to pay. The scheduler knows no threads, sockets or tensors;
its driver runs the engine and moves messages. Time is an argument (monotonic microseconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo, StepResult
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.lookahead import LookaheadPolicy
from paceline.target import endings
from paceline.target.draft_desk import DraftDesk
from paceline.target.endings import Ending
from paceline.target.intake import Intake, living_outputs
from paceline.target.local_drafts import LocalDrafts
from paceline.target.lone_hold import end_holds, lone_hold
from paceline.target.lookahead import lookahead_limits, pass_record
from paceline.target.passes import Hold, PassEntry, PassPlan, Round, make_entry, prefill_share
from paceline.target.roster import Roster
from paceline.target.round_clock import NO_TRACES, PassRecord, RoundTracer
from paceline.target.sequence import PassTimes, Sequence
from paceline.target.stats import SchedulerStats
from paceline.target.telling import tell

__all__ = ["Hold", "PassEntry", "PassPlan", "Scheduler", "SchedulerStats"]


class Scheduler:
    """All sequences of one target replica."""

    _entry = staticmethod(make_entry)  # tests plant bugs there

    def __init__(
        self,
        info: EngineInfo,
        target: TargetConfig,
        speculation: SpeculationConfig,
        rpc: RpcConfig,
    ) -> None:
        self.info = info
        self.config = target
        self.speculation = speculation
        self.policy = LookaheadPolicy(lookahead_limits(speculation))
        self.stats = SchedulerStats()
        self.intake = Intake(info, target, speculation)
        self._roster = Roster(info, target, self.stats)
        self._sequences = self._roster.sequences
        self._running = self._roster.running
        self._next_session_id = 1
        # The last plan did not fit: the next has no proposals and nobody new.
        self._is_short = False
        self._untold: list[Round] = []
        # When the last pass ended, None when there was nothing to do since.
        self._busy_until_us: int | None = None
        # The last pass was one of a suspect alone: the next is for the others.
        self._is_others_turn = False
        self.drafts = DraftDesk(self._sequences, self.policy, rpc)
        self.local = LocalDrafts(info, speculation, self.policy, self.stats)

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are free and not promised to the text of a running sequence."""
        return self._roster.num_free_blocks

    def running_sequences(self) -> list[Sequence]:
        return [self._sequences[session_id] for session_id in self._running]

    def add(
        self,
        request: GenerateRequest,
        now_us: int,
        is_checked: bool = False,
        traces: Mapping[int, RoundTracer] = NO_TRACES,
    ) -> int:
        """Admit or queue a request; choice i, if it is to run, has the returned session id + i.

        Raises what `intake.check` does, unless `is_checked`, and `OverloadedError` when
        `target.max_queued_seqs` wait already. Nothing was started then.
        """
        if not is_checked:
            self.intake.check(request)
        prompt_len = len(request.prompt_token_ids)
        lengths = [prompt_len + len(output) for output in living_outputs(request).values()]
        # Before anything is built: that takes milliseconds for a long prompt.
        num_shared = self.intake.num_shared_tokens(request)
        self._roster.check_room(lengths, num_shared, request.is_background)
        first_session_id = self._next_session_id
        group = self.intake.sequences(request, first_session_id, now_us, traces)
        for sequence in group:
            self.local.open(sequence)
            self.policy.add(sequence.lookahead)
        self._roster.enqueue(group)
        self._next_session_id += request.n
        self._admit(now_us)
        return first_session_id

    def abort(self, session_id: int) -> bool:
        """End a sequence early; False when it is already gone."""
        sequence = self._sequences.get(session_id)
        if sequence is None or sequence.is_aborted:
            return False
        self.stats.num_aborted += 1
        sequence.is_aborted = True
        if not sequence.in_pass:
            self._retire(session_id)
        return True

    def expire(self, now_us: int) -> list[Ending]:
        """End the requests that have waited `target.max_queue_s` and never had a place (who has
        begun and lost its KV is not among them), and name those in the background that must give
        way: the caller aborts these. May be called amid a pass."""
        overdue = self._roster.overdue(now_us)
        for session_id in overdue:
            self.stats.num_queue_timeouts += 1
            self._retire(session_id)
        ended: list[Ending] = [(i, endings.queue_timeout(self.config.max_queue_s)) for i in overdue]
        return ended + [(i, endings.no_place()) for i in self._roster.giving_way()]

    def set_speculation(self, speculation: SpeculationConfig) -> None:
        """The configuration has changed; requests in progress follow."""
        self.speculation = speculation
        self.intake.speculation = speculation
        self.policy.set_limits(lookahead_limits(speculation))
        self.local.set_speculation(speculation, self._sequences.values())

    def take_released(self) -> list[int]:
        """Engine sequences to free, before the next pass."""
        return self._roster.take_released()

    def learn_free_blocks(self, num_free_blocks: int) -> None:
        """The engine's count after it has freed what `take_released` said."""
        self._roster.learn_free_blocks(num_free_blocks)

    def _admit(self, now_us: int) -> None:
        if self._is_short and self._running:
            return  # what has just given way must not come back before a pass has been done
        for sequence in self._roster.admit():
            self.stats.admit(now_us - sequence.ready_us, sequence.num_preemptions)
            self.drafts.try_open(sequence, now_us)

    def _retire(self, session_id: int) -> None:
        sequence = self._roster.remove(session_id)
        self.local.close(sequence)
        self.drafts.close(sequence)

    # -- passes -----------------------------------------------------------------------------

    def plan(self, now_us: int) -> PassPlan | Hold:
        """The next pass. Calls `begin_verify`; exactly one of `end_pass`, `make_room`,
        `fail_pass` and `break_pass` must follow."""
        self._admit(now_us)
        self.drafts.maintain(self._running, now_us)
        if not self._running:
            self._busy_until_us = None
            return Hold(None)
        running = self.running_sequences()
        self.local.begin_plan(running)
        until_us = self._lone_hold(now_us)
        if until_us is not None:
            return Hold(until_us)
        end_holds(running, now_us)
        runnable = self._take_turns([sequence for sequence in running if not sequence.is_held])
        decoding = [sequence for sequence in runnable if sequence.is_decoding]
        missing = sorted((s for s in runnable if not s.is_decoding), key=lambda s: s.is_background)
        decodes, rows_left = self._decode_entries(decoding, missing)
        return PassPlan((*decodes, *self._prefill_entries(missing, rows_left)))

    def _take_turns(self, runnable: list[Sequence]) -> list[Sequence]:
        """While there are suspects: one of them alone, then all others, and so on in turn.

        Who has waited longest among the suspects is first: one who fails again goes behind.
        """
        suspects = [sequence for sequence in runnable if sequence.is_suspect]
        others = [sequence for sequence in runnable if not sequence.is_suspect]
        if not suspects or (self._is_others_turn and others):
            return others
        return [min(suspects, key=lambda sequence: sequence.suspected_in)]

    def _end_turn(self, plan: PassPlan) -> None:
        self._is_short = False
        sequences = [self._sequences[entry.session_id] for entry in plan.entries]
        self._is_others_turn = any(sequence.is_suspect for sequence in sequences)

    def _lone_hold(self, now_us: int) -> int | None:
        if len(self._running) != 1 or self.num_waiting or self._is_short:
            return None
        sequence = self._sequences[self._running[0]]
        was_held = bool(sequence.hold_until_us)
        offer = self.local.offer(sequence)
        until_us = lone_hold(sequence, self.policy.lone, now_us, offer)
        self.stats.num_holds += until_us is not None and not was_held
        return until_us

    def _decode_entries(
        self, decoding: Seq[Sequence], missing: Seq[Sequence]
    ) -> tuple[list[PassEntry], int]:
        """One row for every sequence that can decode, its proposals while rows and blocks last.

        Scarce rows are shared evenly, the odd ones in turn: who came first has no more claim.
        """
        rows_left = self.config.max_rows_per_pass - len(decoding)
        num_prefill = prefill_share(missing, rows_left)
        draft_rows = 0 if self._is_short else rows_left - num_prefill
        free_blocks = self._roster.num_free_blocks
        first = self.stats.num_passes % max(1, len(decoding))
        in_turn = (*decoding[first:], *decoding[:first])
        windows = [self.local.window(sequence) for sequence in in_turn]
        limits = self.policy.plan(windows, num_prefill, draft_rows)
        drafts: dict[int, tuple[int, ...]] = {}
        for sequence, limit in zip(in_turn, limits, strict=True):
            room = self._roster.room(sequence, free_blocks)
            draft = self.local.begin_verify(sequence, min(limit, room))
            drafts[sequence.session.session_id] = draft
            free_blocks -= self._roster.num_new_blocks(sequence, len(draft))
            rows_left -= len(draft)
        entries = [
            self._entry(s, s.session.committed_len - 1, None, drafts[s.session.session_id])
            for s in decoding
        ]
        return entries, rows_left

    def _prefill_entries(self, missing: Seq[Sequence], rows_left: int) -> list[PassEntry]:
        """Prompts, and texts that have lost their KV: clients' first, each in order of arrival."""
        entries = []
        for sequence in missing:
            if rows_left < 1:
                break
            sequence.session.begin_verify(0)
            self.local.prefill(sequence)
            entry = self._entry(sequence, sequence.cached_len, rows_left, ())
            rows_left -= entry.max_rows
            entries.append(entry)
        return entries

    def end_pass(
        self, plan: PassPlan, results: Seq[StepResult], times: PassTimes, num_free_blocks: int
    ) -> list[tuple[int, RoundDelta]]:
        """`commit_pass` and `finish_pass`."""
        self.commit_pass(plan, results, times, num_free_blocks)
        return self.finish_pass(times.ended_us)

    def commit_pass(
        self, plan: PassPlan, results: Seq[StepResult], times: PassTimes, num_free_blocks: int
    ) -> None:
        """Commit a pass: what the next plan needs. `finish_pass` must follow before another.
        `num_free_blocks` is the engine's count after the pass."""
        self._end_turn(plan)
        self.learn_free_blocks(num_free_blocks)
        num_before = self.stats.num_committed_tokens
        pairs = list(zip(plan.entries, results, strict=True))
        num_rows = [entry.num_computed(result) for entry, result in pairs]
        done = PassRecord(times, len(pairs), sum(num_rows))
        for entry, result in pairs:
            sequence = self._sequences[entry.session_id]
            sequence.learn(result, entry.cached_len(result))
            sequence.clock.passed(done)
            self.stats.num_prefix_tokens += result.num_prefix_tokens
            if sequence.is_aborted:
                self._retire(entry.session_id)
            elif result.token_ids:
                self._untold.append(self._commit(entry, result, times))
            else:
                sequence.session.cancel_verify()  # a prefill that has not got to the end
        num_committed = self.stats.num_committed_tokens - num_before
        idle_us = None if self._busy_until_us is None else times.started_us - self._busy_until_us
        self._busy_until_us = times.ended_us
        record = pass_record(plan, num_rows, num_committed, times, idle_us)
        self.stats.end_pass(record)
        self.local.end_pass()
        self._admit(times.ended_us)
        self.policy.end_pass(record)

    def finish_pass(self, now_us: int = 0) -> list[tuple[int, RoundDelta]]:
        """What requests and drafts are told of a pass, at best while the next one runs: returns
        each sequence's delta; verdicts are in the drafts' outboxes, sent at `now_us`."""
        untold, self._untold = self._untold, []
        return [(each.sequence.session.session_id, self._tell(each, now_us)) for each in untold]

    def _commit(self, entry: PassEntry, result: StepResult, times: PassTimes) -> Round:
        sequence = self._sequences[entry.session_id]
        session = sequence.session
        acceptance = entry.acceptance(result)
        source = sequence.source_of(len(entry.draft_token_ids))
        unused = self.local.end_round(sequence, entry, result, acceptance)
        delta = session.commit(acceptance, entry.accepted(result, acceptance))
        self.local.keep_heads(sequence, result)
        # The cache is right up to the last accepted proposal; the rest is overwritten.
        sequence.cached_len = min(sequence.cached_len, session.committed_len - 1)
        sequence.ready_us, sequence.hold_until_us = times.ended_us, 0
        sequence.suspected_in = 0
        self.stats.end_round(delta, sequence.cap, unused, source)
        record = sequence.clock.close(times.ended_us)
        if session.is_finished:
            self.stats.num_finished += 1
            self._retire(entry.session_id)
        return Round(sequence, delta, record, result.logprobs, source)

    def _tell(self, told: Round, now_us: int) -> RoundDelta:
        return tell(told, self.policy, self.drafts, now_us)

    def make_room(self, plan: PassPlan) -> bool:
        """The engine raised `OutOfBlocks` and did nothing; True when the next plan asks for less.

        Proposals go first: they are bets. Then the newest sequence gives way, in the background if
        there is one. One that is alone and still does not fit is a bug: then the answer is False
        and the pass has failed.
        """
        was_aborted = False
        for entry in plan.entries:
            sequence = self._sequences[entry.session_id]
            sequence.leave_pass()
            if sequence.is_aborted:
                was_aborted = True
                self._retire(entry.session_id)
        self._is_short = True
        self.stats.num_short_plans += 1
        if was_aborted or plan.has_drafts:
            return True
        if len(self._running) < 2:
            return False
        self.stats.num_preemptions += 1
        self.drafts.suspend(self._roster.preempt_newest())
        return True

    def fail_pass(self, plan: PassPlan) -> list[Ending]:
        """The engine raised, and can go on: nothing of this pass has happened.

        One request must not take others with it. A pass over several sequences ends nobody: all
        of them are suspects and compute their texts again, each alone, until it has committed a
        token that way. A pass over one has found the cause, if no draft had a say in it: else it
        is tried again without proposals, and that draft is not to have it any more. Suspects run
        in the order in which they became that, so an engine that fails any batch still serves
        them one by one.
        """
        self.stats.num_failed_passes += 1
        self._end_turn(plan)
        ended = []
        for entry in plan.entries:
            sequence = self._sequences[entry.session_id]
            sequence.leave_pass()
            if sequence.is_aborted:
                self._retire(entry.session_id)
            elif len(plan.entries) == 1 and not plan.has_bets:
                self._retire(entry.session_id)
                ended.append((entry.session_id, endings.engine_error()))
            else:
                is_alone = len(plan.entries) == 1
                if not self.local.bar(sequence, entry, is_alone) and is_alone:
                    self.drafts.bar(sequence)
                self._suspect(sequence)
        self.stats.num_failed += len(ended)
        return ended

    def _suspect(self, sequence: Sequence) -> None:
        """Nothing that could be the cause is kept: neither KV nor what a draft proposed."""
        sequence.suspected_in = self.stats.num_failed_passes
        self._roster.drop_cache(sequence)
        self.drafts.suspend(sequence)
        sequence.session.empty_window()

    def break_pass(self, plan: PassPlan) -> list[Ending]:
        """The engine broke under this pass for good: everybody ends here.

        Who had a choice in the pass may be the cause and is told so; the others are not.
        """
        in_pass = {self._sequences[e.session_id].first_session_id for e in plan.entries}
        ended = []
        for session_id, sequence in list(self._sequences.items()):
            sequence.leave_pass()
            self._retire(session_id)
            is_suspect = sequence.first_session_id in in_pass
            error = endings.engine_broken() if is_suspect else endings.target_lost()
            ended.append((session_id, error))
            self.stats.num_failed += not sequence.is_aborted
        return ended
