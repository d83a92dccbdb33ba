"""Translations for the lookahead policy: the configuration, and what a pass was. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import SpeculationConfig
from paceline.protocol.lookahead import LookaheadLimits, PassRecord
from paceline.protocol.messages import REJECTION_MODES
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import Acceptance
from paceline.target.passes import PassPlan
from paceline.target.sequence import PassTimes


def lookahead_limits(speculation: SpeculationConfig) -> LookaheadLimits:
    """The policy's view of the configuration."""
    is_off = speculation.method == "off"
    return LookaheadLimits(
        is_adaptive=speculation.lookahead == "adaptive",
        num_speculative_tokens=speculation.num_speculative_tokens,
        max_num_speculative_tokens=0 if is_off else speculation.max_num_speculative_tokens,
        max_draft_ahead=speculation.max_draft_ahead,
        max_fan_out=speculation.max_fan_out,
        max_lone_wait_us=int(speculation.max_lone_wait_ms * 1000),
    )


def pass_record(
    plan: PassPlan,
    num_rows: Sequence[int],
    num_committed: int,
    times: PassTimes,
    idle_us: int | None,
) -> PassRecord:
    """`num_rows` has the rows that were computed, one number per entry."""
    decoding = [entry for entry in plan.entries if not entry.is_prefill]
    pairs = zip(plan.entries, num_rows, strict=True)
    return PassRecord(
        num_sequences=len(decoding),
        num_rows=sum(num_rows),
        num_prefill_rows=sum(rows for entry, rows in pairs if entry.is_prefill),
        num_draft_tokens=sum(len(entry.draft_token_ids) for entry in decoding),
        num_committed=num_committed,
        started_us=times.started_us,
        ended_us=times.ended_us,
        idle_us=idle_us,
    )


def was_foreseen(
    session: TargetSession, num_draft_tokens: int, acceptance: Acceptance
) -> bool | None:
    """Whether the pass's own token behind a full acceptance is the proposal that has come for its
    place meanwhile; None: none has, or the mode does not compare. Asked before `end_verify`."""
    place = session.committed_len + num_draft_tokens
    is_full = acceptance.num_accepted_tokens == num_draft_tokens
    if session.mode in REJECTION_MODES or not is_full or place >= len(session.log):
        return None
    return session.log.slice(place, place + 1) == (acceptance.next_token_id,)


def num_unused(session: TargetSession, num_draft_tokens: int, acceptance: Acceptance) -> int:
    """Proposals behind those of this pass that its outcome makes useless: all, unless the pass's
    own token is the first of them. Asked before `commit`."""
    num_ahead = session.window_len - num_draft_tokens
    if num_ahead < 1:
        return 0
    place = session.committed_len + num_draft_tokens
    is_full = acceptance.num_accepted_tokens == num_draft_tokens
    goes_on = is_full and session.log.slice(place, place + 1) == (acceptance.next_token_id,)
    return 0 if goes_on else num_ahead


def compared(session: TargetSession, token_ids: Sequence[int]) -> tuple[int, int]:
    """Where a pass that verified local proposals commits `token_ids`: how many proposals of the
    window they speak about, and how many of these are right; (0, 0) where the mode does not
    compare. Asked before `commit`."""
    if session.mode in REJECTION_MODES:
        return 0, 0
    num_right = session.log.common_len(session.committed_len, token_ids)
    return min(session.window_len, len(token_ids), num_right + 1), num_right


def num_outrun(session: TargetSession, token_ids: Sequence[int]) -> int:
    """Proposals of the window that such a pass makes useless: all from the first wrong one on.
    Asked before `commit`."""
    num_right = session.log.common_len(session.committed_len, token_ids)
    return session.window_len - num_right if num_right < len(token_ids) else 0
