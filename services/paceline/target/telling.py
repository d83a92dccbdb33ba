"""What a request and a draft are told of a committed round. Pure; decides nothing about tokens."""

from __future__ import annotations

from paceline.generation import RoundDelta
from paceline.protocol.lookahead import LookaheadPolicy
from paceline.target.draft_desk import DraftDesk
from paceline.target.passes import Round


def tell(told: Round, policy: LookaheadPolicy, drafts: DraftDesk, now_us: int) -> RoundDelta:
    """The delta for the request; a verdict, if one is due, is in the draft's outbox."""
    sequence, delta, record = told.sequence, told.delta, told.record
    session = sequence.session
    if session.is_attached and not session.is_finished:
        sequence.allow(policy.grant(sequence.lookahead))
        verdict = session.due_verdict(delta)
        if verdict is not None:
            times = record.passes[-1][1].times
            verdict = sequence.stamped(verdict, now_us, times.ended_us - times.started_us)
        drafts.send_verdict(sequence, verdict)
    start = session.committed_len - len(delta.token_ids)
    round_delta = sequence.to_round(delta, start, record, told.logprobs, told.source)
    if sequence.trace is not None:
        link = drafts.pool.get(sequence.draft_id)
        record.describe(session, "" if link is None else link.hello.replica_id)
        sequence.trace.end_round(record, round_delta)
    return round_delta
