"""The draft's side of one sequence: a pass may reach less far than asked, or further for free."""

import pytest

from paceline.errors import LocalProtocolError
from paceline.protocol.draft_session import DraftSession, WorkResult
from paceline.protocol.messages import OpenSession, Verdict
from paceline.sampling.params import SamplingParams, VerificationMode

GREEDY = SamplingParams(temperature=0)
PROMPT = (1, 2, 3)


def make(*, tokens=PROMPT, prompt_len=3):
    opened = OpenSession(7, 1, prompt_len, tokens, GREEDY, VerificationMode.GREEDY, 19)
    return DraftSession(opened, max_len=1000)


def verdict(start, *token_ids):
    return Verdict(7, 1, start, token_ids, 0, 100, 1)


def drafted(*proposals, **kwargs):
    session = make(**kwargs)
    for token_id in proposals:
        session.begin_work(1000)
        assert session.end_work(WorkResult(token_id))
    return session


def test_prefill_in_chunks():
    """The work names all that is missing; how far the pass gets is the engine's answer."""
    session = make(tokens=(1, 2, 3, 4, 5), prompt_len=5)
    first = session.begin_work(2)
    assert (first.start, first.token_ids, first.max_rows) == (0, (1, 2, 3, 4, 5), 2)
    assert first.num_rows == 2
    assert not session.end_work(WorkResult(None, 2))
    second = session.begin_work(2)
    assert (second.start, second.token_ids, second.max_rows) == (2, (3, 4, 5), 2)
    assert not session.end_work(WorkResult(None, 4))
    last = session.begin_work(2)
    assert (last.start, last.token_ids, last.num_rows) == (4, (5,), 1)
    assert session.end_work(WorkResult(10, 5))
    assert session.num_computed == 5


def test_a_prefix_cache_makes_the_prefill_cheap():
    """More is cached than the rows that this pass could have computed."""
    session = make(tokens=(1, 2, 3, 4, 5), prompt_len=5)
    session.begin_work(1)
    assert not session.end_work(WorkResult(None, 4))
    assert session.num_computed == 4
    assert session.begin_work(1).token_ids == (5,)
    assert session.end_work(WorkResult(10))


def test_a_prefix_cache_that_held_all_but_one():
    session = make(tokens=(1, 2, 3, 4, 5), prompt_len=5)
    session.begin_work(1)
    assert session.end_work(WorkResult(10, 5))
    assert (session.num_computed, session.log.slice(5)) == (5, (10,))


@pytest.mark.parametrize("cached_len", [2, 6, -1])
def test_a_cache_that_this_pass_cannot_have_left(cached_len):
    session = make(tokens=(1, 2, 3, 4, 5), prompt_len=5)
    session.begin_work(3)
    session.end_work(WorkResult(None, 3))
    session.begin_work(3)
    with pytest.raises(LocalProtocolError, match=rf"{cached_len} tokens cached by rows \[3, 5"):
        session.end_work(WorkResult(None, cached_len))


def test_a_token_from_half_a_context():
    session = make()
    session.begin_work(2)
    with pytest.raises(LocalProtocolError, match="before the end of its context"):
        session.end_work(WorkResult(10, 2))
    assert len(session.log) == 3


def test_conflict_during_a_prefill_chunk():
    session = drafted(10, 11, 12, tokens=(1, 2, 3, 4), prompt_len=4)
    session.num_computed = 0
    assert session.begin_work(6).token_ids == (1, 2, 3, 4, 10, 11, 12)
    session.receive_verdict(verdict(4, 10, 20))
    assert not session.end_work(WorkResult(None, 6))
    assert session.num_computed == 5


def test_conflict_behind_a_prefill_chunk():
    """The rows that were computed agree; what the pass did not reach does not count."""
    session = drafted(10, 11, 12, tokens=(1, 2, 3, 4), prompt_len=4)
    session.num_computed = 0
    session.begin_work(2)
    session.receive_verdict(verdict(4, 10, 20))
    assert not session.end_work(WorkResult(None, 2))
    assert session.num_computed == 2
    assert session.begin_work(100).token_ids == (3, 4, 10, 20)


def test_conflict_before_a_prefill_chunk():
    """What the pass cached behind the rewind must not be counted."""
    session = drafted(10, 11, 12, tokens=(1, 2, 3, 4), prompt_len=4)
    session.num_computed = 5
    session.begin_work(1)
    session.receive_verdict(verdict(4, 20))
    assert not session.end_work(WorkResult(None, 6))
    assert session.num_computed == 4
