"""Open, refuse, time out, give up, break rules: what each costs a draft, and never a token."""

from dataclasses import replace

import pytest
from llguidance import LLMatcher

from paceline.engine.base import EngineInfo
from paceline.grammars import load_grammars
from paceline.metrics import target_catalog as catalog
from paceline.protocol.link import LinkState
from paceline.protocol.messages import (
    CloseReason,
    CloseSession,
    DraftTokens,
    Nack,
    Opened,
    OpenSession,
    OpenStatus,
)
from paceline.sampling.params import SamplingParams
from paceline.target.metrics import target_snapshot

SECOND = 1_000_000
PROMPT = (1, 2, 3)


def opened_rig(make_rig, *, links=(1,), answer=True, **kwargs):
    """One sequence (session 1) handed to link 1 by hand: no real draft behind it."""
    rig = make_rig(**kwargs)
    for link_id in links:
        rig.desk.attach(link_id, rig.hello(link_id))
    rig.add(PROMPT, 40)
    assert isinstance(rig.take_sent()[0][1], OpenSession)
    if answer:
        rig.desk.receive(1, Opened(1, 1, OpenStatus.OK), 0)
    return rig


def sequence_of(rig):
    return rig.scheduler._sequences[1]


def link_of(rig):
    return sequence_of(rig).session.link


def draft(rig, *token_ids, start=None, epoch=1, **changes):
    log = sequence_of(rig).session.log
    start = len(log) if start is None else start
    context = log.hash_at(min(start, len(log)))
    return DraftTokens(1, epoch, start, context, token_ids, changes.pop("last_round", 0), **changes)


def finish(rig):
    """Whatever happened, the text is the target's own."""
    rig.run()
    assert rig.out[1] == rig.oracle(PROMPT, 40)
    rig.check_clean()


class TestOpen:
    def test_at_once(self, make_rig):
        rig = opened_rig(make_rig, answer=False)
        link_id, message = rig.sent[0]
        assert (link_id, message.session_id, message.epoch) == (1, 1, 1)
        assert (message.token_ids, message.limit_position) == (PROMPT, len(PROMPT) + 2 * 4 + 1)
        assert link_of(rig) is LinkState.OPENING
        assert rig.desk.counts == {"attached": 1, "opened": 1}

    def test_as_soon_as_a_draft_is_there(self, make_rig):
        rig = make_rig()
        rig.add(PROMPT, 40)
        rig.step()
        assert rig.take_sent() == []
        rig.desk.attach(1, rig.hello(1))
        rig.step()
        message = rig.take_sent()[0][1]
        assert len(message.token_ids) == 4, "the first token is committed already"

    def test_accepted(self, make_rig):
        rig = opened_rig(make_rig)
        assert link_of(rig) is LinkState.STREAMING
        finish(rig)

    def test_waiting_sequences_are_not_opened(self, make_rig):
        rig = make_rig(target={"max_num_seqs": 1})
        rig.desk.attach(1, rig.hello(1))
        rig.add(PROMPT, 40)
        rig.add(PROMPT, 40)
        assert [m.session_id for _, m in rig.take_sent()] == [1]

    def test_no_more_than_the_draft_takes(self, make_rig):
        rig = make_rig()
        rig.desk.attach(1, rig.hello(1, max_sessions=2))
        for _ in range(3):
            rig.add(PROMPT, 40)
        assert [m.session_id for _, m in rig.take_sent()] == [1, 2]

    def test_not_for_the_last_token(self, make_rig):
        rig = make_rig()
        rig.add(PROMPT, 3)
        rig.step()
        rig.step()
        rig.desk.attach(1, rig.hello(1))
        rig.step()
        assert rig.take_sent() == []


class TestRefused:
    @pytest.mark.parametrize("status", [OpenStatus.BUSY, OpenStatus.UNSUPPORTED])
    def test_then_alone_and_again_later(self, make_rig, status):
        rig = opened_rig(make_rig, answer=False)
        rig.desk.receive(1, Opened(1, 1, status), 0)
        assert link_of(rig) is LinkState.LOST
        assert rig.desk.pool.get(1).sessions == set()
        assert rig.desk.counts[status] == 1
        rig.desk.maintain([1], SECOND // 10 - 1)
        assert rig.take_sent() == []
        rig.desk.maintain([1], SECOND // 10)
        assert [m.epoch for _, m in rig.take_sent()] == [2]
        finish(rig)

    def test_pauses_double_up_to_a_limit_and_end_with_success(self, make_rig):
        rig = opened_rig(make_rig, answer=False)
        now, pauses = 0, []
        for epoch in range(1, 9):
            rig.desk.receive(1, Opened(1, epoch, OpenStatus.UNSUPPORTED), now)
            pauses.append((sequence_of(rig).next_open_us - now) / SECOND)
            now = sequence_of(rig).next_open_us
            rig.desk.maintain([1], now)
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
        rig.desk.receive(1, Opened(1, 9, OpenStatus.OK), now)
        assert sequence_of(rig).open_pause_us == 5 * SECOND, "an open alone proves nothing"
        session = sequence_of(rig).session
        start = session.committed_len
        draft = DraftTokens(1, 9, start, session.log.hash_at(start), (1,), session.round)
        rig.desk.receive(1, draft, now)
        assert sequence_of(rig).open_pause_us == 0

    def test_a_busy_draft_is_left_alone_by_others_too(self, make_rig):
        rig = opened_rig(make_rig, answer=False)
        rig.desk.receive(1, Opened(1, 1, OpenStatus.BUSY), 0)
        rig.now = SECOND // 10 - 1
        rig.add(PROMPT, 40)
        assert rig.take_sent() == []
        rig.desk.maintain([2], SECOND // 10)
        assert [m.session_id for _, m in rig.take_sent()] == [2]

    def test_unsupported_concerns_nobody_else(self, make_rig):
        rig = opened_rig(make_rig, answer=False)
        rig.desk.receive(1, Opened(1, 1, OpenStatus.UNSUPPORTED), 0)
        rig.add(PROMPT, 40)
        assert [m.session_id for _, m in rig.take_sent()] == [2]

    def test_another_draft_is_asked_next(self, make_rig):
        rig = opened_rig(make_rig, links=(1, 2), answer=False)
        rig.desk.receive(1, Opened(1, 1, OpenStatus.UNSUPPORTED), 0)
        rig.desk.maintain([1], SECOND)
        assert [link_id for link_id, _ in rig.take_sent()] == [2]

    @pytest.mark.parametrize("epoch", [0, 2])
    def test_a_stale_answer(self, make_rig, epoch):
        rig = opened_rig(make_rig, answer=False)
        rig.desk.receive(1, Opened(1, epoch, OpenStatus.BUSY), 0)
        assert link_of(rig) is LinkState.OPENING
        assert rig.desk.counts["stale_epoch"] == 1

    def test_a_second_answer(self, make_rig):
        rig = opened_rig(make_rig)
        rig.desk.receive(1, Opened(1, 1, OpenStatus.BUSY), 0)
        assert link_of(rig) is LinkState.STREAMING


class TestOpenTimeout:
    def test_closed_and_tried_elsewhere(self, make_rig):
        rig = opened_rig(make_rig, links=(1, 2), answer=False)
        rig.desk.maintain([1], 10 * SECOND - 1)
        assert rig.take_sent() == []
        rig.desk.maintain([1], 10 * SECOND)
        assert rig.take_sent() == [(1, CloseSession(1, 1, CloseReason.REPLACED))]
        assert link_of(rig) is LinkState.LOST
        rig.desk.maintain([1], 10 * SECOND + SECOND // 10)
        assert [(i, m.epoch) for i, m in rig.take_sent()] == [(2, 2)]
        assert rig.desk.counts["open_timeout"] == 1
        finish(rig)

    def test_an_answer_in_time(self, make_rig):
        rig = opened_rig(make_rig)
        rig.desk.maintain([1], 100 * SECOND)
        assert link_of(rig) is LinkState.STREAMING

    def test_the_answer_that_comes_too_late(self, make_rig):
        rig = opened_rig(make_rig, answer=False)
        rig.desk.maintain([1], 10 * SECOND)
        rig.desk.receive(1, Opened(1, 1, OpenStatus.OK), 10 * SECOND)
        assert link_of(rig) is LinkState.LOST
        assert rig.desk.counts["unknown_session"] == 1

    def test_time_is_configured(self, make_rig):
        rig = opened_rig(make_rig, answer=False, rpc={"open_timeout_s": 0.5})
        rig.desk.maintain([1], SECOND // 2)
        assert rig.desk.counts["open_timeout"] == 1


class TestProposals:
    def test_each_disposition_is_counted(self, make_rig):
        rig = opened_rig(make_rig)
        rig.desk.receive(1, draft(rig, 10, 11), 5)
        rig.desk.receive(1, draft(rig, 10, start=3), 5)
        rig.desk.receive(1, draft(rig, 12, start=7), 5)
        rig.desk.receive(1, draft(rig, 20, start=4), 5)
        rig.desk.receive(1, draft(rig, 20, epoch=0), 5)
        others = ("attached", "opened", "dropped_tokens")
        seen = {k: v for k, v in rig.desk.counts.items() if k not in others}
        assert seen == {"kept": 1, "duplicate": 1, "gap": 1, "diverged": 1, "stale_epoch": 1}
        assert sequence_of(rig).session.log.slice(3) == (10, 11)
        assert rig.desk.pool.get(1).strikes == 0
        finish(rig)

    def test_a_gap_is_answered(self, make_rig):
        rig = opened_rig(make_rig)
        rig.desk.receive(1, draft(rig, 10), 5)
        rig.desk.receive(1, draft(rig, 12, start=6), 5)
        assert rig.take_sent() == [(1, Nack(1, 1, 4))]

    def test_a_stale_one_is_not(self, make_rig):
        rig = opened_rig(make_rig)
        rig.step()
        rig.take_sent()
        rig.desk.receive(1, draft(rig, 12, start=6, last_round=0), 5)
        assert rig.desk.counts["stale"] == 1
        assert rig.take_sent() == []

    def test_what_came_too_late_is_wasted(self, make_rig):
        rig = opened_rig(make_rig)
        rig.desk.receive(1, replace(draft(rig, 20, 21, 22), context_hash=1), 5)
        rig.step()
        rig.desk.receive(1, draft(rig, 12, 13, start=6, last_round=0), 5)  # before our correction
        assert (rig.desk.counts["diverged"], rig.desk.counts["stale"]) == (1, 1)
        snapshot = target_snapshot(rig.scheduler, {}, None)
        assert snapshot.get(catalog.WASTED_TOKENS) == 5

    def test_draft_time_is_learnt_from_kept_ones(self, make_rig):
        rig = opened_rig(make_rig)
        rig.desk.receive(1, draft(rig, 10, 11, draft_us=50), 5)
        rig.desk.receive(1, draft(rig, 10, 11, start=3, draft_us=5000), 5)
        rig.desk.receive(1, draft(rig, 12), 5)
        assert rig.scheduler.policy.lone.draft_token_us.value == 25

    @pytest.mark.parametrize("who", ["unknown sequence", "another draft's"])
    def test_of_nobody(self, make_rig, who):
        rig = opened_rig(make_rig, links=(1, 2))
        message = draft(rig, 10)
        if who == "unknown sequence":
            message = DraftTokens(99, 4, 3, 0, (1,), 0)
        rig.desk.receive(2, message, 0)
        close = CloseSession(message.session_id, message.epoch, CloseReason.UNKNOWN)
        assert rig.take_sent() == [(2, close)]
        assert rig.desk.counts["unknown_session"] == 1
        assert sequence_of(rig).session.window_len == 0

    @pytest.mark.parametrize(
        "message",
        [
            Opened(99, 1, OpenStatus.OK),
            Nack(99, 1, 3),
            CloseSession(99, 1, CloseReason.ABORTED),
        ],
    )
    def test_other_messages_of_nobody_need_no_answer(self, make_rig, message):
        rig = opened_rig(make_rig)
        rig.desk.receive(1, message, 0)
        assert rig.take_sent() == []
        assert rig.desk.counts["unknown_session"] == 1


def test_an_absurd_draft_time_is_bounded(make_rig):
    rig = opened_rig(make_rig)
    session = sequence_of(rig).session
    start = session.committed_len
    context = session.log.hash_at(start)
    draft = DraftTokens(1, session.epoch, start, context, (1,), session.round, draft_us=2**53)
    rig.desk.receive(1, draft, 0)
    assert rig.scheduler.policy.lone.draft_token_us.value == SECOND


@pytest.mark.parametrize(
    ("num_biases", "grammar", "is_opened"),
    [(0, "", True), (1000, "", False), (0, "x" * 2000, True), (0, "é" * 2000, False)],
)
def test_what_one_message_cannot_carry_runs_without_a_draft(
    make_rig, num_biases, grammar, is_opened
):
    """12,000 tokens are 60 of 64 KiB; 1,000 logit biases beside them are too much, and so are
    2,000 characters of which each may take 4 bytes."""
    toy = load_grammars("toy", 2000) if grammar else None
    info = EngineInfo("toy", 2000, 16_384, 16, 1024, grammars=toy)
    rig = make_rig(info=info, rpc={"max_message_bytes": 65536})
    rig.desk.attach(1, replace(rig.hello(1), max_model_len=16_384))
    biases = tuple((token_id, -1.0) for token_id in range(num_biases))
    grammar = LLMatcher.grammar_from_regex(grammar) if grammar else ""
    sampling = SamplingParams(temperature=0.0, logit_bias=biases, grammar=grammar)
    rig.submit(replace(rig.request((1,) * 12_000, 2 + 1), sampling=sampling))
    assert bool(rig.take_sent()) == is_opened
