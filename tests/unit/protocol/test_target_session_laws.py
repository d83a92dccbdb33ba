"""The target's session in the rejection modes: laws of proposals, and what a rejection costs."""

import pytest

from paceline.errors import RemoteProtocolError
from paceline.protocol.messages import DraftTokens, Opened, OpenStatus
from paceline.protocol.target_session import Disposition, TargetSession
from paceline.protocol.token_log import TokenLog
from paceline.sampling.acceptance import Acceptance
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

GREEDY, COUPLED = VerificationMode.GREEDY, VerificationMode.COUPLED
REJECTION, BLOCK = VerificationMode.REJECTION, VerificationMode.BLOCK
PROMPT = (1, 2, 3)


def law(token_id):
    """Some law that can yield the token, different for each."""
    return SparseProbs((token_id, 90), (65536 - token_id, token_id))


def laws(*token_ids):
    return tuple(map(law, token_ids))


def streaming(mode=BLOCK, **kwargs):
    session = TargetSession(
        7,
        PROMPT,
        sampling=SamplingParams(temperature=float(mode is not GREEDY)),
        mode=mode,
        **{"max_tokens": 100, "max_len": 1000, "stop_token_ids": frozenset({99}), **kwargs},
    )
    session.reopen()
    session.receive_opened(Opened(7, 1, OpenStatus.OK))
    return session


def draft(context, *token_ids, epoch=1, last_round=0, probs=None):
    context_hash = TokenLog(context).hash_at(len(context))
    probs = laws(*token_ids) if probs is None else probs
    return DraftTokens(
        7, epoch, len(context), context_hash, token_ids, last_round, draft_probs=probs
    )


def holding(*token_ids, mode=BLOCK, **kwargs):
    session = streaming(mode, **kwargs)
    assert session.receive_draft(draft(PROMPT, *token_ids)) is Disposition.KEPT
    return session


def verify(session, limit, num_accepted, token_id):
    session.begin_verify(limit)
    return session.end_verify(Acceptance(num_accepted, token_id))


@pytest.fixture(params=[REJECTION, BLOCK])
def mode(request):
    return request.param


class TestLawsTravelWithTheirProposals:
    def test_of_a_pass(self, mode):
        session = holding(10, 11, 12, mode=mode)
        assert session.begin_verify(2) == (10, 11)
        assert session.verifying_probs == laws(10, 11)

    def test_over_several_messages_and_an_overlap(self, mode):
        session = holding(10, 11, mode=mode)
        session.receive_draft(draft((*PROMPT, 10), 11, 12, 13))
        session.receive_draft(draft((*PROMPT, 10, 11, 12, 13), 14))
        assert session.begin_verify(9) == (10, 11, 12, 13, 14)
        assert session.verifying_probs == laws(10, 11, 12, 13, 14)

    def test_an_overlap_keeps_the_laws_that_came_first(self, mode):
        session = holding(10, mode=mode)
        other = SparseProbs((10,), (65536,))
        session.receive_draft(draft(PROMPT, 10, 11, probs=(other, law(11))))
        session.begin_verify(9)
        assert session.verifying_probs == laws(10, 11)

    def test_of_what_a_full_acceptance_left(self, mode):
        session = holding(10, 11, 12, 13, 14, mode=mode)
        verify(session, 2, 2, 12)
        assert session.begin_verify(9) == (13, 14)
        assert session.verifying_probs == laws(13, 14)

    def test_of_what_a_plain_round_left(self, mode):
        session = holding(10, 11, 12, mode=mode)
        verify(session, 0, 0, 10)
        assert session.begin_verify(1) == (11,)
        assert session.verifying_probs == laws(11)

    def test_of_what_came_during_the_pass(self, mode):
        session = holding(10, 11, mode=mode)
        session.begin_verify(2)
        session.receive_draft(draft((*PROMPT, 10, 11), 12, 13))
        assert session.verifying_probs == laws(10, 11)
        session.end_verify(Acceptance(2, 12))
        assert (session.begin_verify(9), session.verifying_probs) == ((13,), laws(13))

    def test_of_a_late_message_behind_a_committed_token(self, mode):
        session = streaming(mode)
        verify(session, 4, 0, 10)
        assert session.receive_draft(draft(PROMPT, 10, 11)) is Disposition.KEPT
        assert (session.begin_verify(9), session.verifying_probs) == ((11,), laws(11))

    def test_of_a_pass_during_which_another_draft_took_over(self, mode):
        session = holding(10, 11, mode=mode)
        session.begin_verify(2)
        session.lose_draft()
        session.reopen()
        assert session.verifying_probs == laws(10, 11)
        session.receive_draft(draft(PROMPT, 10, 11, 12, 13, epoch=2))
        session.end_verify(Acceptance(2, 12))
        assert (session.begin_verify(9), session.verifying_probs) == ((13,), laws(13))

    @pytest.mark.parametrize("end", ["divergence", "reopen", "beyond", "close"])
    def test_none_is_left_behind(self, mode, end):
        session = holding(10, 11, mode=mode)
        if end == "divergence":
            verify(session, 0, 0, 20)
        elif end == "reopen":
            session.lose_draft()
            session.reopen()
        elif end == "beyond":
            verify(session, 2, 2, 12)
        else:
            session.close()
        assert (session.window_len, session._laws.probs) == (0, [])

    def test_cancelled(self, mode):
        session = holding(10, mode=mode)
        session.begin_verify(1)
        session.cancel_verify()
        assert session.verifying_probs == ()
        session.begin_verify(1)
        assert session.verifying_probs == laws(10)

    @pytest.mark.parametrize("matching", [GREEDY, COUPLED])
    def test_none_in_the_matching_modes(self, matching):
        session = streaming(matching)
        assert session.receive_draft(draft(PROMPT, 10, 11, probs=())) is Disposition.KEPT
        assert session.begin_verify(2) == (10, 11)
        assert session.verifying_probs == ()


class TestBrokenRules:
    @pytest.mark.parametrize("num", [0, 1, 3])
    def test_another_number_of_laws(self, mode, num):
        session = streaming(mode)
        with pytest.raises(RemoteProtocolError, match=f"{num} laws for 2 proposals in mode {mode}"):
            session.receive_draft(draft(PROMPT, 10, 11, probs=laws(10, 11, 12)[:num]))
        assert session.window_len == 0

    @pytest.mark.parametrize("matching", [GREEDY, COUPLED])
    def test_laws_that_nobody_asked_for(self, matching):
        session = streaming(matching)
        with pytest.raises(RemoteProtocolError, match="1 laws for 1 proposals in mode"):
            session.receive_draft(draft(PROMPT, 10))
        assert session.window_len == 0

    @pytest.mark.parametrize("place", range(3))
    def test_a_token_that_its_law_cannot_yield(self, mode, place):
        """The block from there on is as if never sent."""
        session = streaming(mode)
        probs = list(laws(10, 11, 12))
        probs[place] = SparseProbs((50,), (65536,))
        with pytest.raises(RemoteProtocolError, match=f"token {10 + place} has no mass"):
            session.receive_draft(draft(PROMPT, 10, 11, 12, probs=tuple(probs)))
        assert session.log.slice(3) == (10, 11, 12)[:place]
        session.begin_verify(9)
        assert session.verifying_probs == laws(10, 11, 12)[:place]

    def test_a_lie_about_what_is_held_already(self, mode):
        session = holding(10, 11, mode=mode)
        lie = SparseProbs((50,), (65536,))
        with pytest.raises(RemoteProtocolError, match="token 10 has no mass"):
            session.receive_draft(draft(PROMPT, 10, 11, 12, probs=(lie, law(11), law(12))))
        assert session.log.slice(3) == (10, 11)
        session.begin_verify(9)
        assert session.verifying_probs == laws(10, 11)

    def test_epoch_first(self, mode):
        session = streaming(mode)
        assert session.receive_draft(draft(PROMPT, 10, epoch=0, probs=())) is (
            Disposition.STALE_EPOCH
        )


class TestRejection:
    def test_the_window_is_cut_though_it_fits(self, mode):
        """The recovered token is the draft's own: without the rule 12 would stay."""
        session = holding(10, 11, 12, mode=mode)
        step = verify(session, 2, 0, 10)
        assert session.log.slice(3) == (10,)
        assert session.window_len == 0
        assert session.is_flushed
        assert step.verdict.has_rejection

    @pytest.mark.parametrize("matching", [GREEDY, COUPLED])
    def test_the_matching_modes_lose_nothing_by_it(self, matching):
        """Proposals of any origin are good there: what fits stays."""
        session = streaming(matching)
        session.receive_draft(draft(PROMPT, 10, 11, 12, probs=()))
        step = verify(session, 2, 0, 10)
        assert step.verdict.has_rejection
        assert session.window_len == 2
        assert not session.is_flushed
        late = draft((*PROMPT, 10, 11, 12), 13, probs=())
        assert session.receive_draft(late) is Disposition.KEPT

    def test_full_acceptance_and_plain_rounds_reject_nothing(self, mode):
        session = holding(10, 11, 12, 13, mode=mode)
        assert not verify(session, 2, 2, 12).verdict.has_rejection
        assert not verify(session, 0, 0, 13).verdict.has_rejection
        assert session.receive_draft(draft((*PROMPT, 10), 11, 12, 13, 14)) is Disposition.KEPT

    @pytest.mark.parametrize("start", range(4))
    def test_what_left_before_the_draft_knew_is_stale(self, mode, start):
        """All of it fits by hash: overlapping, following, behind a gap."""
        session = holding(10, 11, 12, mode=mode)
        verify(session, 3, 1, 11)
        tokens = (10, 11, 12, 13)
        old = draft(PROMPT + tokens[:start], *tokens[start:], last_round=0)
        assert session.receive_draft(old) is Disposition.STALE
        assert session.window_len == 0

    def test_what_left_after_the_draft_knew_is_kept(self, mode):
        session = holding(10, 11, 12, mode=mode)
        verify(session, 3, 1, 11)
        fresh = draft((*PROMPT, 10, 11), 12, last_round=1)
        assert session.receive_draft(fresh) is Disposition.KEPT

    def test_rounds_without_rejection_do_not_renew_the_flush(self, mode):
        session = holding(10, 11, mode=mode)
        verify(session, 2, 0, 10)
        verify(session, 0, 0, 11)
        fresh = draft((*PROMPT, 10), 11, 12, last_round=1)
        assert session.receive_draft(fresh) is Disposition.KEPT

    def test_a_draft_that_was_opened_later_knows(self, mode):
        session = holding(10, 11, mode=mode)
        verify(session, 2, 0, 10)
        session.lose_draft()
        session.reopen()
        fresh = draft((*PROMPT, 10), 11, epoch=2, last_round=0)
        assert session.receive_draft(fresh) is Disposition.KEPT

    def test_a_draft_that_was_opened_during_the_pass_does_not(self, mode):
        session = holding(10, 11, mode=mode)
        session.begin_verify(2)
        session.lose_draft()
        session.reopen()
        session.receive_draft(draft(PROMPT, 10, 11, epoch=2))
        step = session.end_verify(Acceptance(0, 10))
        assert (step.verdict.epoch, step.verdict.has_rejection) == (2, True)
        assert session.window_len == 0
        late = draft((*PROMPT, 10), 11, epoch=2)
        assert session.receive_draft(late) is Disposition.STALE

    def test_a_repeat_tells_of_it_as_long_as_it_was_missed(self, mode):
        session = holding(10, 11, 12, mode=mode)
        verify(session, 3, 1, 11)  # committed: 10 11
        verify(session, 0, 0, 12)
        assert session.receive_nack(3).has_rejection
        assert session.receive_nack(4).has_rejection
        assert not session.receive_nack(5).has_rejection

    def test_a_rejection_behind_an_eos(self, mode):
        session = holding(99, 11, mode=mode)
        step = verify(session, 2, 1, 20)
        assert step.delta.token_ids == (99,)
        assert session.is_finished
        assert session.window_len == 0
