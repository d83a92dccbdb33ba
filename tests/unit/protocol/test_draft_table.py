"""All sequences of one draft: admission, eviction, silence, and one batch over all targets."""

import pytest

from paceline.errors import LocalProtocolError
from paceline.protocol.draft_session import WorkResult
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable
from paceline.protocol.messages import (
    Bye,
    CloseReason,
    CloseSession,
    Drain,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    Ping,
    Pong,
    Verdict,
)
from paceline.sampling.params import SamplingParams, VerificationMode

GREEDY = SamplingParams(temperature=0)
OK, BUSY, UNSUPPORTED = OpenStatus.OK, OpenStatus.BUSY, OpenStatus.UNSUPPORTED


def make(**kwargs):
    return DraftTable(**{"max_sessions": 8, "max_len": 100, "session_idle_us": 1000, **kwargs})


def opening(session_id=7, *, epoch=1, prompt=(1, 2, 3), mode=VerificationMode.GREEDY, limit=19):
    return OpenSession(session_id, epoch, len(prompt), prompt, GREEDY, mode, limit)


def verdict(start, *token_ids, session_id=7, epoch=1, limit=50):
    return Verdict(session_id, epoch, start, token_ids, 0, limit, 1)


def filled(*keys, now_us=0, **kwargs):
    """A table with an open session for each (link, session) key."""
    table = make(**kwargs)
    for link_id, session_id in keys:
        answer = table.receive(link_id, opening(session_id), now_us)
        assert answer == [Opened(session_id, 1, OK)]
    return table


def outcome(item, token_id):
    """What an engine without a prefix cache makes of the work."""
    end = item.work.start + item.work.num_rows
    return WorkResult(token_id if end == item.work.end else None, end)


def run_pass(table, max_rows=100, token_id=50):
    items = table.begin_pass(max_rows)
    table.end_pass(items, [outcome(item, token_id) for item in items], 3)
    return items


class TestOpen:
    def test_ok(self):
        table = make()
        assert table.receive(1, opening(), 5) == [Opened(7, 1, OK)]
        assert len(table) == 1
        assert table.session((1, 7)).log.slice(0) == (1, 2, 3)
        assert table.session((1, 8)) is None
        assert table.stats.num_opened == 1

    def test_same_session_id_of_two_targets(self):
        table = filled((1, 7), (2, 7))
        assert len(table) == 2
        assert sorted(table.sequences()) == [1, 2]

    def test_busy_when_full(self):
        table = filled((1, 1), (1, 2), max_sessions=2)
        assert table.receive(1, opening(3), 0) == [Opened(3, 1, BUSY)]
        assert (len(table), table.stats.num_busy) == (2, 1)

    def test_busy_when_the_cache_is_full(self):
        """A credit up to 19 needs 2 blocks of 16: the third sequence finds 1 of 5."""
        table = make(num_blocks=5, block_size=16)
        answers = [table.receive(1, opening(session_id), 0) for session_id in (1, 2, 3)]
        assert answers == [[Opened(1, 1, OK)], [Opened(2, 1, OK)], [Opened(3, 1, BUSY)]]

    @pytest.mark.parametrize(
        ("prompt_len", "limit", "length"), [(3, 19, 19), (3, 500, 100), (30, 19, 30)]
    )
    def test_the_length_it_must_fit(self, prompt_len, limit, length):
        """Up to its limit, at least what is there, at most the draft's own context."""
        message = opening(prompt=(1,) * prompt_len, limit=limit)
        exact = make(num_blocks=length, block_size=1)
        assert exact.receive(1, message, 0) == [Opened(7, 1, OK)]
        short = make(num_blocks=length - 1, block_size=1)
        assert short.receive(1, message, 0) == [Opened(7, 1, BUSY)]

    @pytest.mark.parametrize("mode", list(VerificationMode))
    @pytest.mark.parametrize("modes", [SUPPORTED_MODES, (VerificationMode.GREEDY,), ()])
    def test_modes(self, mode, modes):
        table = make(modes=modes)
        status = OK if mode in modes else UNSUPPORTED
        assert table.receive(1, opening(mode=mode), 0) == [Opened(7, 1, status)]
        assert table.stats.num_unsupported == (status is UNSUPPORTED)
        assert len(table) == (status is OK)

    def test_an_open_that_arrives_twice(self):
        table = filled((1, 7))
        run_pass(table)
        assert table.receive(1, opening(), 0) == [Opened(7, 1, OK)]
        assert len(table.session((1, 7)).log) == 4, "the session goes on"
        assert not table.has_released

    def test_an_older_open_does_not_replace_a_newer_one(self):
        table = make()
        table.receive(1, opening(epoch=3), 0)
        assert table.receive(1, opening(epoch=2), 0) == [Opened(7, 2, BUSY)]
        assert table.session((1, 7)).epoch == 3

    def test_a_newer_open_replaces(self):
        table = filled((1, 7), max_sessions=1)
        assert table.receive(1, opening(epoch=2, prompt=(1, 2, 3, 4)), 0) == [Opened(7, 2, OK)]
        assert table.session((1, 7)).log.slice(0) == (1, 2, 3, 4)
        assert table.take_released() == [1]
        assert list(table.sequences()) == [2]

    def test_a_newer_open_that_is_refused_still_ends_the_old_one(self):
        table = filled((1, 7), modes=(VerificationMode.GREEDY,))
        refused = opening(epoch=2, mode=VerificationMode.BLOCK)
        assert table.receive(1, refused, 0) == [Opened(7, 2, UNSUPPORTED)]
        assert (len(table), table.take_released()) == (0, [1])


class TestDraining:
    def test_nothing_new_and_the_old_goes_on(self):
        table = filled((1, 1))
        table.is_draining = True
        assert table.receive(1, opening(2), 0) == [Opened(2, 1, BUSY)]
        assert len(run_pass(table)) == 1


class TestMessages:
    def test_verdict_that_agrees(self):
        table = filled((1, 7))
        run_pass(table)
        assert table.receive(1, verdict(3, 50), 0) == []
        assert table.session((1, 7)).committed_len == 4
        assert table.stats.num_rewinds == 0

    def test_verdict_that_rewinds(self):
        table = filled((1, 7))
        run_pass(table)
        run_pass(table)
        assert table.receive(1, verdict(3, 60), 0) == []
        assert (table.stats.num_rewinds, table.stats.num_dropped_tokens) == (1, 2)

    def test_verdict_with_a_gap(self):
        table = filled((1, 7))
        assert table.receive(1, verdict(5, 60), 0) == [Nack(7, 1, 3)]
        assert table.stats.num_nacks == 1

    def test_verdict_that_lies_costs_the_sequence_only(self):
        table = filled((1, 7), (1, 8))
        table.receive(1, verdict(3, 50), 0)
        answer = table.receive(1, verdict(3, 60, 61), 0)
        assert answer == [CloseSession(7, 1, CloseReason.PROTOCOL)]
        assert table.stats.num_poisoned == 1
        assert table.session((1, 7)) is None
        assert table.session((1, 8)) is not None
        assert table.take_released() == [1]

    def test_verdict_of_a_lie_during_a_pass(self):
        table = filled((1, 7), (1, 8))
        table.receive(1, verdict(3, 50), 0)
        items = table.begin_pass(100)
        table.receive(1, verdict(3, 60, 61), 0)
        table.end_pass(items, [WorkResult(51), WorkResult(52)], 3)
        assert len(table.session((1, 8)).log) == 4

    @pytest.mark.parametrize("epoch", [0, 2])
    def test_verdict_of_another_epoch(self, epoch):
        table = filled((1, 7))
        assert table.receive(1, verdict(3, 60, epoch=epoch), 0) == []
        assert table.session((1, 7)).committed_len == 3

    def test_verdict_for_nobody_is_answered(self):
        """Else a target whose close was lost would count on this draft to the text's end."""
        table = filled((1, 7))
        answers = table.receive(2, verdict(3, 60, epoch=1), 0)
        assert answers == [CloseSession(7, 1, CloseReason.UNKNOWN)]
        assert table.session((1, 7)).committed_len == 3

    def test_nack(self):
        table = filled((1, 7))
        run_pass(table)
        assert table.take_drafts(0)[1][0].token_ids == (50,)
        assert table.take_drafts(0) == {}
        assert table.receive(1, Nack(7, 1, 3), 0) == []
        assert table.take_drafts(0)[1][0].token_ids == (50,)

    @pytest.mark.parametrize("nack", [Nack(8, 1, 3), Nack(7, 2, 3)])
    def test_nack_for_nobody(self, nack):
        table = filled((1, 7))
        run_pass(table)
        table.take_drafts(0)
        assert table.receive(1, nack, 0) == []
        assert table.take_drafts(0) == {}

    @pytest.mark.parametrize(("epoch", "left"), [(0, 1), (1, 0), (2, 0)])
    def test_close(self, epoch, left):
        """A close of an epoch that this draft never saw still closes what is older."""
        table = filled((1, 7))
        assert table.receive(1, CloseSession(7, epoch, CloseReason.FINISHED), 0) == []
        assert len(table) == left

    def test_close_for_nobody(self):
        table = filled((1, 7))
        table.receive(2, CloseSession(7, 1, CloseReason.FINISHED), 0)
        table.receive(1, CloseSession(8, 1, CloseReason.FINISHED), 0)
        assert len(table) == 1

    @pytest.mark.parametrize("message", [Ping(1), Pong(1, 2), Drain(), Bye()])
    def test_the_streams_own_affairs(self, message):
        table = filled((1, 7))
        assert table.receive(1, message, 0) == []
        assert len(table) == 1


class TestEndings:
    def test_lose_link(self):
        table = filled((1, 7), (2, 7), (1, 8))
        table.lose_link(1)
        assert (len(table), table.take_released()) == (1, [1, 3])
        assert table.session((2, 7)) is not None

    def test_released_once(self):
        table = filled((1, 7))
        assert not table.has_released
        table.lose_link(1)
        assert table.has_released
        assert table.take_released() == [1]
        assert not table.has_released
        assert table.take_released() == []

    def test_silence(self):
        table = filled((1, 7), (2, 8), now_us=0)
        assert table.expire(1000) == []
        assert table.expire(1001) == [
            (1, CloseSession(7, 1, CloseReason.ABORTED)),
            (2, CloseSession(8, 1, CloseReason.ABORTED)),
        ]
        assert (len(table), table.stats.num_expired) == (0, 2)
        assert table.take_released() == [1, 2]

    def test_no_room(self):
        """What it has drawn goes out first; then the target is told, who may look elsewhere."""
        table = filled((1, 7), (2, 8), now_us=0)
        items = table.begin_pass(100)
        results = [WorkResult(None, items[0].work.end), WorkResult(50)]
        table.end_pass(items, results, 5)
        assert list(table.take_drafts(0)) == [2]
        assert table.expire(1) == [(1, CloseSession(7, 1, CloseReason.FINISHED))]
        assert (len(table), table.stats.num_expired, table.take_released()) == (1, 0, [1])

    @pytest.mark.parametrize("sign", [verdict(3, 50), verdict(9, 50), Nack(7, 1, 3)])
    def test_a_sign_of_life(self, sign):
        table = filled((1, 7), now_us=0)
        table.receive(1, sign, 900)
        assert table.expire(1900) == []
        assert len(table.expire(1901)) == 1

    def test_another_epoch_is_no_sign_of_life(self):
        table = filled((1, 7), now_us=0)
        table.receive(1, verdict(3, 50, epoch=2), 900)
        assert len(table.expire(1001)) == 1

    def test_evict_newest(self):
        table = filled((1, 7), (2, 8))
        assert table.evict_newest() == (2, CloseSession(8, 1, CloseReason.ABORTED))
        assert table.evict_newest() == (1, CloseSession(7, 1, CloseReason.ABORTED))
        assert table.evict_newest() is None
        assert (table.stats.num_evicted, table.take_released()) == (2, [2, 1])

    def test_a_reopened_sequence_is_the_newest(self):
        table = filled((1, 7), (2, 8))
        table.receive(1, opening(epoch=2), 0)
        assert table.evict_newest() == (1, CloseSession(7, 2, CloseReason.ABORTED))


class TestPasses:
    def test_one_pass_over_all_targets(self):
        table = filled((1, 7), (2, 7), (3, 9))
        items = run_pass(table)
        assert [item.key for item in items] == [(1, 7), (2, 7), (3, 9)]
        assert [item.sequence_id for item in items] == [1, 2, 3]
        assert all(item.sampling == GREEDY for item in items)
        assert table.stats.num_drafted_tokens == 3
        drafts = table.take_drafts(11)
        assert {link: [d.session_id for d in ds] for link, ds in drafts.items()} == {
            1: [7],
            2: [7],
            3: [9],
        }
        assert (drafts[1][0].draft_us, drafts[1][0].sent_us) == (3, 11)

    def test_drafts_of_one_link_travel_together(self):
        table = filled((1, 7), (1, 8))
        run_pass(table)
        assert [d.session_id for d in table.take_drafts(0)[1]] == [7, 8]

    def test_decodes_before_prefills(self):
        table = filled((1, 7))
        run_pass(table)
        table.receive(1, opening(5, prompt=(1,) * 40, limit=60), 0)
        items = table.begin_pass(10)
        assert [(i.key[1], i.work.num_rows) for i in items] == [(7, 1), (5, 9)]
        assert [len(i.work.token_ids) for i in items] == [1, 40]

    def test_a_prompt_that_came_first_stops_no_decode(self):
        table = make()
        table.receive(1, opening(5, prompt=(1,) * 40, limit=60), 0)
        table.receive(1, opening(7), 0)
        items = table.begin_pass(10)
        table.end_pass(items, [WorkResult(50), WorkResult(None, 7)], 0)
        items = table.begin_pass(5)
        assert [(i.key[1], i.work.num_rows) for i in items] == [(7, 1), (5, 4)]

    def test_rows_are_bounded(self):
        table = filled((1, 1), (1, 2), (1, 3))
        items = table.begin_pass(4)
        assert [item.work.num_rows for item in items] == [3, 1]
        table.end_pass(items, [WorkResult(50), WorkResult(None, 1)], 0)
        assert [len(i.work.token_ids) for i in table.begin_pass(100)] == [1, 2, 3]

    def test_nothing_to_do(self):
        table = filled((1, 7))
        table.receive(1, opening(8, limit=3), 0)
        assert [item.key for item in table.begin_pass(100)] == [(1, 7)]
        assert table.begin_pass(100) == [], "a pass is in progress"
        assert make().begin_pass(100) == []

    def test_results_must_match_the_items(self):
        table = filled((1, 7), (1, 8))
        items = table.begin_pass(100)
        with pytest.raises(ValueError, match="zip"):
            table.end_pass(items, [WorkResult(50)], 3)

    def test_closed_during_the_pass(self):
        table = filled((1, 7), (1, 8))
        items = table.begin_pass(100)
        table.receive(1, CloseSession(7, 1, CloseReason.ABORTED), 0)
        table.end_pass(items, [WorkResult(50), WorkResult(51)], 3)
        assert table.stats.num_drafted_tokens == 1
        assert table.take_released() == [1]

    def test_reopened_during_the_pass(self):
        """The token of the old sequence must not become a proposal of the new one."""
        table = filled((1, 7))
        items = table.begin_pass(100)
        table.receive(1, opening(epoch=2), 0)
        table.end_pass(items, [WorkResult(50)], 3)
        assert table.session((1, 7)).log.slice(0) == (1, 2, 3)
        assert table.session((1, 7)).can_draft()

    def test_cancelled(self):
        table = filled((1, 7), (1, 8))
        items = table.begin_pass(100)
        table.receive(1, CloseSession(8, 1, CloseReason.ABORTED), 0)
        table.cancel_pass(items)
        assert table.stats.num_drafted_tokens == 0
        assert table.begin_pass(100)[0].work.start == 0

    def test_a_result_of_a_cancelled_pass_is_our_bug(self):
        table = filled((1, 7))
        items = table.begin_pass(100)
        table.cancel_pass(items)
        with pytest.raises(LocalProtocolError, match="end_work without begin_work"):
            table.end_pass(items, [WorkResult(50)], 3)

    def test_a_token_that_came_too_late_is_not_counted(self):
        table = filled((1, 7))
        items = table.begin_pass(100)
        table.receive(1, verdict(3, 60), 0)
        table.end_pass(items, [WorkResult(50)], 3)
        assert table.stats.num_drafted_tokens == 0
        assert table.take_drafts(0) == {}
