"""A draft without credit rests: it is not told each commit, and is up to date when it wakes."""

from paceline.protocol.link import LinkState
from paceline.protocol.lookahead import Grant
from paceline.protocol.messages import Verdict
from paceline.protocol.target_session import MAX_UNTOLD

SECOND = 1_000_000


def grant(rig, *credits):
    """Whatever the sequence, these credits one after the other; the last one holds."""
    left = list(credits)

    def policy_grant(lookahead):
        return Grant(left.pop(0) if len(left) > 1 else left[0])

    rig.scheduler.policy.grant = policy_grant


def verdicts(rig):
    return [message for _, message in rig.sent if isinstance(message, Verdict)]


def opened(make_rig, max_tokens=200, **kwargs):
    rig = make_rig(**kwargs)
    rig.add_draft(1, error_rate=0.3)
    session_id = rig.add((1, 2, 3), max_tokens)
    rig.draft(3)
    assert rig.scheduler._sequences[session_id].session.link is LinkState.STREAMING
    return rig, session_id


def test_no_verdict_goes_out_while_it_rests(make_rig):
    rig, _ = opened(make_rig)
    grant(rig, 0)
    for _ in range(5):
        rig.step()
        rig.draft(1)
    assert verdicts(rig) == []


def test_it_is_told_now_and_then_so_that_it_keeps_the_sequence(make_rig):
    rig, session_id = opened(make_rig)
    grant(rig, 0)
    while len(rig.out[session_id]) < 3 * MAX_UNTOLD:
        rig.step()
        rig.draft(1)
    told = verdicts(rig)
    assert [len(verdict.token_ids) for verdict in told] == [MAX_UNTOLD] * 3
    assert rig.desk.counts["stalled"] == rig.desk.counts["reopened"] == 0
    tokens = [token for verdict in told for token in verdict.token_ids]
    assert tokens == rig.out[session_id]


def test_it_wakes_with_everything_that_it_was_not_told(make_rig):
    rig, session_id = opened(make_rig)
    grant(rig, *[0] * 10, 8)
    for _ in range(10):
        rig.step()
        rig.draft(1)
    before = rig.scheduler.stats.num_accepted_tokens
    rig.step()
    rig.deliver()
    (verdict,) = verdicts(rig)
    assert list(verdict.token_ids) == rig.out[session_id][: len(verdict.token_ids)]
    assert len(verdict.token_ids) == 11
    for _ in range(40):
        rig.draft(3)
        rig.step()
    assert rig.scheduler.stats.num_accepted_tokens > before
    assert rig.desk.counts["nack"] == 0


def test_the_text_is_the_same_however_it_rests_and_wakes(make_rig):
    rig, session_id = opened(make_rig, 60)
    grant(rig, 5, 0, 0, 3, 0, 9, 9, 0, 0, 0, 4, 0, 16, 1, 0, 7)
    rig.run(3)
    assert rig.out[session_id] == rig.oracle((1, 2, 3), 60)
    assert rig.scheduler.stats.num_accepted_tokens > 0
    rig.check_clean()


def test_a_draft_that_rests_owes_nothing(make_rig):
    """It had credit and owed proposals when it was sent to rest: that is not a stall."""
    rig, _ = opened(make_rig, rpc={"stall_timeout_s": 1.0})
    rig.step()  # told; from here on it owes something, and is never asked to compute
    grant(rig, 0)
    for _ in range(6):
        rig.now += SECOND
        rig.step()
    assert rig.desk.counts["stalled"] == 0


def test_a_sequence_that_is_to_rest_is_not_opened(make_rig):
    rig = make_rig()
    rig.add_draft(1)
    grant(rig, 0)
    session_id = rig.add((1, 2, 3), 10)
    rig.run(2)
    assert rig.out[session_id] == rig.oracle((1, 2, 3), 10)
    assert rig.desk.counts["opened"] == 0


def test_it_is_opened_when_it_may_draft_again(make_rig):
    rig = make_rig()
    rig.add_draft(1)
    grant(rig, *[0] * 20, 8)
    session_id = rig.add((1, 2, 3), 80)
    rig.run(6)
    assert rig.desk.counts["opened"] == 1
    assert rig.scheduler.stats.num_accepted_tokens > 0
    assert rig.out[session_id] == rig.oracle((1, 2, 3), 80)
