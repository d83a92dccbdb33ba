"""The draft's side of one sequence: what it computes, sends and rewinds."""

import pytest

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.protocol.draft_session import DraftSession, DraftWork, Rewind, WorkResult
from paceline.protocol.messages import DraftTokens, Nack, OpenSession, Verdict
from paceline.protocol.token_log import TokenLog
from paceline.sampling.params import SamplingParams, VerificationMode

GREEDY = SamplingParams(temperature=0)
PROMPT = (1, 2, 3)


def make(*, tokens=PROMPT, prompt_len=3, limit=19, max_len=1000, epoch=1):
    opened = OpenSession(7, epoch, prompt_len, tokens, GREEDY, VerificationMode.GREEDY, limit)
    return DraftSession(opened, max_len=max_len)


def verdict(start, *token_ids, accepted=0, limit=100, round=1, epoch=1):
    return Verdict(7, epoch, start, token_ids, accepted, limit, round)


def hash_of(*tokens):
    return TokenLog(tokens).hash_at(len(tokens))


def drafted(*proposals, sent=False, **kwargs):
    """A session that has computed these proposals one by one."""
    session = make(**kwargs)
    for token_id in proposals:
        session.begin_work(1000)
        assert session.end_work(WorkResult(token_id))
    if sent:
        session.take_draft()
    return session


class TestTimes:
    def test_work_in_vain_dates_nothing(self):
        """The verdict before it is not the last one that what follows is to tell of."""
        session = make()
        session.receive_verdict(verdict(3, 10), 1_000)
        session.begin_work(1000)
        session.receive_verdict(verdict(4, 20, round=2), 2_000)
        assert not session.end_work(WorkResult(11), draft_us=700, began_us=1_500)
        session.begin_work(1000)
        assert session.end_work(WorkResult(21), draft_us=30, began_us=2_100)
        draft = session.take_draft()
        assert (draft.received_us, draft.began_us, draft.draft_us) == (2_000, 2_100, 30)


class TestWork:
    def test_first_the_prompt(self):
        session = make()
        work = session.begin_work(1000)
        assert work == DraftWork(0, PROMPT, 1000, 0, hash_of(1, 2, 3), 1 << 20)
        assert work.end == 3
        assert session.end_work(WorkResult(10))
        assert session.log.slice(0) == (1, 2, 3, 10)
        assert session.num_computed == 3

    def test_then_one_row_each(self):
        session = drafted(10)
        work = session.begin_work(1000)
        assert work == DraftWork(3, (10,), 1000, 1, hash_of(1, 2, 3, 10), 1 << 20 | 1)
        assert work.num_rows == 1

    def test_output_index_counts_from_the_prompt(self):
        """Reopened in the middle: the noise key goes on where the text is."""
        work = make(tokens=(1, 2, 3, 10, 11)).begin_work(1000)
        assert (work.start, work.token_ids, work.output_index) == (0, (1, 2, 3, 10, 11), 2)

    def test_up_to_the_limit(self):
        session = drafted(10, 11, limit=5)
        assert not session.can_draft()
        session.receive_verdict(verdict(3, 10, limit=6))
        assert session.can_draft()

    def test_up_to_its_own_context(self):
        """seen in peers, no. 28: a draft whose context is shorter stops by itself."""
        session = drafted(10, 11, max_len=5)
        assert not session.can_draft()
        session.receive_verdict(verdict(3, 10, limit=50))
        assert not session.can_draft()

    def test_opened_beyond_its_own_context(self):
        assert not make(max_len=3).can_draft()
        assert not make(max_len=2).can_draft()

    def test_no_credit_no_work(self):
        assert not make(limit=3).can_draft()

    def test_one_pass_at_a_time(self):
        session = make()
        session.begin_work(1000)
        assert not session.can_draft()
        with pytest.raises(LocalProtocolError, match="begin_work without can_draft"):
            session.begin_work(1000)

    def test_at_least_one_row(self):
        with pytest.raises(LocalProtocolError, match="begin_work"):
            make().begin_work(0)

    def test_end_without_begin(self):
        with pytest.raises(LocalProtocolError, match="end_work without begin_work"):
            make().end_work(WorkResult(1))

    def test_cancel(self):
        session = drafted(10)
        session.begin_work(1000)
        session.cancel_work()
        assert session.num_computed == 3
        assert session.begin_work(1000).start == 3

    def test_cancel_after_a_rewind_below(self):
        session = drafted(10, 11)
        session.begin_work(1000)
        session.receive_verdict(verdict(3, 20))
        session.cancel_work()
        assert session.num_computed == 3

    def test_cancel_without_work_changes_nothing(self):
        session = drafted(10)
        session.cancel_work()
        assert session.num_computed == 3


class TestVerdictsDuringAPass:
    """The pass feeds (10, 11) at 3 after a rewind forgot them; 12 is sampled."""

    def begin(self):
        session = drafted(10, 11, 12)  # computed: 1 2 3 10 11
        session.num_computed = 3
        session.log.truncate(5)
        assert session.begin_work(1000).token_ids == (10, 11)
        return session

    def test_none(self):
        session = self.begin()
        assert session.end_work(WorkResult(12))
        assert (session.num_computed, session.log.slice(3)) == (5, (10, 11, 12))

    def test_agreement_with_the_rows(self):
        session = self.begin()
        assert session.receive_verdict(verdict(3, 10)) is None
        assert session.end_work(WorkResult(12))
        assert (session.num_computed, session.committed_len) == (5, 4)

    def test_conflict_in_the_last_row(self):
        """Row 10 is good, row 11 is not, and 12 was sampled from a lie."""
        session = self.begin()
        assert session.receive_verdict(verdict(3, 10, 20)) == Rewind(4, 1)
        assert not session.end_work(WorkResult(12))
        assert (session.num_computed, session.log.slice(3)) == (4, (10, 20))
        assert session.begin_work(1000).token_ids == (20,)

    def test_conflict_in_the_first_row(self):
        session = self.begin()
        assert session.receive_verdict(verdict(3, 20)) == Rewind(3, 2)
        assert not session.end_work(WorkResult(12))
        assert (session.num_computed, session.log.slice(3)) == (3, (20,))

    def test_conflict_before_the_rows(self):
        session = drafted(10, 11)
        assert session.begin_work(1000).start == 4
        assert session.receive_verdict(verdict(3, 20)) == Rewind(3, 2)
        assert not session.end_work(WorkResult(12))
        assert session.num_computed == 3
        work = session.begin_work(1000)
        assert (work.start, work.token_ids, work.output_index) == (3, (20,), 1)
        assert work.context_hash == hash_of(1, 2, 3, 20)

    def test_conflict_before_the_rows_then_more_text(self):
        """The new text is as long as the fed rows: length alone must not fool anybody."""
        session = drafted(10, 11)
        session.begin_work(1000)
        session.receive_verdict(verdict(3, 20, 11))
        assert not session.end_work(WorkResult(12))
        assert (session.num_computed, session.log.slice(3)) == (3, (20, 11))

    def test_extension_without_conflict(self):
        """The verdict is ahead of the draft: rows stay, the sampled token is known already."""
        session = self.begin()
        assert session.receive_verdict(verdict(3, 10, 11, 12, 13)) is None
        assert not session.end_work(WorkResult(12))
        assert (session.num_computed, session.log.slice(3)) == (5, (10, 11, 12, 13))
        assert session.begin_work(1000).token_ids == (12, 13)

    def test_conflict_right_after_the_rows(self):
        """All fed rows agree; the sampled token is replaced by the committed one."""
        session = self.begin()
        session.receive_verdict(verdict(3, 10, 11, 20))
        assert not session.end_work(WorkResult(12))
        assert (session.num_computed, session.log.slice(3)) == (5, (10, 11, 20))


class TestSending:
    def test_nothing_at_first(self):
        assert make().take_draft() is None

    def test_all_new_proposals_in_one_message(self):
        session = make()
        for token_id in (10, 11):
            session.begin_work(1000)
            session.end_work(WorkResult(token_id), draft_us=5)
        assert session.take_draft(77) == DraftTokens(
            session_id=7,
            epoch=1,
            start=3,
            context_hash=hash_of(1, 2, 3),
            token_ids=(10, 11),
            last_round=0,
            draft_us=10,
            sent_us=77,
        )
        assert session.take_draft(78) is None

    def test_each_proposal_once(self):
        session = drafted(10, sent=True)
        session.begin_work(1000)
        session.end_work(WorkResult(11), draft_us=3)
        message = session.take_draft()
        assert (message.start, message.token_ids, message.draft_us) == (4, (11,), 3)
        assert message.context_hash == hash_of(1, 2, 3, 10)

    def test_time_of_dropped_work_is_charged_to_the_next(self):
        session = make()
        session.begin_work(2)
        session.end_work(WorkResult(None, 2), draft_us=4)
        session.begin_work(2)
        session.end_work(WorkResult(10), draft_us=5)
        assert session.take_draft().draft_us == 9

    def test_committed_tokens_are_not_proposed(self):
        session = drafted(10, 11)
        session.receive_verdict(verdict(3, 10, round=5))
        message = session.take_draft()
        assert (message.start, message.token_ids, message.last_round) == (4, (11,), 5)

    def test_after_a_rewind_nothing_old_is_left(self):
        session = drafted(10, 11)
        session.receive_verdict(verdict(3, 20))
        assert session.take_draft() is None

    def test_after_a_rewind_of_sent_proposals_the_new_ones_go(self):
        session = drafted(10, 11, 12, sent=True)
        session.receive_verdict(verdict(3, 20))
        session.begin_work(1000)
        session.end_work(WorkResult(21))
        message = session.take_draft()
        assert (message.start, message.token_ids) == (4, (21,))


class TestVerdicts:
    def test_agreement(self):
        session = drafted(10, 11, 12)
        assert session.receive_verdict(verdict(3, 10, 11, accepted=1, limit=30, round=4)) is None
        assert (session.committed_len, session.limit_position, session.last_round) == (5, 30, 4)
        assert session.num_computed == 5

    def test_conflict(self):
        session = drafted(10, 11, 12, 13)
        assert session.receive_verdict(verdict(3, 10, 20)) == Rewind(length=4, num_dropped=3)
        assert session.log.slice(0) == (1, 2, 3, 10, 20)
        assert (session.committed_len, session.sent_len, session.num_computed) == (5, 5, 4)

    def test_extension(self):
        session = drafted(10)
        assert session.receive_verdict(verdict(3, 10, 11, 12)) is None
        assert (session.committed_len, session.sent_len, session.num_computed) == (6, 6, 3)

    def test_duplicate(self):
        session = drafted(10, 11)
        session.receive_verdict(verdict(3, 10, 11, limit=30, round=2))
        before = (session.log.slice(0), session.committed_len, session.limit_position)
        assert session.receive_verdict(verdict(3, 10, 11, limit=30, round=2)) is None
        assert session.receive_verdict(verdict(3, 10, limit=29, round=1)) is None
        assert (session.log.slice(0), session.committed_len, session.limit_position) == before
        assert session.last_round == 2

    def test_overlap_with_committed_tokens(self):
        session = drafted(10, 11)
        session.receive_verdict(verdict(3, 10))
        assert session.receive_verdict(verdict(3, 10, 11, 12, round=3)) is None
        assert session.committed_len == 6

    def test_gap(self):
        session = drafted(10, 11, 12)
        before = session.log.slice(0)
        assert session.receive_verdict(verdict(4, 11)) == Nack(7, 1, 3)
        assert (session.log.slice(0), session.committed_len) == (before, 3)
        assert (session.last_round, session.limit_position) == (0, 19)

    def test_committed_tokens_do_not_change(self):
        session = drafted(10, 11)
        session.receive_verdict(verdict(3, 10))
        with pytest.raises(RemoteProtocolError, match="a verdict changes committed tokens"):
            session.receive_verdict(verdict(3, 20, 21))
        assert session.log.slice(0) == (1, 2, 3, 10, 11)

    def test_the_prompt_does_not_change(self):
        with pytest.raises(RemoteProtocolError, match="changes committed tokens"):
            make().receive_verdict(verdict(2, 9, 9))

    @pytest.mark.parametrize("epoch", [0, 2])
    def test_another_epoch(self, epoch):
        session = drafted(10)
        assert session.receive_verdict(verdict(3, 20, epoch=epoch)) is None
        assert session.receive_verdict(verdict(50, 20, epoch=epoch)) is None
        assert (session.log.slice(3), session.committed_len) == ((10,), 3)

    def test_a_credit_is_never_taken_back(self):
        session = drafted(10, limit=19)
        session.receive_verdict(verdict(3, 10, limit=5))
        assert session.limit_position == 19

    def test_rounds_only_rise(self):
        session = drafted(10, 11)
        session.receive_verdict(verdict(3, 10, round=5))
        session.receive_verdict(verdict(4, 11, round=4))
        assert session.last_round == 5


class TestNack:
    def test_sends_again_from_there(self):
        session = drafted(10, 11, 12, sent=True)
        session.receive_nack(Nack(7, 1, 4))
        message = session.take_draft()
        assert (message.start, message.token_ids) == (4, (11, 12))
        assert message.context_hash == hash_of(1, 2, 3, 10)

    def test_from_the_first_proposal(self):
        session = drafted(10, 11, sent=True)
        session.receive_nack(Nack(7, 1, 3))
        assert session.take_draft().token_ids == (10, 11)

    @pytest.mark.parametrize("nack", [Nack(7, 0, 4), Nack(7, 2, 4)], ids=["older", "newer"])
    def test_another_epoch(self, nack):
        session = drafted(10, 11, sent=True)
        session.receive_nack(nack)
        assert session.take_draft() is None

    @pytest.mark.parametrize("have_len", [0, 2, 5, 6, 1000])
    def test_outside_of_what_was_sent(self, have_len):
        session = drafted(10, 11, sent=True)
        session.receive_nack(Nack(7, 1, have_len))
        assert session.take_draft() is None

    def test_after_the_proposals_were_replaced(self):
        session = drafted(10, 11, 12, sent=True)
        session.receive_verdict(verdict(3, 20))
        session.receive_nack(Nack(7, 1, 5))
        assert session.take_draft() is None


class TestNoRoom:
    """The engine holds no more of the text: its rows are through, and nothing was drawn."""

    def test_nothing_more_is_asked_for(self):
        session = drafted(10, 11)
        assert not session.is_full
        work = session.begin_work(1000)
        assert not session.end_work(WorkResult(None, cached_len=work.end))
        assert session.is_full
        assert not session.can_draft()
        session.receive_verdict(verdict(3, 10, 11, 12), 0)
        assert not session.can_draft()

    def test_rows_that_did_not_reach_the_end_are_no_sign_of_it(self):
        session = make()
        session.begin_work(1)
        assert not session.end_work(WorkResult(None, cached_len=1))
        assert session.can_draft()
        assert not session.is_full
