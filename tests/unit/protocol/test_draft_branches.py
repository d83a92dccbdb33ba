"""Branches: what a draft prepares for corrections, what it sends of it, and what a verdict makes
of it. `tests/properties/test_draft_branches.py` has everything at random."""

import pytest

from paceline.protocol.draft_branches import MAX_BRANCHES
from paceline.protocol.draft_session import DraftSession, WorkResult
from paceline.protocol.draft_table import MAX_BRANCH_ROWS, DraftTable
from paceline.protocol.messages import (
    MAX_BRANCH_TOKENS,
    MAX_FAN_OUT,
    OpenSession,
    Verdict,
)
from paceline.protocol.token_log import TokenLog
from paceline.sampling.params import SamplingParams, VerificationMode

GREEDY = SamplingParams(temperature=0)
PROMPT = (1, 2, 3)
KEY = (1, 7)


def opening(session_id=7, *, epoch=1, prompt=PROMPT, limit=9, fan_out=1, mode="greedy"):
    mode = VerificationMode(mode)
    return OpenSession(session_id, epoch, len(prompt), prompt, GREEDY, mode, limit, fan_out=fan_out)


def verdict(start, *token_ids, limit=15, fan_out=1, session_id=7, epoch=1):
    return Verdict(session_id, epoch, start, token_ids, 0, limit, 1, fan_out=fan_out)


def best(text, num):
    """The model: after `text` come 10, 11, 12, ... times a step that tells the last token."""
    first = 1000 * text[-1] % 99_991 + 10 * len(text)
    return tuple(range(first, first + num))


def outcome(table, item):
    text = table.session(item.key).text_of(item.sequence_id)[: item.work.end]
    named = best(text, 1 + item.work.num_runner_ups)
    return WorkResult(named[0], runner_ups=named[1:])


def run(table, num_passes=1, max_rows=512):
    items = []
    for _ in range(num_passes):
        items = table.begin_pass(max_rows)
        table.end_pass(items, [outcome(table, item) for item in items], 5)
    return items


def opened(num_passes=0, *, sent=False, **kwargs):
    table = DraftTable(max_sessions=8, max_len=1000, session_idle_us=1000)
    table.receive(1, opening(**kwargs), 0)
    run(table, num_passes)
    if sent:
        table.take_drafts(0)
    return table, table.session(KEY)


def live(session):
    """(position, tokens) of each branch."""
    return [(branch.position, tuple(branch.token_ids)) for branch in session.branches.live]


def chain(text, num):
    """`text` and the next `num` tokens."""
    for _ in range(num):
        text = (*text, best(text, 1)[0])
    return text


def hash_of(text):
    return TokenLog(text).hash_at(len(text))


# -- what is prepared -----------------------------------------------------------------------


class TestGrowth:
    def test_a_branch_is_one_step_behind_its_position(self):
        _, session = opened(2)
        text = session.log.slice(0)
        runner_up = best(PROMPT, 2)[1]
        assert text == chain(PROMPT, 2)
        assert live(session) == [(3, chain((*PROMPT, runner_up), 1)[3:])]

    def test_the_first_pass_forks_the_main_text(self):
        """One row, the runner-up; then one each, and no fork again."""
        table, session = opened(1)
        main, branch = table.begin_pass(512)
        assert (main.work.start, len(main.work.token_ids), main.work.fork_of) == (3, 1, None)
        assert branch.work.token_ids == (best(PROMPT, 2)[1],)
        assert (branch.work.start, branch.work.max_rows) == (3, 1)
        assert (branch.work.fork_of, main.sequence_id) == (session.sequence_id,) * 2
        assert branch.work.output_index == 1
        assert branch.work.context_hash == hash_of((*PROMPT, best(PROMPT, 2)[1]))
        assert branch.sequence_id not in (main.sequence_id, 0)
        table.end_pass([main, branch], [outcome(table, i) for i in (main, branch)], 0)
        items = table.begin_pass(512)
        assert [(i.work.start, i.work.num_rows) for i in items] == [(4, 1)] * 3
        assert [i.work.fork_of for i in items] == [None, None, main.sequence_id]

    def test_a_promoted_branch_is_what_others_fork(self):
        table, session = opened(9)
        old = session.sequence_id
        session.receive_verdict(verdict(3, best(PROMPT, 2)[1]))
        forks = {i.work.fork_of for i in table.begin_pass(512)} - {None}
        assert forks == {session.sequence_id} != {old}

    def test_no_deeper_and_no_further_than_a_pass_verifies(self):
        """Of 6 tokens 3: corrections come in these or behind them, and have 3 tokens ready."""
        _, session = opened(20)
        assert len(session.log) == 9
        assert [(p, len(tokens)) for p, tokens in live(session)] == [(3, 4), (4, 4), (5, 4), (6, 3)]

    def test_nothing_at_or_beyond_the_limit(self):
        for limit in range(3, 12):
            _, session = opened(20, limit=limit, fan_out=2)
            assert all(b.end <= max(limit, 4) for b in session.branches.live), limit

    def test_the_drafts_own_context_ends_a_branch_too(self):
        session = DraftSession(opening(limit=50), max_len=6)
        table = DraftTable(max_sessions=1, max_len=6, session_idle_us=1000)
        table.receive(1, opening(limit=50), 0)
        run(table, 20)
        session = table.session(KEY)
        assert max(b.end for b in session.branches.live) <= 6

    def test_a_second_runner_up_comes_after_nearer_corrections(self):
        """3 rows: the main text, the first branch, and of the next two the one that is likelier."""
        table, session = opened(1, limit=20, fan_out=2)
        run(table, max_rows=2)
        items = table.begin_pass(3)
        text = chain(PROMPT, 1)
        assert [item.work.token_ids for item in items[2:]] == [(best(text, 2)[1],)]
        assert [(b.position, b.token_ids[0]) for b in session.branches.live] == [
            *((3, token_id) for token_id in best(PROMPT, 3)[1:]),
            *((4, token_id) for token_id in best(text, 3)[1:]),
        ]

    def test_without_fan_out_nothing_is_asked_or_sent(self):
        table, session = opened(fan_out=0)
        for _ in range(6):
            items = table.begin_pass(512)
            assert [item.work.num_runner_ups for item in items] == [0]
            table.end_pass(items, [outcome(table, item) for item in items], 1)
        assert live(session) == []
        [draft] = table.take_drafts(0)[1]
        assert (draft.is_branch, draft.token_ids) == (False, session.log.slice(3))

    @pytest.mark.parametrize("mode", ["rejection", "block"])
    def test_never_in_the_rejection_modes(self, mode):
        table, session = opened(mode=mode, fan_out=4)
        [item] = table.begin_pass(512)
        assert item.work.num_runner_ups == 0
        session.receive_verdict(verdict(3, 50, fan_out=4))
        assert session.branches.fan_out == 0


@pytest.mark.parametrize("fan_out", [1, 2, 4, MAX_FAN_OUT])
@pytest.mark.parametrize("ahead", [1, 2, 5, 17, 129])
def test_no_more_than_allowed(fan_out, ahead):
    """Branches, their ranks, their rows in a pass, their tokens between two verdicts."""
    table = DraftTable(max_sessions=8, max_len=1000, session_idle_us=1000)
    sessions = []
    for session_id in range(8):
        table.receive(1, opening(session_id, limit=3 + ahead, fan_out=fan_out), 0)
        sessions.append(table.session((1, session_id)))
    committed = 3
    for _ in range(3):
        drawn = dict.fromkeys(range(8), 0)
        for _ in range(2 * ahead + 30):
            items = table.begin_pass(512)
            mains = [i for i in items if i.sequence_id == sessions[i.key[1]].sequence_id]
            assert items[: len(mains)] == mains, "the main texts come first"
            rows = sum(item.work.num_rows for item in items[len(mains) :])
            assert rows <= MAX_BRANCH_ROWS
            table.end_pass(items, [outcome(table, item) for item in items], 1)
            for draft in table.take_drafts(0).get(1, ()):
                drawn[draft.session_id] += draft.is_branch * len(draft.token_ids)
            for session in sessions:
                branches = session.branches.live
                assert len(branches) <= MAX_BRANCHES
                assert all(branch.rank < fan_out for branch in branches)
                keys = {(branch.position, branch.token_ids[0]) for branch in branches}
                assert len(keys) == len(branches)
        assert max(drawn.values()) <= MAX_BRANCH_TOKENS
        if ahead == 129:
            assert len(sessions[0].branches.live) == MAX_BRANCHES
            assert max(drawn.values()) == MAX_BRANCH_TOKENS
        for session in sessions:
            token = session.log[committed] if len(session.log) > committed else 5
            session.receive_verdict(
                Verdict(session.session_id, 1, committed, (token,), 0, committed + 1 + ahead, 1,
                        fan_out=fan_out)
            )  # fmt: skip
        committed += 1


# -- what is sent ---------------------------------------------------------------------------


class TestSending:
    def test_behind_the_runner_up(self):
        """One message, once the branch is as long as it gets."""
        table, session = opened(3)
        [main] = table.take_drafts(77)[1]
        assert (main.is_branch, main.token_ids, main.draft_us) == (False, session.log.slice(3), 15)
        run(table)
        text = (*PROMPT, best(PROMPT, 2)[1])
        main, branch = table.take_drafts(77)[1]
        assert (main.is_branch, branch.is_branch) == (False, True)
        assert (branch.start, branch.context_hash) == (4, hash_of(text))
        assert branch.token_ids == chain(text, 3)[4:]
        assert (branch.draft_us, branch.sent_us, branch.last_round) == (0, 77, 0)

    def test_or_when_it_gets_no_row(self):
        """Then what is new since; never the same twice."""
        table, _ = opened(2, sent=True)
        run(table, max_rows=1)
        text = chain((*PROMPT, best(PROMPT, 2)[1]), 3)
        drafts = [d for d in table.take_drafts(0)[1] if d.is_branch]
        assert [(d.start, d.token_ids) for d in drafts] == [(4, text[4:5])]
        run(table, 9)
        first = [d for d in table.take_drafts(0)[1] if d.is_branch and d.token_ids == text[5:]]
        assert [(d.start, d.context_hash) for d in first] == [(5, hash_of(text[:5]))]
        assert table.take_drafts(0) == {}

    def test_all_of_them_when_no_more_may_be_drawn(self):
        table, session = opened(1, limit=1 + 2 * MAX_BRANCH_TOKENS)
        run(table, MAX_BRANCH_TOKENS)
        drafts = [d for d in table.take_drafts(0)[1] if d.is_branch]
        assert sum(len(d.token_ids) for d in drafts) == MAX_BRANCH_TOKENS
        assert len(drafts) == len(session.branches.live)

    def test_branches_add_no_draft_time(self):
        table, _ = opened(6)
        drafts = table.take_drafts(0)[1]
        assert sum(draft.draft_us for draft in drafts) == 5 * 6
        assert (table.stats.num_drafted_tokens, table.stats.busy_us) == (6, 5 * 6)
        assert table.stats.num_branch_tokens == sum(len(d.token_ids) for d in drafts if d.is_branch)
