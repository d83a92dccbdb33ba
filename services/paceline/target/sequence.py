"""One of a request's sequences inside the scheduler: its session, and what passes need to know.

It knows no other sequence but the first of its own request, and neither queues nor KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.base import StepResult
from paceline.generation import GenerateRequest, RoundDelta, TokenLogprobs
from paceline.protocol.lookahead import Grant, SequenceLookahead
from paceline.protocol.messages import DraftTokens
from paceline.protocol.target_session import TargetSession, TokenDelta
from paceline.target.patience import Patience


@dataclass(frozen=True, slots=True)
class Arrival:
    """One `DraftTokens`: proposals before position `end`, and where their time went."""

    end: int
    arrived_us: int
    wire_us: int
    draft_us: int

    @staticmethod
    def of(draft: DraftTokens, now_us: int, wire_us: int) -> Arrival:
        return Arrival(draft.start + len(draft.token_ids), now_us, wire_us, draft.draft_us)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Start and end of a pass on the target's monotonic clock, microseconds."""

    started_us: int
    ended_us: int


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
    nacked_round: int = -1  # the last round in which a Nack of the draft was answered
    ready_us: int = 0  # when the last pass of this sequence ended
    last_arrival_us: int = 0
    hold_until_us: int = 0
    hold_have: int = 0
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def first_session_id(self) -> int:
        """Session id of choice 0: the same for all choices of a request, whether it runs or not."""
        return self.session.session_id - self.choice

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

    def allow(self, grant: Grant) -> None:
        """How far its draft may run, from the next open or verdict on."""
        self.session.max_draft_ahead = grant.draft_ahead
        self.session.fan_out = grant.fan_out

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

    def preempt(self) -> None:
        """Its KV is gone; tokens, and what was delivered, stay. Collected logprobs come again."""
        self.cached_len = 0
        self.num_preemptions += 1
        self.prompt_logprobs.clear()
        self.hold_until_us = 0

    def keep(self, arrival: Arrival) -> None:
        """Remember when proposals arrived (bounded: one entry per message in the window)."""
        self.arrivals.append(arrival)
        self.last_arrival_us = arrival.arrived_us

    def to_round(
        self,
        delta: TokenDelta,
        start: int,
        times: PassTimes,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> RoundDelta:
        """The delta with the times of the proposals that this pass verified.

        `logprobs` may go on behind the committed tokens, up to the last sampled row.
        """
        is_first = start == self.session.prompt_len
        prompt_logprobs = tuple(self.prompt_logprobs)
        self.prompt_logprobs.clear()
        end = start + delta.num_draft_tokens
        used: list[Arrival] = []
        covered = start
        for arrival in self.arrivals:
            if covered >= end:
                break
            if arrival.end > covered:
                used.append(arrival)
                covered = arrival.end
        self._forget_arrivals()
        return RoundDelta(
            round=delta.round,
            token_ids=delta.token_ids,
            origins=delta.origins,
            num_draft_tokens=delta.num_draft_tokens,
            num_accepted_tokens=delta.num_accepted_tokens,
            num_speculative_tokens=max(self.lookahead.cap, delta.num_draft_tokens),
            draft_ms=sum(a.draft_us for a in used) / 1000.0,
            wire_out_ms=(used[-1].wire_us if used else 0) / 1000.0,
            queue_ms=max(0, times.started_us - used[-1].arrived_us) / 1000.0 if used else 0.0,
            verify_ms=(times.ended_us - times.started_us) / 1000.0,
            finish_reason=delta.finish_reason,
            choice=self.choice,
            logprobs=logprobs[: len(delta.token_ids)],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens if is_first else 0,
        )

    def _forget_arrivals(self) -> None:
        """Only those of the window are left. One that was a branch until now has its own: they
        have waited since they came, like any others."""
        session = self.session
        if session.adopted:
            notes = [note for note in dict.fromkeys(session.adopted) if isinstance(note, Arrival)]
            self.arrivals = notes
            return
        left = session.committed_len if session.window_len else session.end_len
        self.arrivals = [arrival for arrival in self.arrivals if arrival.end > left]
