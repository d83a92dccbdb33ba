"""One of a request's sequences inside the scheduler: its session, and what passes need to know.

It knows no other sequence but the first of its own request, and neither queues nor KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.engine.base import StepResult
from paceline.generation import GenerateRequest, RoundDelta, TokenLogprobs
from paceline.methods import ProposalSource
from paceline.protocol.lookahead import Grant, SequenceLookahead
from paceline.protocol.messages import Verdict
from paceline.protocol.target_session import TargetSession, TokenDelta
from paceline.target.patience import Patience
from paceline.target.round_clock import PassTimes, RoundClock, RoundRecord, RoundTracer
from paceline.target.sources import SourceSet

__all__ = ["PassTimes", "Sequence"]


@dataclass(slots=True)
class Sequence:
    """`lookahead` is the policy's: the K in force and what it knows of this sequence.

    `leader` is the first choice that runs, for the others of its request: `num_shared_tokens` of
    the prompt's KV can be had from the prefix cache as soon as it has computed them.
    """

    session: TargetSession
    request: GenerateRequest
    lookahead: SequenceLookahead
    choice: int = 0
    leader: Sequence | None = None
    num_shared_tokens: int = 0
    # Tokens whose KV the engine holds for exactly this sequence's tokens.
    cached_len: int = 0
    is_running: bool = False
    in_pass: bool = False
    is_aborted: bool = False
    # The failed pass that made it a suspect, by number; 0: it is none.
    suspected_in: int = 0
    # When it has waited too long for a place; 0 once its request has had one.
    queue_deadline_us: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache by the first prefill
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # until the first delta
    draft_id: int | None = None
    last_draft_id: int | None = None
    open_deadline_us: int = 0
    next_open_us: int = 0
    open_pause_us: int = 0
    patience: Patience = field(default_factory=Patience)
    barred_drafts: set[str] = field(default_factory=set)  # replicas that broke a rule in it
    # Where proposals come from, if not from a draft alone; and which it is not to have.
    sources: SourceSet | None = None
    barred_sources: set[ProposalSource] = field(default_factory=set)
    num_head_candidates: int = 0  # of each head, to ask the pass for that is planned
    nacked_round: int = -1  # the last round in which a Nack of the draft was answered
    ready_us: int = 0  # when the last pass of this sequence ended
    last_arrival_us: int = 0
    hold_until_us: int = 0
    hold_have: int = 0
    clock: RoundClock = field(default_factory=RoundClock)
    trace: RoundTracer | None = None

    @property
    def first_session_id(self) -> int:
        """Session id of choice 0: the same for all choices of a request, whether it runs or not."""
        return self.session.session_id - self.choice

    @property
    def is_background(self) -> bool:
        """Whether no client waits for it."""
        return self.request.is_background

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest committed token is missing from the cache."""
        return self.cached_len >= self.session.committed_len - 1

    @property
    def is_suspect(self) -> bool:
        """Whether it may be why a pass failed: it runs alone, and without proposals, until it has
        committed a token."""
        return self.suspected_in > 0

    @property
    def is_held(self) -> bool:
        """Whether to wait for the leader, which computes the prompt of both."""
        leader = self.leader
        return (
            leader is not None
            and self.num_shared_tokens > 0
            and leader.is_running
            and leader.session.round == 0
        )

    @property
    def cap(self) -> int:
        """The K in force, of the source that its last pass was planned with."""
        chosen = None if self.sources is None else self.sources.chosen
        return self.lookahead.cap if chosen is None else chosen.lookahead.cap

    def source_of(self, num_draft_tokens: int) -> ProposalSource:
        """What made the proposals of the open pass."""
        chosen = None if self.sources is None else self.sources.chosen
        if not num_draft_tokens:
            return ""
        return "model" if chosen is None else chosen.name

    def allow(self, grant: Grant) -> None:
        """How far its draft may run, from the next open or verdict on."""
        self.session.max_draft_ahead = grant.draft_ahead
        self.session.fan_out = grant.fan_out

    @property
    def open_context(self) -> bytes:
        """Trace context of the round that is open; empty when nobody traces it."""
        return b"" if self.trace is None else self.trace.context(self.session.round + 1)

    def stamped(self, verdict: Verdict, now_us: int, verify_us: int = 0) -> Verdict:
        """A verdict as it leaves."""
        self.clock.told(verdict.round, now_us)
        return replace(
            verdict, verify_us=verify_us, sent_us=now_us, trace_context=self.open_context
        )

    def unscored_prompt(self, start: int) -> tuple[int, ...]:
        """Prompt tokens that rows from `start` on predict and whose logprobs are still due."""
        wanted = self.request.num_prompt_logprobs is not None and self.choice == 0
        if not wanted or self.session.num_output_tokens:
            return ()
        return self.request.prompt_token_ids[start + 1 :]

    def learn(self, result: StepResult, cached_len: int) -> None:
        """A pass over this sequence is done."""
        self.in_pass = False
        self.cached_len = cached_len
        self.prompt_logprobs += result.prompt_logprobs
        if not (self.num_preemptions or self.session.num_output_tokens):
            found = self.num_cached_tokens + result.num_prefix_tokens
            self.num_cached_tokens = min(found, self.session.prompt_len)

    def leave_pass(self) -> None:
        """The pass came to nothing."""
        self.in_pass = False
        self.session.cancel_verify()

    def preempt(self) -> None:
        """Its KV is gone; tokens, and what was delivered, stay. Collected logprobs come again."""
        self.cached_len = 0
        self.num_preemptions += 1
        self.prompt_logprobs.clear()
        self.hold_until_us = 0
        if self.sources is not None:
            self.sources.drop_heads()

    def to_round(
        self,
        delta: TokenDelta,
        start: int,
        record: RoundRecord,
        logprobs: tuple[TokenLogprobs, ...] = (),
        source: ProposalSource = "",
    ) -> RoundDelta:
        """The delta with its times. `logprobs` may go on behind the committed tokens, up to the
        last sampled row."""
        is_first = start == self.session.prompt_len
        prompt_logprobs = tuple(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        times = record.times()
        return RoundDelta(
            round=delta.round,
            token_ids=delta.token_ids,
            origins=delta.origins,
            num_draft_tokens=delta.num_draft_tokens,
            num_accepted_tokens=delta.num_accepted_tokens,
            num_speculative_tokens=max(self.cap, delta.num_draft_tokens),
            wall_ms=times.wall / 1000.0,
            draft_ms=times.draft / 1000.0,
            wire_out_ms=times.wire_out / 1000.0,
            window_ms=times.window / 1000.0,
            queue_ms=times.queue / 1000.0,
            verify_ms=times.verify / 1000.0,
            sample_ms=times.sample / 1000.0,
            wire_back_ms=times.wire_back / 1000.0,
            rewind_ms=times.rewind / 1000.0,
            finish_reason=delta.finish_reason,
            choice=self.choice,
            logprobs=logprobs[: len(delta.token_ids)],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens if is_first else 0,
            source=source,
        )
