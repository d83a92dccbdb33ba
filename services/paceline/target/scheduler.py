"""Continuous batching of one target. Pure: plans passes and applies their results.

Never-wait rule: every runnable sequence is in every pass, with whatever proposals have arrived
(capped), so with no drafts a pass *is* plain decoding. Only a lone sequence may hold a pass for a
bounded time, when that is predicted to pay. The scheduler knows no threads, sockets or tensors;
its driver runs the engine and moves messages. Time is an argument (monotonic microseconds).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo, StepItem, StepResult
from paceline.errors import ContextLengthError, OverloadedError, RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.link import LinkState
from paceline.protocol.lookahead import LonePolicy, WindowOutlook
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import accept_matching
from paceline.target.draft_desk import DraftDesk
from paceline.target.sequence import PassTimes, Sequence


@dataclass(frozen=True, slots=True)
class PassEntry:
    """One sequence's rows in a pass and the proposals among them."""

    session_id: int
    item: StepItem
    draft_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One forward pass, ready for `Engine.step`."""

    entries: tuple[PassEntry, ...]

    @property
    def items(self) -> list[StepItem]:
        return [entry.item for entry in self.entries]

    @property
    def num_rows(self) -> int:
        return sum(len(entry.item.token_ids) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Hold:
    """Nothing to run before `until_us` unless something arrives; None: until something does."""

    until_us: int | None


@dataclass
class SchedulerStats:
    """Counts since start. A round is one pass of one sequence that committed tokens."""

    num_passes: int = 0
    num_rows: int = 0
    num_rounds: int = 0
    num_plain_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_holds: int = 0
    num_finished: int = 0
    num_aborted: int = 0


class Scheduler:
    """All sequences of one target replica."""

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
        self.policy = LonePolicy(int(speculation.max_lone_wait_ms * 1000))
        self.stats = SchedulerStats()
        self._sequences: dict[int, Sequence] = {}  # running and waiting, by session id
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        self._released: list[int] = []
        self._next_session_id = 1
        self._free_blocks = info.num_blocks
        self.drafts = DraftDesk(self._sequences, self.policy, rpc, speculation.max_draft_ahead)

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no admitted sequence has reserved."""
        return self._free_blocks

    def add(self, request: GenerateRequest, now_us: int) -> int:
        """Admit or queue a request; returns its session id.

        Raises `ContextLengthError` / `RequestError` for what can never run here and
        `OverloadedError` when `target.max_queued_seqs` wait already. Nothing was started then.
        """
        end_len = self._check(request)
        num_blocks = -(-end_len // self.info.block_size)
        if num_blocks > self.info.num_blocks:
            raise ContextLengthError(
                f"prompt + max_tokens need {end_len} tokens of KV cache; this deployment holds"
                f" {self.info.num_blocks * self.info.block_size}",
                "max_tokens",
                "context_length_exceeded",
            )
        must_wait = bool(self._waiting) or not self._fits(num_blocks)
        if must_wait and len(self._waiting) >= self.config.max_queued_seqs:
            raise OverloadedError(
                f"{len(self._waiting)} requests are queued (target.max_queued_seqs)",
                None,
                "queue_full",
                retry_after_s=1,
            )
        session_id, self._next_session_id = self._next_session_id, self._next_session_id + 1
        stops = () if request.ignore_eos else (*request.stop_token_ids, *self.info.eos_token_ids)
        max_draft = self._max_draft(request)
        session = TargetSession(
            session_id,
            request.prompt_token_ids,
            sampling=request.sampling,
            mode=request.sampling.mode,
            max_tokens=request.max_tokens,
            max_len=self.info.max_model_len,
            stop_token_ids=frozenset(stops),
            max_draft_ahead=self._max_draft_ahead(max_draft),
        )
        sequence = Sequence(session, request, max_draft, num_blocks)
        sequence.ready_us = now_us
        self._sequences[session_id] = sequence
        self._waiting.append(session_id)
        self._admit(now_us)
        return session_id

    def _check(self, request: GenerateRequest) -> int:
        """Length at the end; the gateway checks the same, but a target trusts nobody."""
        prompt_len = len(request.prompt_token_ids)
        if prompt_len == 0 or request.max_tokens < 1:
            raise RequestError("a request needs a prompt token and max_tokens >= 1", "prompt")
        if prompt_len >= self.info.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt_len} tokens; this model's context is"
                f" {self.info.max_model_len}, of which one is for the answer",
                "prompt",
                "context_length_exceeded",
            )
        if not all(0 <= t < self.info.vocab_size for t in request.prompt_token_ids):
            raise RequestError(f"prompt token ids must be in [0, {self.info.vocab_size})", "prompt")
        mode = request.speculation.mode
        if mode is not None and mode is not request.sampling.mode:
            raise RequestError(
                f"speculation.mode {mode} does not fit temperature"
                f" {request.sampling.temperature}; it would be {request.sampling.mode}",
                "speculation.mode",
            )
        return min(prompt_len + request.max_tokens, self.info.max_model_len)

    def _max_draft(self, request: GenerateRequest) -> int:
        if self.speculation.method == "off" or request.speculation.method == "off":
            return 0
        asked = request.speculation.max_tokens
        wanted = self.speculation.num_speculative_tokens if asked is None else asked
        return min(wanted, self.speculation.max_num_speculative_tokens)

    def _max_draft_ahead(self, max_draft: int) -> int:
        """Credit: what this pass verifies, its bonus, and what the next one could.

        A proposal further ahead is a longer bet that no pass can use any sooner.
        """
        return min(self.speculation.max_draft_ahead, 2 * max_draft + 1)

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

    def take_released(self) -> list[int]:
        """Engine sequences to free, before the next pass."""
        released, self._released = self._released, []
        return released

    def _fits(self, num_blocks: int) -> bool:
        return len(self._running) < self.config.max_num_seqs and num_blocks <= self._free_blocks

    def _admit(self, now_us: int) -> None:
        while self._waiting and self._fits(self._sequences[self._waiting[0]].num_blocks):
            session_id = self._waiting.popleft()
            sequence = self._sequences[session_id]
            self._free_blocks -= sequence.num_blocks
            self._running.append(session_id)
            self.drafts.try_open(sequence, now_us)

    def _retire(self, session_id: int) -> None:
        sequence = self._sequences.pop(session_id)
        self.drafts.close(sequence)
        if session_id in self._running:
            self._running.remove(session_id)
            self._free_blocks += sequence.num_blocks
            self._released.append(session_id)
        else:
            self._waiting.remove(session_id)

    # -- passes -----------------------------------------------------------------------------

    def plan(self, now_us: int) -> PassPlan | Hold:
        """The next pass. Calls `begin_verify`; exactly one `end_pass`/`fail_pass` must follow."""
        self._admit(now_us)
        self.drafts.maintain(self._running, now_us)
        if not self._running:
            return Hold(None)
        until_us = self._lone_hold(now_us)
        if until_us is not None:
            return Hold(until_us)
        decodes, rows_left = self._decode_entries()
        return PassPlan((*decodes, *self._prefill_entries(rows_left)))

    def _lone_hold(self, now_us: int) -> int | None:
        if len(self._running) != 1 or self._waiting:
            return None
        sequence = self._sequences[self._running[0]]
        session = sequence.session
        streaming = session.link is LinkState.STREAMING
        if not (sequence.is_decoding and sequence.max_draft and streaming):
            return None
        have = session.window_len
        if sequence.hold_until_us:
            if have > sequence.hold_have:
                self.policy.record_wait(hit=True)
            elif now_us >= sequence.hold_until_us:
                self.policy.record_wait(hit=False)
                return None
        want = min(sequence.max_draft, session.limit_position - session.committed_len)
        # Nothing here after a flush: the draft must hear our last verdict before it can go on.
        is_due = session.is_flushed and have == 0
        since_us = sequence.ready_us if is_due else sequence.last_arrival_us or sequence.ready_us
        outlook = WindowOutlook(have, want, since_us, is_due)
        until_us = self.policy.wait_until(outlook, sequence.acceptance.rate, now_us)
        until_us = min(until_us, sequence.ready_us + self.policy.max_wait_us)
        if until_us <= now_us:
            return None
        self.stats.num_holds += not sequence.hold_until_us
        sequence.hold_until_us, sequence.hold_have = until_us, have
        return until_us

    def _decode_entries(self) -> tuple[list[PassEntry], int]:
        """One row for every sequence that can decode, its proposals while rows last."""
        decoding = [s for s in map(self._sequences.__getitem__, self._running) if s.is_decoding]
        rows_left = self.config.max_rows_per_pass - len(decoding)
        draft_rows = rows_left - self._prefill_share(rows_left)
        entries = []
        for sequence in decoding:
            draft = sequence.session.begin_verify(min(sequence.max_draft, draft_rows))
            draft_rows -= len(draft)
            rows_left -= len(draft)
            entries.append(self._entry(sequence, sequence.session.committed_len - 1, None, draft))
        return entries, rows_left

    def _prefill_share(self, rows_left: int) -> int:
        """Rows that proposals leave to prompts: a proposal is a bet, a prompt is work."""
        running = map(self._sequences.__getitem__, self._running)
        missing = sum(s.session.committed_len - s.cached_len for s in running if not s.is_decoding)
        return min(missing, -(-rows_left // 2))

    def _prefill_entries(self, rows_left: int) -> list[PassEntry]:
        entries = []
        for sequence in map(self._sequences.__getitem__, self._running):
            # `in_pass`: it is a decode of this very pass.
            if sequence.in_pass or sequence.is_decoding or rows_left < 1:
                continue
            start, end = sequence.cached_len, sequence.session.committed_len
            stop = min(end, start + rows_left)
            rows_left -= stop - start
            if stop == end:
                sequence.session.begin_verify(0)
            entries.append(self._entry(sequence, start, stop, ()))
        return entries

    def _entry(
        self, sequence: Sequence, start: int, stop: int | None, draft: tuple[int, ...]
    ) -> PassEntry:
        session = sequence.session
        sequence.in_pass = True
        end = session.committed_len
        is_last = stop is None or stop == end
        item = StepItem(
            sequence_id=session.session_id,
            start=start,
            token_ids=session.log.slice(start, end if stop is None else stop) + draft,
            num_samples=1 + len(draft) if is_last else 0,
            sampling=session.sampling,
            output_index=session.num_output_tokens,
        )
        return PassEntry(session.session_id, item, draft)

    def end_pass(
        self, plan: PassPlan, results: Seq[StepResult], times: PassTimes
    ) -> list[tuple[int, RoundDelta]]:
        """Commit a pass; returns each sequence's delta. Verdicts are in the drafts' outboxes."""
        self.stats.num_passes += 1
        self.stats.num_rows += plan.num_rows
        if all(e.item.num_samples == len(e.item.token_ids) for e in plan.entries):  # no prefill
            self.policy.pass_us.update(times.ended_us - times.started_us)
        deltas = []
        for entry, result in zip(plan.entries, results, strict=True):
            sequence = self._sequences[entry.session_id]
            sequence.in_pass = False
            sequence.cached_len = entry.item.start + len(entry.item.token_ids)
            if sequence.is_aborted:
                self._retire(entry.session_id)
            elif entry.item.num_samples:
                deltas.append((entry.session_id, self._commit(entry, result, times)))
        self._admit(times.ended_us)
        return deltas

    def _commit(self, entry: PassEntry, result: StepResult, times: PassTimes) -> RoundDelta:
        sequence = self._sequences[entry.session_id]
        session = sequence.session
        start = session.committed_len
        step = session.end_verify(accept_matching(entry.draft_token_ids, result.token_ids))
        delta = step.delta
        # The cache is right up to the last accepted proposal; the rest is overwritten.
        sequence.cached_len = min(sequence.cached_len, session.committed_len - 1)
        sequence.ready_us, sequence.hold_until_us = times.ended_us, 0
        sequence.acceptance.update(delta.num_draft_tokens, delta.num_accepted_tokens)
        self._count(delta.num_draft_tokens, delta.num_accepted_tokens, len(delta.token_ids))
        if step.verdict is not None and not session.is_finished:
            verify_us = times.ended_us - times.started_us
            self.drafts.send_verdict(sequence, replace(step.verdict, verify_us=verify_us))
        round_delta = sequence.to_round(delta, start, times)
        if session.is_finished:
            self.stats.num_finished += 1
            self._retire(entry.session_id)
        return round_delta

    def _count(self, num_draft: int, num_accepted: int, num_committed: int) -> None:
        self.stats.num_rounds += 1
        self.stats.num_plain_rounds += num_draft == 0
        self.stats.num_draft_tokens += num_draft
        self.stats.num_accepted_tokens += num_accepted
        self.stats.num_committed_tokens += num_committed

    def fail_pass(self, plan: PassPlan) -> list[int]:
        """The engine failed: its sequences end here; returns their session ids."""
        failed = []
        for entry in plan.entries:
            sequence = self._sequences.get(entry.session_id)
            if sequence is not None:
                sequence.in_pass = False
                sequence.session.cancel_verify()
                self._retire(entry.session_id)
                failed.append(entry.session_id)
        return failed
