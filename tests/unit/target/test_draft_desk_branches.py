"""Branches at the desk: counted, timed, never a Nack, and no crime of an honest draft."""

import pytest

from paceline.protocol.lookahead import Grant
from paceline.protocol.messages import DraftTokens, Opened, OpenSession, OpenStatus, Verdict
from paceline.protocol.token_log import TokenLog

PROMPT = (1, 2, 3)
NUM_TOKENS = 40


@pytest.fixture
def rig(make_rig):
    """One sequence (session 1) that link 1 serves by hand, with two branches a position."""
    rig = make_rig(rpc={"max_remote_errors": 3})
    rig.scheduler.policy.grant = lambda lookahead: Grant(9, fan_out=2)
    rig.desk.attach(1, rig.hello(1))
    rig.add(PROMPT, NUM_TOKENS)
    ((_, opened),) = rig.take_sent()
    assert isinstance(opened, OpenSession)
    assert opened.fan_out == 2
    rig.desk.receive(1, Opened(1, 1, OpenStatus.OK), 0)
    return rig


def sequence_of(rig):
    return rig.scheduler._sequences[1]


def say(rig, context, *token_ids, is_branch=False, now_us=None):
    context = (*PROMPT, *context)
    start, last_round = len(context), sequence_of(rig).session.round
    context_hash = TokenLog(context).hash_at(start)
    draft = DraftTokens(1, 1, start, context_hash, token_ids, last_round, is_branch=is_branch)
    rig.desk.receive(1, draft, rig.now if now_us is None else now_us)


def finish(rig):
    rig.run()
    assert rig.out[1] == rig.oracle(PROMPT, NUM_TOKENS)


def corrected(rig, then=4, wrong=63, **times):
    """A first proposal that is wrong, and a branch behind the token that the target will take."""
    text = rig.oracle(PROMPT, NUM_TOKENS)
    assert wrong != text[0]
    say(rig, (), wrong, 5)
    say(rig, text[:1], *text[1 : 1 + then], is_branch=True, **times)
    return text


def test_held_adopted_and_verified(rig):
    text = corrected(rig)
    assert rig.desk.counts["alternate"] == 1
    rig.step()
    assert rig.desk.counts["adopted"] == 1
    rig.step()
    assert rig.out[1] == text[:6]
    rounds = [(d.num_draft_tokens, d.num_accepted_tokens) for d in rig.deltas[1]]
    assert rounds == [(0, 0), (4, 4)]
    finish(rig)


def test_one_that_does_not_come_true(rig):
    text = rig.oracle(PROMPT, NUM_TOKENS)
    say(rig, (63 - text[0],), 7, 8, is_branch=True)
    rig.step()
    assert (rig.desk.counts["alternate"], rig.desk.counts["adopted"]) == (1, 0)
    assert len(sequence_of(rig).session.alternates) == 0
    finish(rig)


def test_no_nack_and_no_strike(rig):
    for position in range(6):
        say(rig, range(20, 21 + position), 30, is_branch=True)
    assert rig.take_sent() == []
    assert rig.desk.counts["gap"] == rig.desk.counts["remote_error"] == 0
    assert rig.desk.pool.get(1).strikes == 0
    finish(rig)


def test_one_that_was_not_allowed(rig):
    sequence_of(rig).session._granted_fan_out = 0
    say(rig, (20,), 30, is_branch=True)
    assert rig.desk.counts["remote_error"] == 1
    assert rig.desk.pool.get(1).strikes == 1
    finish(rig)


def test_a_rest_of_it_that_comes_later_counts_with_it(rig):
    text = corrected(rig, then=2)
    rig.step()
    say(rig, text[:3], *text[3:5])
    rig.step()
    assert rig.deltas[1][-1].num_draft_tokens == 4
    finish(rig)


def test_every_verdict_tells_the_fan_out_in_force(rig):
    rig.step()
    rig.scheduler.policy.grant = lambda lookahead: Grant(9, fan_out=0)
    rig.step()
    told = [m.fan_out for _, m in rig.take_sent() if isinstance(m, Verdict)]
    assert told == [2, 0]
    finish(rig)
