"""A target session that streams with branches, driven by hand: for the tests beside it."""

from paceline.protocol.messages import DraftTokens, Opened, OpenStatus
from paceline.protocol.target_session import Disposition, TargetSession
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
    held = session.receive_draft(branch((*PROMPT, *after), *then))
    assert held is Disposition.ALTERNATE
    return session
