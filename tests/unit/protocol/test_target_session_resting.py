"""A draft that rests, as the target's session sees it: what it is told, and when."""

from paceline.protocol.messages import DraftTokens, Opened, OpenStatus
from paceline.protocol.target_session import MAX_UNTOLD, Disposition, TargetSession
from paceline.protocol.token_log import TokenLog
from paceline.sampling.acceptance import accept_matching
from paceline.sampling.params import SamplingParams, VerificationMode

PROMPT = (1, 2, 3)
EOS = 99
MATCHING = [VerificationMode.GREEDY, VerificationMode.COUPLED]
LAWFUL = [VerificationMode.REJECTION, VerificationMode.BLOCK]


def streaming(*, max_tokens=100, ahead=16, fan_out=2, mode=VerificationMode.GREEDY):
    session = TargetSession(
        7,
        PROMPT,
        sampling=SamplingParams(temperature=float(mode is not VerificationMode.GREEDY)),
        mode=mode,
        max_tokens=max_tokens,
        max_len=1000,
        stop_token_ids=frozenset({EOS}),
        max_draft_ahead=ahead,
    )
    session.fan_out = fan_out
    session.reopen()
    session.receive_opened(Opened(7, 1, OpenStatus.OK))
    return session


def draft(context, *token_ids, last_round=0, epoch=1, is_branch=False):
    """Proposals from a draft whose text is `context`."""
    context_hash = TokenLog(context).hash_at(len(context))
    return DraftTokens(
        7, epoch, len(context), context_hash, token_ids, last_round, is_branch=is_branch
    )


def branch(context, *token_ids, **kwargs):
    return draft(context, *token_ids, is_branch=True, **kwargs)


def verify(session, limit, *own):
    return session.end_verify(accept_matching(session.begin_verify(limit), own))


def window(session):
    return session.log.slice(session.committed_len)


def prepared(*, after=(20,), then=(100, 101, 102), **kwargs):
    """The window is 10 11 12, and there is a branch behind `after`."""
    session = streaming(**kwargs)
    session.receive_draft(draft(PROMPT, 10, 11, 12))
    held = session.receive_draft(branch((*PROMPT, *after), *then), note="note")
    assert held is Disposition.ALTERNATE
    return session


class TestResting:
    def test_what_it_wakes_with_leads_to_the_branch(self):
        """Untold commits, then a correction, then credit: one verdict tells all of it, and what
        was adopted meanwhile is gone on with."""
        session = prepared(after=(10, 21))
        session.max_draft_ahead = 0
        assert verify(session, 0, 10).verdict is None
        assert verify(session, 1, 21, 0).verdict is None
        assert window(session) == (100, 101, 102)
        session.max_draft_ahead = 16
        verdict = verify(session, 1, 100, 101).verdict
        assert (verdict.start, verdict.token_ids) == (3, (10, 21, 100, 101))
        more = draft((*PROMPT, 10, 21, 100, 101, 102), 103, last_round=3)
        assert session.receive_draft(more) is Disposition.KEPT
        assert window(session) == (102, 103)

    def test_it_is_told_now_and_then(self):
        session = streaming(max_tokens=200)
        session.max_draft_ahead = 0
        verdicts = [verify(session, 0, 10).verdict for _ in range(2 * MAX_UNTOLD)]
        told = [verdict for verdict in verdicts if verdict is not None]
        assert [(v.start, len(v.token_ids)) for v in told] == [
            (3, MAX_UNTOLD),
            (3 + MAX_UNTOLD, MAX_UNTOLD),
        ]
