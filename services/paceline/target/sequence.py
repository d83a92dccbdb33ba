"""One admitted request inside the scheduler: its session plus what passes need to know of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.lookahead import AcceptanceEstimate
from paceline.protocol.messages import DraftTokens
from paceline.protocol.target_session import TargetSession, TokenDelta


@dataclass(frozen=True, slots=True)
class Arrival:
    """One kept `DraftTokens`: proposals before position `end`, and where their time went."""

    end: int
    arrived_us: int
    wire_us: int
    draft_us: int


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Start and end of a pass on the target's monotonic clock, microseconds."""

    started_us: int
    ended_us: int


@dataclass(slots=True)
class Sequence:
    """`max_draft` is the K cap in force (0 = drafting off); `num_blocks` its KV reservation."""

    session: TargetSession
    request: GenerateRequest
    max_draft: int
    num_blocks: int
    acceptance: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    # Tokens whose KV the engine holds for exactly this sequence's tokens.
    cached_len: int = 0
    in_pass: bool = False
    is_aborted: bool = False
    draft_id: int | None = None
    last_draft_id: int | None = None
    open_deadline_us: int = 0
    next_open_us: int = 0
    open_pause_us: int = 0
    ready_us: int = 0  # when the last pass of this sequence ended
    last_arrival_us: int = 0
    hold_until_us: int = 0
    hold_have: int = 0
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest committed token is missing from the cache."""
        return self.cached_len >= self.session.committed_len - 1

    def keep(self, draft: DraftTokens, now_us: int, wire_us: int) -> None:
        """Remember when proposals arrived (bounded: one entry per message in the window)."""
        end = draft.start + len(draft.token_ids)
        self.arrivals.append(Arrival(end, now_us, wire_us, draft.draft_us))
        self.last_arrival_us = now_us

    def to_round(self, delta: TokenDelta, start: int, times: PassTimes) -> RoundDelta:
        """The delta with the times of the proposals that this pass verified."""
        end = start + delta.num_draft_tokens
        used: list[Arrival] = []
        covered = start
        for arrival in self.arrivals:
            if covered >= end:
                break
            if arrival.end > covered:
                used.append(arrival)
                covered = arrival.end
        left = self.session.committed_len if self.session.window_len else self.session.end_len
        self.arrivals = [arrival for arrival in self.arrivals if arrival.end > left]
        return RoundDelta(
            round=delta.round,
            token_ids=delta.token_ids,
            origins=delta.origins,
            num_draft_tokens=delta.num_draft_tokens,
            num_accepted_tokens=delta.num_accepted_tokens,
            num_speculative_tokens=self.max_draft,
            draft_ms=sum(a.draft_us for a in used) / 1000.0,
            wire_ms=(used[-1].wire_us if used else 0) / 1000.0,
            queue_ms=max(0, times.started_us - used[-1].arrived_us) / 1000.0 if used else 0.0,
            verify_ms=(times.ended_us - times.started_us) / 1000.0,
            finish_reason=delta.finish_reason,
        )
