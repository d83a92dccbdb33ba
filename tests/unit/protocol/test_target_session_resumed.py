"""A session that goes on behind output that another target committed."""

import pytest

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.generation import TokenOrigin
from paceline.protocol.link import LinkEvent, LinkState
from paceline.protocol.messages import DraftTokens, Opened, OpenStatus
from paceline.protocol.target_session import Disposition, Step, TargetSession, TokenDelta
from paceline.protocol.token_log import TokenLog
from paceline.sampling.acceptance import Acceptance
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

GREEDY = SamplingParams(temperature=0)
EOS = 99
PROMPT, OUTPUT = (1, 2, 3), (4, 5)


def make(*, output=OUTPUT, max_tokens=100, max_len=1000, mode=VerificationMode.GREEDY, log=None):
    return TargetSession(
        7,
        PROMPT,
        sampling=GREEDY,
        mode=mode,
        max_tokens=max_tokens,
        max_len=max_len,
        stop_token_ids=frozenset({EOS}),
        log=log,
        output_token_ids=output,
    )


def attach(session):
    opened = session.reopen()
    assert session.receive_opened(Opened(7, session.epoch, OpenStatus.OK))
    return opened


def proposals(session, token_ids, start, laws=()):
    return DraftTokens(
        7, session.epoch, start, session.log.hash_at(start), token_ids, 0, draft_probs=laws
    )


def test_counts_go_on():
    session = make()
    assert (session.prompt_len, session.committed_len, session.num_output_tokens) == (3, 5, 2)
    assert (session.round, session.window_len, session.link) == (0, 0, LinkState.LOST)
    assert session.log.slice(0) == PROMPT + OUTPUT


def test_without_output_it_is_a_fresh_one():
    assert make(output=()).committed_len == 3


def test_a_given_log_is_taken_over():
    log = TokenLog(PROMPT)
    session = make(log=log)
    assert session.log is log
    assert log.slice(0) == PROMPT + OUTPUT


def test_max_tokens_counts_the_output():
    session = make(max_tokens=4)
    assert (session.end_len, session.limit_position) == (7, 6)
    assert session.begin_verify(4) == ()
    assert session.end_verify(Acceptance(0, 10)).delta.finish_reason is None
    session.begin_verify(4)
    last = session.end_verify(Acceptance(0, 11))
    plain = (TokenOrigin.PLAIN,)
    assert last == Step(TokenDelta(2, (11,), plain, 0, 0, "length"), None)
    assert session.num_output_tokens == 4


@pytest.mark.parametrize(("max_tokens", "max_len"), [(2, 1000), (1, 1000), (9, 5), (9, 4)])
def test_what_has_ended_cannot_go_on(max_tokens, max_len):
    with pytest.raises(LocalProtocolError, match="there is nothing to go on with"):
        make(max_tokens=max_tokens, max_len=max_len)


@pytest.mark.parametrize(("max_tokens", "max_len"), [(3, 1000), (9, 6)])
def test_room_for_one(max_tokens, max_len):
    session = make(max_tokens=max_tokens, max_len=max_len)
    session.begin_verify(4)
    assert session.end_verify(Acceptance(0, 10)).delta.finish_reason == "length"


def test_a_draft_is_opened_with_it_and_may_not_speak_about_it():
    session = make()
    opened = attach(session)
    assert (opened.prompt_len, opened.token_ids) == (3, PROMPT + OUTPUT)
    assert opened.limit_position == 5 + 16
    with pytest.raises(RemoteProtocolError, match="draft at 4, opened at 5"):
        session.receive_draft(proposals(session, (5,), 4))
    assert session.receive_draft(proposals(session, (8, 9), 5)) is Disposition.KEPT
    assert session.begin_verify(4) == (8, 9)
    step = session.end_verify(Acceptance(1, 6))
    assert (step.delta.token_ids, step.verdict.start) == ((8, 6), 5)


def test_a_nack_reaches_back_to_the_output_only():
    session = make()
    attach(session)
    session.begin_verify(0)
    session.end_verify(Acceptance(0, 8))
    assert session.receive_nack(5).token_ids == (8,)
    with pytest.raises(RemoteProtocolError, match="nack at 4, opened at 5"):
        session.receive_nack(4)


@pytest.mark.parametrize("mode", [VerificationMode.GREEDY, VerificationMode.BLOCK])
def test_an_emptied_window_has_no_proposals_and_no_laws(mode):
    session = make(mode=mode)
    attach(session)
    laws = ()
    if mode is VerificationMode.BLOCK:
        laws = tuple(SparseProbs((token_id,), (65536,)) for token_id in (8, 9))
    assert session.receive_draft(proposals(session, (8, 9), 5, laws)) is Disposition.KEPT
    session.lose_draft(LinkEvent.PEER_LOST)
    assert session.window_len == 2
    session.empty_window()
    assert session.window_len == 0
    assert (session.begin_verify(4), session.verifying_probs) == ((), ())
    assert session.log.slice(0) == PROMPT + OUTPUT
