"""The degradation rules at the desk: stalls, dark drafts, quarantine, bounds of loops."""

from dataclasses import replace

import pytest

from paceline.protocol.messages import (
    CloseReason,
    CloseSession,
    DraftTokens,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
    Verdict,
)
from paceline.target.draft_desk import TOKENS_PER_STALL_TIMEOUT
from paceline.target.draft_pool import ALLOWANCE_FLOOR

SECOND = 1_000_000
PROMPT = (1, 2, 3)
RPC = {"stall_timeout_s": 2, "breaker_failures": 3, "breaker_min_s": 4, "breaker_max_s": 30}


def served_rig(make_rig, *, links=(1,), prompt=PROMPT, num_tokens=40, **rpc):
    """Session 1 streams on link 1; nobody has drafted anything."""
    rig = make_rig(rpc={**RPC, **rpc})
    for link_id in links:
        rig.desk.attach(link_id, rig.hello(link_id))
    add(rig, prompt, num_tokens)
    return rig


def add(rig, prompt=PROMPT, num_tokens=40):
    """One more sequence, and its draft takes it at once; returns its id."""
    session_id = rig.add(prompt, num_tokens)
    accept(rig)
    return session_id


def accept(rig):
    """Answer all that is asked of drafts; returns the Opens, by link."""
    opens = [(i, m) for i, m in rig.take_sent() if isinstance(m, OpenSession)]
    for link_id, message in opens:
        opened = Opened(message.session_id, message.epoch, OpenStatus.OK)
        rig.desk.receive(link_id, opened, rig.now)
    return [(link_id, message.session_id) for link_id, message in opens]


def sequence_of(rig, session_id=1):
    return rig.scheduler._sequences[session_id]


def propose(rig, *token_ids, session_id=1, link_id=1, start=None):
    session = sequence_of(rig, session_id).session
    start = len(session.log) if start is None else start
    context = session.log.hash_at(min(start, len(session.log)))
    draft = DraftTokens(session_id, session.epoch, start, context, token_ids, session.round)
    rig.desk.receive(link_id, draft, rig.now)


def look(rig, now_us, *session_ids):
    """Two looks in a row: the first may find only that we have not listened."""
    rig.now = now_us
    for _ in range(2):
        rig.desk.maintain(session_ids or (1,), now_us)


def finish(rig, num_tokens=40, session_id=1, prompt=PROMPT):
    rig.run()
    assert rig.out[session_id] == rig.oracle(prompt, num_tokens)
    rig.check_clean()


class TestStalled:
    def test_taken_away_and_opened_elsewhere(self, make_rig):
        rig = served_rig(make_rig, links=(1, 2))
        look(rig, 2 * SECOND - 1)
        assert rig.take_sent() == []
        look(rig, 2 * SECOND)
        assert rig.take_sent() == [(1, CloseSession(1, 1, CloseReason.REPLACED))]
        assert rig.desk.counts["stalled"] == 1
        look(rig, 2 * SECOND + SECOND // 10)
        ((link_id, message),) = rig.take_sent()
        assert (link_id, message.epoch) == (2, 2)
        finish(rig)

    def test_not_at_the_first_look(self, make_rig):
        """This process may have stood still: what has come in is read before the second."""
        rig = served_rig(make_rig)
        rig.desk.maintain([1], 100 * SECOND)
        rig.now = 100 * SECOND
        propose(rig, 9)
        rig.desk.maintain([1], 100 * SECOND)
        assert rig.desk.counts["stalled"] == 0

    def test_no_credit_no_debt(self, make_rig):
        """The window is full: K = 4, so 9 proposals."""
        rig = served_rig(make_rig)
        propose(rig, *range(10, 19))
        look(rig, 100 * SECOND)
        assert rig.desk.counts["stalled"] == 0

    def test_a_pass_that_took_long_is_not_the_drafts_fault(self, make_rig):
        rig = served_rig(make_rig)
        text = rig.oracle(PROMPT, 20)
        propose(rig, *text[:9])
        plan, results = rig.begin()
        rig.now = 100 * SECOND
        rig.end(plan, results)
        ended = rig.now
        look(rig, ended + 2 * SECOND - 1)
        assert rig.desk.counts["stalled"] == 0
        look(rig, ended + 2 * SECOND)
        assert rig.desk.counts["stalled"] == 1

    def test_verdicts_are_no_excuse(self, make_rig):
        """A hung engine behind a live stream: the target decodes on alone."""
        rig = served_rig(make_rig)
        while rig.now < 2 * SECOND:
            rig.now += SECOND // 4
            rig.step()
        rig.step()
        assert rig.desk.counts["stalled"] == 1
        finish(rig)

    @pytest.mark.parametrize("what", ["duplicate", "diverged", "gap"])
    def test_what_is_of_no_use_is_none_either(self, make_rig, what):
        rig = served_rig(make_rig)
        propose(rig, 10)
        rig.now = SECOND
        if what == "duplicate":
            propose(rig, 10, start=3)
        else:
            propose(rig, 11, start=3 if what == "diverged" else 5)
        assert rig.desk.counts[what] == 1
        look(rig, 2 * SECOND)
        assert rig.desk.counts["stalled"] == 1

    def test_the_text_is_near_its_end(self, make_rig):
        rig = served_rig(make_rig, num_tokens=3)
        rig.step()
        propose(rig, 9)
        look(rig, 100 * SECOND)
        assert rig.desk.counts["stalled"] == 0

    def test_patience_doubles_while_the_draft_is_only_busy(self, make_rig):
        rig = served_rig(make_rig, breaker_failures=100)
        stalls, was = [], 0
        for tenth in range(0, 400):
            look(rig, tenth * SECOND // 10)
            accept(rig)
            if rig.desk.counts["stalled"] > was:
                stalls.append(tenth / 10)
                was += 1
        # 2 s, and a pause of 0.1 s; 4 s, and 0.2 s; 8 s, and 0.4 s; 16 s
        assert stalls == [2.0, 6.1, 14.3, 30.7]
        propose(rig, 9)
        assert sequence_of(rig).patience.num_stalls == 0

    def test_time_for_long_prompts_and_for_those_beside_it(self, make_rig):
        """Three prompts of 200 are one timeout more, until one of them has been answered."""
        assert TOKENS_PER_STALL_TIMEOUT == 512
        prompt = (1,) * 200
        rig = served_rig(make_rig, prompt=prompt)
        ids = (1, add(rig, prompt), add(rig, prompt))
        look(rig, 4 * SECOND - 1, *ids)
        assert rig.desk.counts["stalled"] == 0
        rig.desk.maintain(ids, 4 * SECOND)  # has seen it twice: the first look was just now
        assert rig.desk.counts["stalled"] == 0
        propose(rig, 9, session_id=2)
        rig.desk.maintain(ids, 4 * SECOND)
        assert rig.desk.counts["stalled"] == 2


class TestDark:
    def test_failures_of_any_kind_in_a_row(self, make_rig):
        rig = served_rig(make_rig)
        ids = (1, add(rig), add(rig))
        propose(rig, 5, start=2)  # into the prompt
        rig.desk.receive(1, CloseSession(2, 1, CloseReason.ABORTED), 0)
        assert rig.desk.counts["dark"] == 0
        look(rig, 2 * SECOND, *ids)  # the third stalls
        assert rig.desk.counts["dark"] == 1
        assert rig.desk.pool.breaker_states() == {"draft-1": "dark"}

    def test_nothing_is_opened_until_a_probe(self, make_rig):
        rig = served_rig(make_rig, breaker_failures=1)
        ids = (1, add(rig))
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        rig.take_sent()
        look(rig, 4 * SECOND - 1, 1)
        assert rig.take_sent() == []
        look(rig, 4 * SECOND, *ids)
        assert accept(rig) == [(1, 1)], "one probes"
        assert rig.desk.counts["probed"] == 1
        third = rig.add(PROMPT, 40)
        assert rig.take_sent() == []
        propose(rig, 9)
        assert (rig.desk.counts["restored"], rig.desk.counts["dark"]) == (1, 1)
        look(rig, 4 * SECOND, 1, 2, third)
        assert (1, third) in accept(rig)

    def test_of_two_drafts_the_other_gets_all(self, make_rig):
        rig = served_rig(make_rig, links=(1, 2), breaker_failures=1)
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        assert {add(rig) for _ in range(3)} == rig.desk.pool.get(2).sessions

    def test_dialling_again_does_not_help(self, make_rig):
        rig = served_rig(make_rig, breaker_failures=1)
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        rig.desk.detach(1, SECOND)
        rig.desk.attach(2, rig.hello(1))
        look(rig, 4 * SECOND - 1)
        assert rig.take_sent() == []
        look(rig, 4 * SECOND)
        assert accept(rig) == [(2, 1)]

    def test_a_lost_stream_is_one_failure_whatever_it_served(self, make_rig):
        rig = served_rig(make_rig, breaker_failures=2)
        ids = (1, add(rig), add(rig))
        rig.desk.detach(1, 0)
        rig.desk.attach(2, rig.hello(1))
        look(rig, 0, *ids)
        assert [link_id for link_id, _ in accept(rig)] == [2, 2, 2]
        rig.desk.detach(2, 0)
        assert rig.desk.counts["dark"] == 1

    def test_an_idle_stream_that_ends_is_none(self, make_rig):
        rig = make_rig(rpc={**RPC, "breaker_failures": 1})
        rig.desk.attach(1, rig.hello(1))
        rig.desk.detach(1, 0)
        assert rig.desk.counts["dark"] == 0

    @pytest.mark.parametrize("status", [OpenStatus.BUSY, OpenStatus.UNSUPPORTED])
    def test_a_refusal_is_none(self, make_rig, status):
        rig = make_rig(rpc={**RPC, "breaker_failures": 1})
        rig.desk.attach(1, rig.hello(1))
        rig.add(PROMPT, 40)
        rig.desk.receive(1, Opened(1, 1, status), 0)
        assert (rig.desk.counts[status], rig.desk.counts["dark"]) == (1, 0)

    def test_a_refused_probe_leaves_the_next_one_free(self, make_rig):
        rig = served_rig(make_rig, breaker_failures=1)
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        look(rig, 4 * SECOND)
        rig.desk.receive(1, Opened(1, 2, OpenStatus.BUSY), 4 * SECOND)
        look(rig, 5 * SECOND)
        assert rig.desk.counts["probed"] == 2

    def test_a_probe_whose_sequence_ends_leaves_the_next_one_free(self, make_rig):
        rig = served_rig(make_rig, breaker_failures=1)
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        look(rig, 4 * SECOND)
        accept(rig)
        rig.scheduler.abort(1)
        rig.take_sent()
        assert add(rig) == 2
        assert rig.desk.counts["probed"] == 2

    def test_an_outlaw_comes_back_dark(self, make_rig):
        rig = served_rig(make_rig, breaker_failures=100, max_remote_errors=1)
        propose(rig, 5, start=2)
        assert rig.desk.pool.take_outlaws() == [1]
        rig.desk.detach(1, 0)
        rig.desk.attach(2, rig.hello(1))
        assert rig.desk.pool.breaker_states() == {"draft-1": "dark"}
        assert (rig.desk.counts["outlawed"], rig.desk.counts["dark"]) == (1, 1)

    @pytest.mark.parametrize(("num_remote_errors", "is_dark"), [(1, False), (2, True)])
    def test_unreadable_messages_count_as_broken_rules(self, make_rig, num_remote_errors, is_dark):
        rig = served_rig(make_rig, breaker_failures=100, max_remote_errors=3)
        propose(rig, 5, start=2)
        rig.desk.detach(1, 0, num_remote_errors)
        assert (rig.desk.counts["outlawed"] == 1) is is_dark

    def test_with_every_draft_dark_decoding_is_plain(self, make_rig):
        rig = served_rig(make_rig, links=(1, 2), breaker_failures=1)
        rig.desk.receive(1, CloseSession(1, 1, CloseReason.ABORTED), 0)
        look(rig, SECOND)
        accept(rig)
        rig.desk.receive(2, CloseSession(1, 2, CloseReason.ABORTED), SECOND)
        rig.take_sent()
        finish(rig)
        assert rig.take_sent() == []
        assert all(delta.num_draft_tokens == 0 for delta in rig.deltas[1])


class TestQuarantine:
    def test_costs_only_the_poisoned_sequence_its_draft_and_for_good(self, make_rig):
        rig = served_rig(make_rig)
        others = (add(rig), add(rig))
        propose(rig, 5, start=2)
        assert rig.take_sent() == [(1, CloseSession(1, 1, CloseReason.PROTOCOL))]
        assert rig.desk.pool.get(1).sessions == set(others)
        for session_id in others:
            propose(rig, 9, session_id=session_id)
        assert rig.desk.counts["kept"] == 2
        look(rig, 100 * SECOND, 1)
        assert rig.take_sent() == [], "this draft would do it again"

    def test_another_draft_may_have_it(self, make_rig):
        rig = served_rig(make_rig, links=(1, 2))
        propose(rig, 5, start=2)
        rig.take_sent()
        look(rig, SECOND)
        assert accept(rig) == [(2, 1)]
        finish(rig)


class TestReopens:
    @pytest.mark.parametrize("most", [0, 1, 3])
    def test_bounded(self, make_rig, most):
        rig = served_rig(make_rig, max_reopens=most, breaker_failures=1000)
        for epoch in range(1, 9):
            rig.desk.receive(1, CloseSession(1, epoch, CloseReason.ABORTED), rig.now)
            look(rig, rig.now + 10 * SECOND)
            accept(rig)
        assert sequence_of(rig).session.epoch == 1 + most
        assert (rig.desk.counts["reopened"], rig.desk.counts["gave_up"]) == (most, 1)
        finish(rig)

    def test_an_end_in_time_gives_nothing_up(self, make_rig):
        rig = served_rig(make_rig, max_reopens=0)
        finish(rig)
        assert rig.desk.counts["gave_up"] == 0


class TestNackLoop:
    def test_one_repetition_per_verdict(self, make_rig):
        rig = served_rig(make_rig)
        for num_rounds in (1, 2):
            rig.step()
            rig.take_sent()
            for _ in range(50):
                rig.desk.receive(1, Nack(1, 1, 3), 0)
            ((_, verdict),) = rig.take_sent()
            assert isinstance(verdict, Verdict)
            assert len(verdict.token_ids) == num_rounds
        assert (rig.desk.counts["nack"], rig.desk.counts["nack_repeated"]) == (100, 98)
        finish(rig)

    def test_and_the_allowance_ends_it(self, make_rig):
        rig = served_rig(make_rig)
        rig.step()
        while not rig.desk.counts["flood"]:
            rig.desk.receive(1, Nack(1, 1, 3), 0)
        assert rig.desk.counts["nack"] == rig.desk.pool.get(1).max_allowance == ALLOWANCE_FLOOR
        for _ in range(7):
            rig.desk.receive(1, Nack(1, 1, 3), 0)
        assert rig.desk.pool.take_outlaws() == [1]


def test_an_open_carries_the_salt(make_rig):
    rig = make_rig()
    rig.desk.attach(1, rig.hello(1))
    rig.submit(replace(rig.request(PROMPT, 40), cache_salt=77))
    ((_, message),) = rig.take_sent()
    assert message.cache_salt == 77
    rig.desk.detach(1, 0)
    rig.desk.attach(2, rig.hello(2))
    rig.desk.maintain([1], 0)
    assert rig.take_sent()[-1][1].cache_salt == 77
