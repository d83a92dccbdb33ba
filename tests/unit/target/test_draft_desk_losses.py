"""Nacks, broken rules, drains and goodbyes at the desk."""

import pytest

from paceline.protocol.link import LinkState
from paceline.protocol.messages import (
    Bye,
    CloseReason,
    CloseSession,
    DraftTokens,
    Drain,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    Ping,
    Pong,
    Verdict,
)

SECOND = 1_000_000
PROMPT = (1, 2, 3)


@pytest.fixture
def rig(make_rig):
    """Session 1 streams on link 1; link 2 is idle."""
    made = make_rig()
    for link_id in (1, 2):
        made.desk.attach(link_id, made.hello(link_id))
    made.add(PROMPT, 40)
    made.take_sent()
    made.desk.receive(1, Opened(1, 1, OpenStatus.OK), 0)
    return made


def session_of(rig):
    return rig.scheduler._sequences[1].session


def draft(rig, *token_ids, start=None):
    log = session_of(rig).log
    start = len(log) if start is None else start
    return DraftTokens(1, session_of(rig).epoch, start, log.hash_at(start), token_ids, 0)


def finish(rig):
    rig.run()
    assert rig.out[1] == rig.oracle(PROMPT, 40)
    rig.check_clean()


class TestNack:
    def test_repeats_commits(self, rig):
        for _ in range(3):
            rig.step()
        rig.take_sent()
        rig.desk.receive(1, Nack(1, 1, 4), 0)
        ((link_id, verdict),) = rig.take_sent()
        assert isinstance(verdict, Verdict)
        assert (link_id, verdict.start, verdict.token_ids) == (1, 4, tuple(rig.out[1][1:]))
        assert rig.desk.counts["nack"] == 1

    def test_nothing_is_missing(self, rig):
        rig.desk.receive(1, Nack(1, 1, 3), 0)
        assert rig.take_sent() == []

    def test_of_an_old_epoch(self, rig):
        rig.desk.receive(1, Nack(1, 0, 0), 0)
        assert (rig.desk.counts["stale_epoch"], rig.desk.counts["nack"]) == (1, 0)
        assert session_of(rig).link is LinkState.STREAMING

    def test_below_the_open(self, rig):
        rig.desk.receive(1, Nack(1, 1, 1), 0)
        assert rig.desk.counts["remote_error"] == 1
        assert session_of(rig).link is LinkState.LOST


class TestBrokenRules:
    @pytest.mark.parametrize("start", [2, 18])
    def test_cost_the_session_and_a_strike(self, rig, start):
        """Position 2 is the prompt's; 18, 19 goes beyond the credit of 19."""
        message = DraftTokens(1, 1, start, 0, (5, 5), 0)
        rig.desk.receive(1, message, 0)
        assert rig.take_sent() == [(1, CloseSession(1, 1, CloseReason.PROTOCOL))]
        assert rig.desk.pool.get(1).strikes == 1
        assert rig.desk.pool.get(1).sessions == set()
        assert session_of(rig).link is LinkState.LOST
        finish(rig)

    def test_the_next_open_is_later_and_elsewhere(self, rig):
        rig.desk.receive(1, DraftTokens(1, 1, 2, 0, (5,), 0), 0)
        rig.take_sent()
        rig.desk.maintain([1], SECOND // 10 - 1)
        assert rig.take_sent() == []
        rig.desk.maintain([1], SECOND // 10)
        ((link_id, message),) = rig.take_sent()
        assert (link_id, message.epoch) == (2, 2)

    def test_too_many_make_an_outlaw(self, rig):
        """One strike for each sequence that it spoils: never the same one twice."""
        rig.desk.detach(2)
        others = [rig.add(PROMPT, 40) for _ in range(7)]
        for session_id in (1, *others):
            assert rig.desk.pool.take_outlaws() == [], f"before {session_id}"
            rig.desk.receive(1, DraftTokens(session_id, 1, 2, 0, (5,), 0), 0)
        assert rig.desk.pool.take_outlaws() == [1]
        rig.desk.maintain([1, *others], 100 * SECOND)
        assert session_of(rig).link is LinkState.LOST, "an outlaw gets nothing more"
        rig.desk.detach(1)
        assert rig.desk.pool.take_outlaws() == []
        finish(rig)

    def test_never_raise(self, rig):
        """Any message in any state: at worst it is counted."""
        before = session_of(rig).log.slice(0)
        for session_id in (1, 2, 10**18):
            for epoch in (0, 1, 2):
                for position in (0, 2, 3, 4, 19, 2**31):
                    for message in (
                        DraftTokens(session_id, epoch, position, 7, (63, 63), 10**9),
                        Nack(session_id, epoch, position),
                        Opened(session_id, epoch, OpenStatus.BUSY),
                        CloseSession(session_id, epoch, CloseReason.PROTOCOL),
                    ):
                        rig.desk.receive(1, message, 0)
                        rig.desk.receive(99, message, 0)
        assert session_of(rig).log.slice(0) == before
        finish(rig)


class TestGivenUp:
    def test_by_the_draft(self, rig):
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        assert session_of(rig).link is LinkState.LOST
        assert rig.take_sent() == [], "it knows"
        assert (rig.desk.counts["given_up"], rig.desk.pool.get(1).strikes) == (1, 0)
        rig.desk.maintain([1], SECOND // 10)
        assert [link_id for link_id, _ in rig.take_sent()] == [2]

    def test_for_want_of_room(self, rig):
        """Its context is too short for this text: no failure, however often, and never again."""
        for session_id in (1, *(rig.add(PROMPT, 40) for _ in range(9))):
            rig.desk.maintain([session_id], 0)
            link_id = rig.desk._sequences[session_id].draft_id
            epoch = rig.desk._sequences[session_id].session.epoch
            rig.desk.receive(link_id, CloseSession(session_id, epoch, CloseReason.FINISHED), 0)
            rig.desk.maintain([session_id], 100 * SECOND)
            sequence = rig.desk._sequences[session_id]
            assert sequence.draft_id not in (None, link_id), "the other one has it at once"
            rig.desk._detach_sequence(sequence, None)
        assert rig.desk.counts["given_up"] == 10
        assert set(rig.desk.pool.breaker_states().values()) == {"closed"}

    @pytest.mark.parametrize("epoch", [0, 2])
    def test_of_another_epoch(self, rig, epoch):
        rig.desk.receive(1, CloseSession(1, epoch, CloseReason.ABORTED), 0)
        assert session_of(rig).link is LinkState.STREAMING
        assert rig.desk.counts["given_up"] == 0

    def test_during_a_pass(self, rig):
        rig.desk.receive(1, draft(rig, *rig.oracle(PROMPT, 2)), 0)
        plan, results = rig.begin()
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        rig.end(plan, results)
        assert rig.take_sent() == [], "no verdict for a draft that left"
        finish(rig)


class TestDetach:
    def test_sequences_look_for_another_at_once(self, rig):
        rig.desk.detach(1)
        assert session_of(rig).link is LinkState.LOST
        rig.desk.maintain([1], 0)
        ((link_id, message),) = rig.take_sent()
        assert (link_id, message.epoch) == (2, 2)
        assert rig.desk.counts["reopened"] == 1

    def test_a_sequence_that_has_ended(self, rig):
        rig.scheduler.abort(1)
        rig.desk.detach(1)
        rig.check_clean()

    def test_twice_or_never_attached(self, rig):
        for link_id in (1, 1, 77):
            rig.desk.detach(link_id)
        finish(rig)

    def test_a_session_that_moved_on_is_not_touched(self, rig):
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        rig.desk.maintain([1], SECOND)
        rig.desk.pool.get(1).sessions.add(1)  # as if a release had been lost
        rig.desk.detach(1)
        assert session_of(rig).link is LinkState.OPENING

    def test_late_proposals_of_the_old_draft(self, rig):
        message = draft(rig, 10)
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        rig.desk.maintain([1], SECOND)
        rig.take_sent()
        rig.desk.receive(1, message, SECOND)
        assert rig.take_sent() == [(1, CloseSession(1, 1, CloseReason.UNKNOWN))]
        assert session_of(rig).window_len == 0


class TestDrain:
    def test_nothing_new_and_the_old_goes_on_where_none_can_take_it(self, rig):
        rig.desk.receive(2, Drain(), 0)
        rig.desk.receive(1, Drain(), 0)
        rig.desk.maintain([1], 0)
        assert rig.take_sent() == []
        rig.desk.receive(1, draft(rig, 10), 0)
        assert session_of(rig).window_len == 1

    def test_its_sequences_move_to_another(self, rig):
        rig.desk.receive(1, Drain(), 0)
        rig.desk.maintain([1], 0)
        closed, (link_id, opened) = rig.take_sent()
        assert closed == (1, CloseSession(1, 1, CloseReason.REPLACED))
        assert (link_id, opened.epoch, opened.token_ids) == (2, 2, PROMPT)
        assert [rig.desk.pool.get(i).sessions for i in (1, 2)] == [set(), {1}]
        assert (rig.desk.counts["drained"], rig.desk.counts["moved"]) == (1, 1)
        finish(rig)

    def test_what_has_arrived_is_used_first(self, rig):
        """9 right ones: the prompt's pass writes the first token itself, then 4 + 1 and 3 + 1."""
        text = rig.oracle(PROMPT, 40)
        rig.desk.receive(1, draft(rig, *text[:9]), 0)
        rig.desk.receive(1, Drain(), 0)
        sent = []
        for _ in range(4):
            rig.step()
            sent.append([(i, type(m)) for i, m in rig.take_sent()])
        assert sent == [[(1, CloseSession)], [], [], [(2, OpenSession), (2, Verdict)]]
        assert [delta.num_accepted_tokens for delta in rig.deltas[1]] == [0, 4, 3, 0]
        finish(rig)

    def test_a_place_that_is_promised_is_taken(self, rig):
        """Link 2 has room for one: the second sequence stays where it is."""
        rig.desk.detach(2)
        other = rig.add(PROMPT, 40)
        rig.take_sent()
        rig.desk.receive(1, Opened(other, 1, OpenStatus.OK), 0)
        rig.desk.attach(3, rig.hello(3, max_sessions=1))
        rig.desk.receive(1, draft(rig, 10), 0)
        rig.desk.receive(1, Drain(), 0)
        rig.desk.maintain([1, other], 0)
        assert [rig.desk.pool.get(i).sessions for i in (1, 3)] == [{other}, {1}]
        assert rig.take_sent() == [(1, CloseSession(1, 1, CloseReason.REPLACED))]

    @pytest.mark.parametrize("how", ["lost", "drains too", "is dark"])
    def test_the_promised_draft_goes_as_well(self, rig, how):
        rig.desk.receive(1, draft(rig, 10), 0)
        rig.desk.receive(1, Drain(), 0)
        rig.desk.maintain([1], 0)
        rig.take_sent()
        if how == "lost":
            rig.desk.detach(2)
        elif how == "drains too":
            rig.desk.receive(2, Drain(), 0)
        else:
            rig.desk.pool.get(2).breaker.trip(0)
        rig.desk.attach(3, rig.hello(3))
        rig.desk.maintain([1], 0)
        assert [(i, m.epoch) for i, m in rig.take_sent()] == [(3, 2)]
        finish(rig)

    @pytest.mark.parametrize("how", ["ends", "is preempted"])
    def test_a_sequence_that_was_promised(self, rig, how):
        rig.desk.receive(1, draft(rig, 10), 0)
        rig.desk.receive(1, Drain(), 0)
        rig.desk.maintain([1], 0)
        if how == "ends":
            rig.scheduler.abort(1)
        else:
            rig.desk.suspend(rig.scheduler._sequences[1])
        assert rig.desk.pool.get(2).sessions == set()

    def test_while_it_was_opening(self, make_rig):
        rig = make_rig()
        rig.desk.attach(1, rig.hello(1))
        rig.add(PROMPT, 40)
        rig.desk.attach(2, rig.hello(2))
        rig.desk.receive(1, Drain(), 0)
        rig.desk.maintain([1], 0)
        assert [(i, type(m)) for i, m in rig.take_sent()] == [
            (1, OpenSession),
            (1, CloseSession),
            (2, OpenSession),
        ]
        finish(rig)

    def test_the_end_of_a_drained_stream_is_no_failure(self, make_rig):
        rig = make_rig(rpc={"breaker_failures": 1})
        rig.desk.attach(1, rig.hello(1))
        rig.add(PROMPT, 40)
        rig.desk.receive(1, Drain(), 0)
        rig.desk.detach(1, 0)
        assert rig.desk.counts["dark"] == 0
        finish(rig)

    def test_all_drain(self, rig):
        rig.desk.receive(1, Drain(), 0)
        rig.desk.receive(2, Drain(), 0)
        second = rig.add(PROMPT, 5)
        assert rig.take_sent() == []
        rig.run()
        assert rig.out[second] == rig.oracle(PROMPT, 5)

    def test_of_a_link_that_is_gone(self, rig):
        rig.desk.detach(2)
        rig.desk.receive(2, Drain(), 0)
        assert not rig.desk.pool.get(1).is_draining

    @pytest.mark.parametrize("message", [Ping(1), Pong(1, 2), Bye()])
    def test_the_streams_own_affairs(self, rig, message):
        rig.desk.receive(1, message, 0)
        assert rig.take_sent() == []
        assert session_of(rig).link is LinkState.STREAMING


class TestClose:
    @pytest.mark.parametrize("is_lost", [True, False])
    def test_only_an_attached_draft_is_told(self, rig, is_lost):
        if is_lost:
            rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        rig.scheduler.abort(1)
        told = [m.reason for _, m in rig.take_sent()]
        assert told == ([] if is_lost else [CloseReason.ABORTED])
        rig.check_clean()

    def test_while_opening(self, make_rig):
        rig = make_rig()
        rig.desk.attach(1, rig.hello(1))
        rig.add(PROMPT, 40)
        rig.scheduler.abort(1)
        sent = [type(m) for _, m in rig.take_sent()]
        assert sent == [OpenSession, CloseSession]
        rig.desk.receive(1, Opened(1, 1, OpenStatus.OK), 0)
        rig.check_clean()
