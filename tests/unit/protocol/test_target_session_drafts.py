"""What the target's session makes of each proposal and each Nack; credits."""

import pytest

from paceline.errors import RemoteProtocolError
from paceline.protocol.link import LinkState
from paceline.protocol.messages import DraftTokens, Opened, OpenStatus
from paceline.protocol.target_session import Disposition, TargetSession
from paceline.protocol.token_log import TokenLog
from paceline.sampling.acceptance import accept_matching
from paceline.sampling.params import SamplingParams, VerificationMode

PROMPT = (1, 2, 3)


def streaming(*, max_tokens=100, ahead=16):
    session = TargetSession(
        7,
        PROMPT,
        sampling=SamplingParams(temperature=0),
        mode=VerificationMode.GREEDY,
        max_tokens=max_tokens,
        max_len=1000,
        max_draft_ahead=ahead,
    )
    session.reopen()
    session.receive_opened(Opened(7, 1, OpenStatus.OK))
    return session


def draft(context, *token_ids, epoch=1, last_round=0):
    """Proposals from a draft that holds `context`."""
    context_hash = TokenLog(context).hash_at(len(context))
    return DraftTokens(7, epoch, len(context), context_hash, token_ids, last_round)


def verify(session, limit, *own):
    return session.end_verify(accept_matching(session.begin_verify(limit), own))


def unchanged(session, message):
    """The disposition of a message that must leave no trace."""
    before = (session.log.slice(0), session.committed_len, session.link, session.epoch)
    disposition = session.receive_draft(message)
    assert (session.log.slice(0), session.committed_len, session.link, session.epoch) == before
    return disposition


class TestKept:
    def test_at_the_end_of_the_committed_tokens(self):
        session = streaming()
        assert session.receive_draft(draft(PROMPT, 10, 11)) is Disposition.KEPT
        assert session.log.slice(3) == (10, 11)
        assert (session.window_len, session.committed_len) == (2, 3)

    def test_behind_the_window(self):
        session = streaming()
        session.receive_draft(draft(PROMPT, 10))
        assert session.receive_draft(draft((*PROMPT, 10), 11, 12)) is Disposition.KEPT
        assert session.log.slice(3) == (10, 11, 12)

    def test_an_overlap_that_agrees_adds_only_the_new(self):
        session = streaming()
        session.receive_draft(draft(PROMPT, 10, 11))
        assert session.receive_draft(draft(PROMPT, 10, 11, 12)) is Disposition.KEPT
        assert session.log.slice(3) == (10, 11, 12)

    def test_late_but_still_fitting(self):
        """Sent before the verdict, but it proposed what was committed: the rest is valid."""
        session = streaming()
        verify(session, 4, 10)
        assert session.receive_draft(draft(PROMPT, 10, 11)) is Disposition.KEPT
        assert session.log.slice(session.committed_len) == (11,)

    def test_before_the_draft_has_answered_the_open(self):
        session = streaming()
        session.lose_draft()
        session.reopen()
        assert session.link is LinkState.OPENING
        assert session.receive_draft(draft(PROMPT, 10, epoch=2)) is Disposition.KEPT

    def test_a_held_stop_id_is_only_a_proposal(self):
        session = streaming()
        session.stop_token_ids = frozenset({10})
        session.receive_draft(draft(PROMPT, 10, 10))
        assert not session.is_finished

    @pytest.mark.parametrize("cut", range(1, 5))
    def test_chunking_is_invisible(self, cut):
        whole, parts = streaming(), streaming()
        whole.receive_draft(draft(PROMPT, 10, 11, 12, 13, 14))
        tokens = (10, 11, 12, 13, 14)
        parts.receive_draft(draft(PROMPT, *tokens[:cut]))
        parts.receive_draft(draft(PROMPT + tokens[:cut], *tokens[cut:]))
        assert parts.log.slice(0) == whole.log.slice(0)


class TestLeavesNoTrace:
    def test_duplicate_in_the_window(self):
        session = streaming()
        session.receive_draft(draft(PROMPT, 10, 11))
        assert unchanged(session, draft(PROMPT, 10, 11)) is Disposition.DUPLICATE
        assert unchanged(session, draft(PROMPT, 10)) is Disposition.DUPLICATE
        assert unchanged(session, draft((*PROMPT, 10), 11)) is Disposition.DUPLICATE

    def test_duplicate_of_committed_tokens(self):
        session = streaming()
        verify(session, 4, 10)
        assert unchanged(session, draft(PROMPT, 10)) is Disposition.DUPLICATE

    def test_nothing_proposed(self):
        assert unchanged(streaming(), draft(PROMPT)) is Disposition.DUPLICATE

    def test_gap(self):
        session = streaming()
        assert unchanged(session, draft((*PROMPT, 10), 11)) is Disposition.GAP

    def test_gap_behind_a_window(self):
        session = streaming()
        session.receive_draft(draft(PROMPT, 10))
        assert unchanged(session, draft((*PROMPT, 10, 11), 12)) is Disposition.GAP

    def test_late_draft_after_rewind(self):
        """Our correction at position 3 is on its way: what the draft still sends is stale."""
        session = streaming()
        session.receive_draft(draft(PROMPT, 10, 11))
        verify(session, 4, 20, 0, 0)
        assert unchanged(session, draft((*PROMPT, 10, 11), 12)) is Disposition.STALE
        assert unchanged(session, draft((*PROMPT, 10), 11)) is Disposition.DIVERGED
        fresh = draft((*PROMPT, 20), 21, last_round=1)
        assert session.receive_draft(fresh) is Disposition.KEPT

    def test_a_gap_after_the_draft_has_seen_the_correction(self):
        session = streaming()
        session.receive_draft(draft(PROMPT, 10, 11))
        verify(session, 4, 20, 0, 0)
        ahead = draft((*PROMPT, 20, 21), 22, last_round=1)
        assert unchanged(session, ahead) is Disposition.GAP

    def test_a_gap_right_after_a_late_open(self):
        """The new draft knows no round yet, but it was opened with our correction."""
        session = streaming()
        verify(session, 4, 20)
        session.lose_draft()
        session.reopen()
        ahead = draft((*PROMPT, 20, 21), 22, epoch=2, last_round=0)
        assert unchanged(session, ahead) is Disposition.GAP
        verify(session, 4, 30)
        assert unchanged(session, draft((*PROMPT, 20, 21, 22), 23, epoch=2)) is Disposition.STALE

    def test_an_agreeing_round_makes_nothing_stale(self):
        """The draft has not seen round 1, but round 1 only confirmed it: a gap is a gap."""
        session = streaming()
        session.receive_draft(draft(PROMPT, 10, 11, 12))
        verify(session, 2, 10, 11, 12)
        assert unchanged(session, draft((*PROMPT, 10, 11, 12, 13), 14)) is Disposition.GAP

    def test_diverged_context(self):
        session = streaming()
        assert unchanged(session, draft((1, 2, 4), 10)) is Disposition.DIVERGED

    def test_diverged_inside_the_window(self):
        """The context fits, an overlapping proposal does not: nothing of it is taken."""
        session = streaming()
        session.receive_draft(draft(PROMPT, 10, 11))
        assert unchanged(session, draft(PROMPT, 10, 12, 13)) is Disposition.DIVERGED

    def test_diverged_from_a_committed_token(self):
        session = streaming()
        verify(session, 4, 20)
        assert unchanged(session, draft(PROMPT, 10, 11)) is Disposition.DIVERGED

    @pytest.mark.parametrize("epoch", [0, 2])
    def test_another_epoch(self, epoch):
        message = draft(PROMPT, 10, epoch=epoch)
        assert unchanged(streaming(), message) is Disposition.STALE_EPOCH

    def test_a_lost_draft(self):
        session = streaming()
        session.lose_draft()
        assert unchanged(session, draft(PROMPT, 10)) is Disposition.STALE_EPOCH

    def test_the_draft_before_the_last(self):
        session = streaming()
        session.lose_draft()
        session.reopen()
        assert unchanged(session, draft(PROMPT, 10)) is Disposition.STALE_EPOCH

    def test_an_ended_sequence(self):
        session = streaming()
        session.close()
        assert unchanged(session, draft(PROMPT, 10)) is Disposition.STALE_EPOCH

    def test_the_epoch_is_looked_at_first(self):
        """Broken rules of a replaced draft are nobody's business any more."""
        assert unchanged(streaming(), draft((1,), 9, epoch=0)) is Disposition.STALE_EPOCH


class TestBrokenRules:
    def test_speaking_about_the_prompt(self):
        with pytest.raises(RemoteProtocolError, match="draft at 2, opened at 3"):
            unchanged(streaming(), draft((1, 2), 3))

    def test_speaking_about_tokens_it_was_opened_with(self):
        session = streaming()
        session.lose_draft()
        verify(session, 0, 10)
        session.reopen()
        with pytest.raises(RemoteProtocolError, match="draft at 3, opened at 4"):
            session.receive_draft(draft(PROMPT, 10, epoch=2))

    def test_up_to_the_credit(self):
        session = streaming(ahead=4)
        assert session.receive_draft(draft(PROMPT, 10, 11, 12, 13)) is Disposition.KEPT

    def test_beyond_the_credit(self):
        session = streaming(ahead=4)
        with pytest.raises(RemoteProtocolError, match="draft beyond its limit 7"):
            session.receive_draft(draft(PROMPT, 10, 11, 12, 13, 14))
        assert session.window_len == 0

    def test_the_last_output_token_is_beyond_every_credit(self):
        session = streaming(max_tokens=3)
        with pytest.raises(RemoteProtocolError, match="draft beyond its limit 5"):
            session.receive_draft(draft(PROMPT, 10, 11, 12))

    def test_a_gap_does_not_excuse_it(self):
        session = streaming(ahead=4)
        with pytest.raises(RemoteProtocolError, match="beyond its limit"):
            session.receive_draft(draft((*PROMPT, 10, 11, 12), 13, 14))


class TestCredit:
    def test_it_rises_with_each_commit(self):
        session = streaming(ahead=4)
        limits = [verify(session, 0, 10 + i).verdict.limit_position for i in range(3)]
        assert limits == [8, 9, 10]

    def test_it_ends_before_the_last_token(self):
        session = streaming(ahead=4, max_tokens=6)
        limits = [verify(session, 0, 10 + i).verdict.limit_position for i in range(5)]
        assert limits == [8, 8, 8, 8, 8]

    def test_it_is_never_taken_back(self):
        """A smaller look-ahead must not make proposals that are under way a crime."""
        session = streaming(ahead=8)
        session.max_draft_ahead = 2
        assert verify(session, 0, 10).verdict.limit_position == 11
        in_flight = draft((*PROMPT, 10), 11, 12, 13, 14, 15, 16, 17)
        assert session.receive_draft(in_flight) is Disposition.KEPT
        assert session.receive_nack(3).limit_position == 11

    def test_a_reopen_starts_afresh(self):
        session = streaming(ahead=8)
        session.lose_draft()
        session.max_draft_ahead = 2
        assert session.reopen().limit_position == 5
        with pytest.raises(RemoteProtocolError, match="beyond its limit 5"):
            session.receive_draft(draft(PROMPT, 10, 11, 12, epoch=2))

    def test_no_credit_is_granted_to_nobody(self):
        """Commits while no draft is attached do not raise the old limit."""
        session = streaming(ahead=4)
        session.lose_draft()
        verify(session, 0, 10)
        assert session._granted_limit == 7


class TestNack:
    def test_missing_commits_are_repeated(self):
        session = streaming()
        for token_id in (10, 11, 12):
            verify(session, 0, token_id)
        verdict = session.receive_nack(4)
        assert (verdict.start, verdict.token_ids) == (4, (11, 12))
        assert (verdict.round, verdict.epoch, verdict.num_accepted_tokens) == (3, 1, 0)
        assert verdict.limit_position == 22

    def test_a_repeat_never_contains_proposals(self):
        session = streaming()
        verify(session, 0, 10)
        session.receive_draft(draft((*PROMPT, 10), 11, last_round=1))
        assert session.receive_nack(3).token_ids == (10,)

    @pytest.mark.parametrize("have_len", [4, 5, 1000])
    def test_nothing_to_repeat(self, have_len):
        session = streaming()
        verify(session, 0, 10)
        assert session.receive_nack(have_len) is None

    def test_of_a_lost_draft(self):
        session = streaming()
        verify(session, 0, 10)
        session.lose_draft()
        assert session.receive_nack(3) is None

    @pytest.mark.parametrize("have_len", [2, 0, -1])
    def test_below_what_it_was_opened_with(self, have_len):
        with pytest.raises(RemoteProtocolError, match=f"nack at {have_len}, opened at 3"):
            streaming().receive_nack(have_len)

    def test_during_a_pass(self):
        session = streaming()
        verify(session, 0, 10)
        session.receive_draft(draft((*PROMPT, 10), 11, last_round=1))
        session.begin_verify(4)
        assert session.receive_nack(3).token_ids == (10,)
        assert session.end_verify(accept_matching((11,), (11, 12))).delta.token_ids == (11, 12)
