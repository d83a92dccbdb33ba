"""The draft's session in the rejection modes: laws, noise of its own per draw, and the flush."""

import pytest

from paceline.errors import LocalProtocolError
from paceline.protocol.draft_session import (
    MAX_LAWS_PER_MESSAGE,
    DraftSession,
    Rewind,
    WorkResult,
)
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.messages import Nack, OpenSession, Verdict
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

GREEDY, COUPLED = VerificationMode.GREEDY, VerificationMode.COUPLED
REJECTION, BLOCK = VerificationMode.REJECTION, VerificationMode.BLOCK
PROMPT = (1, 2, 3)


def law(token_id):
    return SparseProbs((token_id, 900), (65536 - token_id, token_id))


def laws(*token_ids):
    return tuple(map(law, token_ids))


def opening(mode=BLOCK, *, epoch=1, limit=300):
    return OpenSession(7, epoch, 3, PROMPT, SamplingParams(), mode, limit)


def drafted(*token_ids, mode=BLOCK, sent=False, **kwargs):
    session = DraftSession(opening(mode, **kwargs), max_len=1000)
    for token_id in token_ids:
        draw(session, token_id)
    if sent:
        session.take_draft()
    return session


def draw(session, token_id):
    work = session.begin_work(1000)
    assert session.end_work(WorkResult(token_id, draft_probs=law(token_id)))
    return work


def verdict(start, *token_ids, rejects=False, round=1):
    return Verdict(7, 1, start, token_ids, 0, 300, round, has_rejection=rejects)


@pytest.fixture(params=[REJECTION, BLOCK])
def mode(request):
    return request.param


class TestLaws:
    def test_sent_with_their_proposals(self, mode):
        session = drafted(10, 11, mode=mode)
        assert session.take_draft().draft_probs == laws(10, 11)
        draw(session, 12)
        message = session.take_draft()
        assert (message.token_ids, message.draft_probs) == ((12,), laws(12))

    def test_behind_committed_tokens(self, mode):
        session = drafted(10, 11, 12, mode=mode)
        session.receive_verdict(verdict(3, 10, 11))
        message = session.take_draft()
        assert (message.start, message.draft_probs) == (5, laws(12))

    def test_after_a_rewind(self, mode):
        session = drafted(10, 11, 12, mode=mode, sent=True)
        session.receive_verdict(verdict(3, 10, 20))
        draw(session, 21)
        message = session.take_draft()
        assert (message.start, message.token_ids, message.draft_probs) == (5, (21,), laws(21))

    def test_after_an_extension(self, mode):
        session = drafted(10, mode=mode, sent=True)
        session.receive_verdict(verdict(3, 10, 11, 12))
        draw(session, 13)
        assert session.take_draft().draft_probs == laws(13)

    def test_sent_again(self, mode):
        session = drafted(10, 11, 12, mode=mode, sent=True)
        session.receive_verdict(verdict(3, 10))
        session.receive_nack(Nack(7, 1, 5))
        message = session.take_draft()
        assert (message.start, message.draft_probs) == (5, laws(12))

    def test_of_a_dropped_draw_are_dropped(self, mode):
        session = drafted(10, mode=mode)
        session.begin_work(1000)
        session.receive_verdict(verdict(3, 20))
        assert not session.end_work(WorkResult(11, draft_probs=law(11)))
        assert session._probs == []

    @pytest.mark.parametrize("matching", [GREEDY, COUPLED])
    def test_none_in_the_matching_modes(self, matching):
        assert drafted(10, 11, mode=matching).take_draft().draft_probs == ()

    @pytest.mark.parametrize("probs", [None, SparseProbs((11,), (65536,))])
    def test_a_draw_without_its_law_is_a_bug_of_the_engine(self, mode, probs):
        session = drafted(mode=mode)
        session.begin_work(1000)
        with pytest.raises(LocalProtocolError, match="token 10 without a law"):
            session.end_work(WorkResult(10, draft_probs=probs))
        assert len(session.log) == 3

    def test_as_many_as_a_message_holds(self, mode):
        tokens = tuple(range(10, 10 + MAX_LAWS_PER_MESSAGE + 5))
        session = drafted(*tokens, mode=mode)
        first, second = session.take_draft(), session.take_draft()
        assert first.token_ids == tokens[:MAX_LAWS_PER_MESSAGE]
        assert (second.token_ids, second.draft_probs) == (tokens[-5:], laws(*tokens[-5:]))
        assert second.start == first.start + MAX_LAWS_PER_MESSAGE
        assert session.take_draft() is None

    def test_the_table_sends_all_of_them_at_once(self, mode):
        table = DraftTable(max_sessions=1, max_len=1000, session_idle_us=1000)
        table.receive(1, opening(mode), 0)
        tokens = tuple(range(10, 10 + MAX_LAWS_PER_MESSAGE + 1))
        for token_id in tokens:
            items = table.begin_pass(100)
            table.end_pass(items, [WorkResult(token_id, draft_probs=law(token_id))], 0)
        sent = table.take_drafts(0)[1]
        assert [len(message.token_ids) for message in sent] == [MAX_LAWS_PER_MESSAGE, 1]


class TestNoiseKeys:
    def test_no_draw_shares_one(self, mode):
        """Over draws, rewinds, failures and a new epoch."""
        rounds = []
        for epoch in (1, 2, 4095):
            session = drafted(mode=mode, epoch=epoch)
            rounds += [draw(session, 10 + i).round for i in range(5)]
            rounds.append(session.begin_work(1000).round)
            session.cancel_work()
            session.receive_verdict(Verdict(7, epoch, 3, (20,), 0, 300, 1, has_rejection=True))
            rounds += [draw(session, 21 + i).round for i in range(5)]
        assert len(set(rounds)) == len(rounds) == 33
        assert all(0 <= key < 2**32 for key in rounds)

    @pytest.mark.parametrize(("epoch", "key"), [(1, 1 << 20), (4095, 4095 << 20), (4096, 0)])
    def test_what_it_is_made_of(self, epoch, key):
        session = drafted(epoch=epoch)
        assert session.begin_work(1).round == key
        session.cancel_work()
        assert session.begin_work(1).round == key + 1

    def test_a_million_draws_wrap_within_their_epoch(self):
        session = drafted(epoch=3)
        session._num_draws = 2**20 - 1
        assert draw(session, 10).round == (4 << 20) - 1
        assert draw(session, 11).round == 3 << 20

    @pytest.mark.parametrize("any_mode", VerificationMode)
    def test_the_pass_asks_for_a_law_where_one_is_needed(self, any_mode):
        table = DraftTable(max_sessions=1, max_len=1000, session_idle_us=1000)
        table.receive(1, opening(any_mode), 0)
        (item,) = table.begin_pass(100)
        assert item.mode is any_mode
        expected = item.work.round if any_mode in (REJECTION, BLOCK) else None
        assert item.propose_round == expected


class TestRejection:
    def test_all_behind_is_dropped_though_it_fits(self, mode):
        session = drafted(10, 11, 12, 13, mode=mode, sent=True)
        outcome = session.receive_verdict(verdict(3, 10, 11, rejects=True))
        assert outcome == Rewind(length=5, num_dropped=2)
        assert session.log.slice(3) == (10, 11)
        assert (session.sent_len, session.num_computed, session.last_round) == (5, 5, 1)
        assert draw(session, 14).token_ids == (11,)
        message = session.take_draft()
        assert (message.start, message.token_ids, message.last_round) == (5, (14,), 1)
        assert message.draft_probs == laws(14)

    def test_it_counts_as_a_rewind(self, mode):
        table = DraftTable(max_sessions=1, max_len=1000, session_idle_us=1000)
        table.receive(1, opening(mode), 0)
        for token_id in (10, 11):
            items = table.begin_pass(100)
            table.end_pass(items, [WorkResult(token_id, draft_probs=law(token_id))], 0)
        table.receive(1, verdict(3, 10, rejects=True), 0)
        assert (table.stats.num_rewinds, table.stats.num_dropped_tokens) == (1, 1)

    def test_a_conflict_is_the_same_as_ever(self, mode):
        session = drafted(10, 11, 12, mode=mode)
        assert session.receive_verdict(verdict(3, 10, 20, rejects=True)) == Rewind(4, 2)
        assert (session.num_computed, session._probs) == (4, [])

    def test_nothing_behind_nothing_dropped(self, mode):
        session = drafted(10, 11, mode=mode)
        assert session.receive_verdict(verdict(3, 10, 11, rejects=True)) is None
        assert session.num_computed == 4

    def test_a_draw_under_way_is_void(self, mode):
        """It was drawn behind what the target looked at."""
        session = drafted(10, 11, mode=mode)
        work = session.begin_work(1000)
        session.receive_verdict(verdict(3, 10, 11, rejects=True))
        assert not session.end_work(WorkResult(12, draft_probs=law(12)))
        assert session.log.slice(3) == (10, 11)
        assert session.num_computed == 5, "its rows are right"
        assert draw(session, 13).round == work.round + 1

    def test_only_the_draw_under_way(self, mode):
        session = drafted(10, mode=mode)
        session.receive_verdict(verdict(3, 10, rejects=True))
        draw(session, 11)
        assert session.take_draft().token_ids == (11,)

    def test_a_cancelled_pass_takes_its_void_with_it(self, mode):
        session = drafted(10, mode=mode)
        session.begin_work(1000)
        session.receive_verdict(verdict(3, 10, rejects=True))
        session.cancel_work()
        draw(session, 11)
        assert session.take_draft().token_ids == (11,)

    def test_a_late_copy_drops_nothing(self, mode):
        session = drafted(10, 11, mode=mode)
        session.receive_verdict(verdict(3, 10, rejects=True))
        draw(session, 12)
        assert session.receive_verdict(verdict(3, 10, rejects=True)) is None
        assert session.log.slice(3) == (10, 12)

    def test_without_a_rejection_what_fits_stays(self, mode):
        session = drafted(10, 11, 12, 13, mode=mode)
        assert session.receive_verdict(verdict(3, 10, 11)) is None
        assert session.log.slice(5) == (12, 13)
        assert session.take_draft().draft_probs == laws(12, 13)

    @pytest.mark.parametrize("matching", [GREEDY, COUPLED])
    def test_the_matching_modes_keep_what_fits(self, matching):
        session = drafted(10, 11, 12, mode=matching)
        session.begin_work(1000)
        assert session.receive_verdict(verdict(3, 10, rejects=True)) is None
        assert session.end_work(WorkResult(13))
        assert session.log.slice(3) == (10, 11, 12, 13)
