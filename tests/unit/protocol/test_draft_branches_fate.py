"""What verdicts, ends and failures make of branches: promoted, dropped, and always freed."""

import pytest

from paceline.errors import LocalProtocolError
from paceline.protocol.draft_branches import Branches
from paceline.protocol.draft_session import Rewind, WorkResult
from paceline.protocol.draft_table import BRANCH_PAUSE_PASSES
from paceline.protocol.messages import CloseReason, CloseSession, Nack
from paceline.protocol.token_log import TokenLog
from tests.unit.protocol.test_draft_branches import (
    PROMPT,
    best,
    chain,
    live,
    opened,
    opening,
    outcome,
    run,
    verdict,
)


def test_no_room_for_a_branch():
    """It gets no token, which is no failure; none of them grows until the text is committed."""
    table, session = opened(3)
    items = table.begin_pass(512)
    outcomes = [outcome(table, item) for item in items]
    index = next(i for i, item in enumerate(items) if item.sequence_id != session.sequence_id)
    outcomes[index] = WorkResult(None, cached_len=items[index].work.end)
    table.end_pass(items, outcomes, 5)
    assert not session.is_full
    assert {item.sequence_id for item in table.begin_pass(512)} <= {session.sequence_id}
    assert len(table) == 1


# -- verdicts -------------------------------------------------------------------------------


class TestPromotion:
    def test_the_correction_that_was_foreseen(self):
        table, session = opened(9, sent=True)
        old = session.sequence_id
        correction = best(chain(PROMPT, 1), 2)[1]
        committed = (*chain(PROMPT, 1), correction)
        branch = next(b for b in session.branches.live if b.position == 4)
        others = {b.sequence_id for b in session.branches.live} - {branch.sequence_id, None}
        assert session.receive_verdict(verdict(3, *committed[3:])) == Rewind(4, 5, True)
        assert session.log.slice(0) == chain(committed, 3)
        assert session.sequence_id == branch.sequence_id
        assert (session.committed_len, session.sent_len, session.num_computed) == (5, 8, 7)
        assert live(session) == []
        assert sorted(table.take_released()) == sorted({old, *others})
        assert table.take_drafts(0) == {}, "all of it was sent"
        assert table.begin_pass(512)[0].work.token_ids == (session.log[-1],)

    def test_its_runner_ups_are_known_at_once(self):
        table, session = opened(9)
        correction = best(PROMPT, 2)[1]
        session.receive_verdict(verdict(3, correction))
        forked = [item.work for item in table.begin_pass(512) if item.work.fork_of is not None]
        text = (*PROMPT, correction)
        assert (4, (best(text, 2)[1],)) in [(work.start, work.token_ids) for work in forked]

    def test_tokens_that_were_not_sent_go_as_ordinary_ones(self):
        table, session = opened(9)
        session.receive_verdict(verdict(3, best(PROMPT, 2)[1]))
        [draft] = table.take_drafts(0)[1]
        assert (draft.is_branch, draft.start, draft.token_ids) == (False, 4, session.log.slice(4))

    def test_lost_ones_are_sent_again(self):
        table, session = opened(9, sent=True)
        session.receive_verdict(verdict(3, best(PROMPT, 2)[1]))
        table.receive(1, Nack(7, 1, 5), 0)
        [draft] = table.take_drafts(0)[1]
        assert (draft.is_branch, draft.start, draft.token_ids) == (False, 5, session.log.slice(5))

    def test_a_verdict_that_goes_on_into_the_branch(self):
        _, session = opened(9, sent=True)
        committed = chain((*PROMPT, best(PROMPT, 2)[1]), 2)
        assert session.receive_verdict(verdict(3, *committed[3:])).is_promoted
        assert session.log.slice(0) == chain(committed, 1)
        assert (session.committed_len, session.sent_len) == (6, 7)

    def test_a_verdict_that_leaves_the_branch_again(self):
        table, session = opened(9, sent=True)
        committed = (*chain((*PROMPT, best(PROMPT, 2)[1]), 1), 5)
        sequence_id = session.branches.live[0].sequence_id
        assert session.receive_verdict(verdict(3, *committed[3:])) == Rewind(3, 6, True)
        assert session.log.slice(0) == committed
        assert (session.sent_len, session.num_computed) == (6, 5)
        [item] = table.begin_pass(512)
        assert (item.sequence_id, item.work.token_ids) == (sequence_id, (5,))

    def test_a_verdict_longer_than_the_branch(self):
        _, session = opened(9, sent=True)
        committed = chain((*PROMPT, best(PROMPT, 2)[1]), 8)
        session.receive_verdict(verdict(3, *committed[3:]))
        assert session.log.slice(0) == committed
        assert (session.committed_len, session.sent_len, session.num_computed) == (12, 12, 6)

    def test_one_that_was_never_computed_is_an_ordinary_rewind(self):
        table, session = opened(1)
        list(session.ready_branches())
        assert live(session) == [(3, (best(PROMPT, 2)[1],))]
        old = session.sequence_id
        assert session.receive_verdict(verdict(3, best(PROMPT, 2)[1])) == Rewind(3, 1)
        assert (session.sequence_id, session.num_computed) == (old, 3)
        assert table.take_released() == []
        assert live(session) == []

    def test_so_is_one_whose_first_pass_failed(self):
        table, session = opened(1)
        items = table.begin_pass(512)
        table.cancel_pass(items)
        assert session.receive_verdict(verdict(3, best(PROMPT, 2)[1])) == Rewind(3, 1)
        assert session.sequence_id == items[0].sequence_id
        assert table.take_released() == [items[1].sequence_id]

    def test_a_correction_that_was_not_foreseen(self):
        table, session = opened(9, sent=True)
        started = session.branches.sequences()
        old = session.sequence_id
        assert session.receive_verdict(verdict(3, 5)) == Rewind(3, 6)
        assert session.sequence_id == old
        assert (session.log.slice(0), live(session)) == ((*PROMPT, 5), [])
        assert sorted(table.take_released()) == sorted(started)

    def test_without_a_correction_those_behind_live(self):
        table, session = opened(9, sent=True)
        before = live(session)
        assert session.receive_verdict(verdict(3, *session.log.slice(3, 5))) is None
        assert live(session) == [branch for branch in before if branch[0] >= 5]
        assert len(table.take_released()) == 2

    def test_a_verdict_that_comes_twice_changes_nothing(self):
        _, session = opened(9, sent=True)
        message = verdict(3, best(PROMPT, 2)[1])
        session.receive_verdict(message)
        before = (session.log.slice(0), session.sequence_id, session.sent_len)
        assert session.receive_verdict(message) is None
        assert (session.log.slice(0), session.sequence_id, session.sent_len) == before

    @pytest.mark.parametrize("fan_out", [0, 1, 2])
    def test_the_verdicts_fan_out_is_in_force(self, fan_out):
        table, session = opened(9, fan_out=3)
        session.receive_verdict(verdict(3, session.log[3], fan_out=fan_out))
        assert all(branch.rank < fan_out for branch in session.branches.live)
        assert (live(session) == []) == (fan_out == 0)
        items = table.begin_pass(512)
        assert {item.work.num_runner_ups for item in items} == {fan_out}
        run(table, 3)
        assert all(branch.rank < fan_out for branch in session.branches.live), "nor any new one"


class TestAmidAPass:
    def test_the_result_of_a_promoted_branch_counts(self):
        table, session = opened(3)
        items = table.begin_pass(512)
        outcomes = [outcome(table, item) for item in items]
        session.receive_verdict(verdict(3, best(PROMPT, 2)[1]))
        assert not session.can_draft(), "the pass is its own now"
        table.end_pass(items, outcomes, 5)
        assert session.log.slice(0) == chain((*PROMPT, best(PROMPT, 2)[1]), 2 + 1)
        assert session.num_computed == 6
        assert table.stats.num_drafted_tokens == 3 + 1

    def test_even_if_it_is_its_first(self):
        table, session = opened(1)
        items = table.begin_pass(512)
        outcomes = [outcome(table, item) for item in items]
        assert session.receive_verdict(verdict(3, best(PROMPT, 2)[1])).is_promoted
        table.end_pass(items, outcomes, 5)
        assert session.log.slice(0) == chain((*PROMPT, best(PROMPT, 2)[1]), 1)

    def test_results_of_the_others_are_dropped(self):
        table, session = opened(3)
        items = table.begin_pass(512)
        outcomes = [outcome(table, item) for item in items]
        session.receive_verdict(verdict(3, 5))
        table.end_pass(items, outcomes, 5)
        assert (session.log.slice(0), live(session)) == ((*PROMPT, 5), [])
        assert session.num_computed == 3

    def test_a_pass_that_fails_leaves_the_branch_where_it_was(self):
        table, session = opened(2)
        before = live(session)
        items = table.begin_pass(512)
        table.cancel_pass(items)
        again = table.begin_pass(512)
        assert [(i.sequence_id, i.work.start, i.work.token_ids) for i in again] == [
            (i.sequence_id, i.work.start, i.work.token_ids) for i in items
        ]
        assert live(session)[: len(before)] == before

    def test_results_that_do_not_fit_are_our_bug(self):
        table, session = opened(1)
        table.begin_pass(512)
        with pytest.raises(LocalProtocolError):
            session.end_branch(session.branches.live[0], WorkResult(9, runner_ups=(9,)))
        with pytest.raises(LocalProtocolError):
            session.end_work(WorkResult(9, runner_ups=(8, 7)))
        with pytest.raises(LocalProtocolError):
            session.begin_branch(session.branches.live[0], 4)


# -- ends and failures ----------------------------------------------------------------------


ENDS = {
    "close": lambda table: table.receive(1, CloseSession(7, 1, CloseReason.FINISHED), 0),
    "reopen": lambda table: table.receive(1, opening(epoch=2), 0),
    "lost link": lambda table: table.lose_link(1),
    "silence": lambda table: table.expire(5000),
    "poison": lambda table: table.receive(1, verdict(2, 99, 99, 99), 0),
}


@pytest.mark.parametrize("end", list(ENDS))
@pytest.mark.parametrize("is_amid_a_pass", [False, True])
def test_every_end_frees_all_sequences(end, is_amid_a_pass):
    table, session = opened(5)
    session.receive_verdict(verdict(3, session.log[3]))  # some are released already
    used = {session.sequence_id, *session.branches.sequences(), *session.branches.released}
    items = table.begin_pass(512) if is_amid_a_pass else []
    used |= {item.sequence_id for item in items}
    outcomes = [outcome(table, item) for item in items]
    ENDS[end](table)
    table.end_pass(items, outcomes, 1)
    assert sorted(table.take_released()) == sorted(used)
    assert len(list(table.sequences())) == (end == "reopen")


def test_a_full_cache_costs_branches_before_sequences():
    table, session = opened(5)
    started = session.branches.sequences()
    items = table.begin_pass(512)
    table.cancel_pass(items)
    started = session.branches.sequences()
    assert table.evict_newest() is None
    assert sorted(table.take_released()) == sorted(started)
    for index in range(BRANCH_PAUSE_PASSES):
        if index % 4 == 0:
            position = session.committed_len
            session.receive_verdict(verdict(position, session.log[position], limit=position + 8))
        assert all(i.sequence_id == session.sequence_id for i in run(table))
    assert any(i.sequence_id != session.sequence_id for i in run(table)), "then there are some"
    assert table.evict_newest() is None
    assert table.evict_newest() == (1, CloseSession(7, 1, CloseReason.ABORTED))


class TestFailedPass:
    def test_of_several_no_branch_is_tried_again(self):
        table, session = opened(3)
        table.receive(1, opening(8), 0)
        assert table.fail_pass(table.begin_pass(512)) == []
        assert live(session) == []
        for _ in range(9):
            assert all(i.work.num_runner_ups == 0 for i in run(table))
        assert len(table) == 2
        assert table.stats.num_evicted == 0

    def test_a_branch_alone_costs_no_sequence(self):
        table, session = opened(1, limit=5)
        run(table, max_rows=1)
        items = table.begin_pass(512)  # the main text is at its limit
        assert [item.sequence_id == session.sequence_id for item in items] == [False]
        assert table.fail_pass(items) == []
        assert (len(table), live(session)) == (1, [])
        session.receive_verdict(verdict(3, session.log[3]))
        assert [i.sequence_id for i in run(table)] == [session.sequence_id]

    def test_a_suspect_runs_without_the_branches_of_others(self):
        table, _ = opened(3)
        table.receive(1, opening(8, limit=4, fan_out=0), 0)
        table.receive(1, opening(9, limit=40), 0)
        run(table, 3)
        table.receive(1, verdict(3, 5, session_id=8, fan_out=0), 0)
        table.receive(1, opening(10), 0)
        items = table.begin_pass(512)
        assert any(i.key == (1, 9) and i.work.fork_of for i in items), "a branch"
        table.cancel_pass(items)
        table.fail_pass([i for i in items if i.key in ((1, 8), (1, 10))])
        assert {i.key for i in table.begin_pass(512)} == {(1, 8)}


def test_rows_that_are_left():
    """A pass of 6 rows: the main text first, then the branches that fit."""
    table, session = opened(3, limit=30)
    items = table.begin_pass(2)
    assert items[0].sequence_id == session.sequence_id
    assert sum(item.work.num_rows for item in items) <= 2


def test_a_long_prefill_goes_before_branches():
    table, _ = opened(5)
    table.receive(1, opening(8, prompt=tuple(range(100)), limit=120), 0)
    items = table.begin_pass(40)
    assert sum(item.work.num_rows for item in items) == 40
    assert len([item for item in items if item.key == (1, 8)]) == 1
    assert all(item.work.end <= 100 for item in items)


def test_a_branch_is_one_sequence_and_always_draws():
    branches = Branches(fan_out=1)
    branches.grow(TokenLog((1, 2, 3, 4)), 3, [(9,)])
    [branch] = branches.live
    with pytest.raises(LocalProtocolError):
        branches.end_work(branch, WorkResult(1), 10)
    branches.begin_work(branch, 7, 5, 3)
    with pytest.raises(LocalProtocolError):
        branches.begin_work(branch, 7, 5, 3)
    with pytest.raises(LocalProtocolError):
        branches.end_work(branch, WorkResult(None, 3), 10)
    branches.end_work(branch, WorkResult(1), 10)
    with pytest.raises(LocalProtocolError):
        branches.begin_work(branch, 8, 5, 3)
