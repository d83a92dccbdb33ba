"""Branches at the target: what is held beside the window, when it is adopted, and what is not.

The draft's own chain is 10 11 12 13; runner-ups are 20 + i, and what follows one is 100 and more.
"""

import pytest

from paceline.errors import RemoteProtocolError
from paceline.protocol.alternates import MAX_ALTERNATES
from paceline.protocol.link import LinkState
from paceline.protocol.messages import Nack
from paceline.protocol.target_session import Disposition
from tests.unit.protocol.branching import (
    EOS,
    LAWFUL,
    MATCHING,
    PROMPT,
    branch,
    draft,
    prepared,
    streaming,
    verify,
    window,
)


class TestHeld:
    @pytest.mark.parametrize("mode", MATCHING)
    def test_beside_the_window(self, mode):
        session = prepared(mode=mode)
        assert window(session) == (10, 11, 12)
        assert len(session.alternates) == 3

    def test_behind_a_token_of_the_window(self):
        assert len(prepared(after=(10, 21)).alternates.take(5, 0)) == 0
        session = prepared(after=(10, 21))
        verify(session, 3, 10, 21, 0, 0)
        assert window(session) == (100, 101, 102)

    def test_with_an_empty_window(self):
        session = streaming()
        assert session.receive_draft(branch((*PROMPT, 20), 100)) is Disposition.ALTERNATE
        assert session.window_len == 0

    def test_twice(self):
        session = prepared()
        again = branch((*PROMPT, 20), 100, 101)
        assert session.receive_draft(again) is Disposition.DUPLICATE
        assert len(session.alternates) == 3

    def test_another_choice_inside_the_window(self):
        """The context is ours, the token is not: it is held, and changes nothing."""
        session = prepared()
        assert session.receive_draft(branch((*PROMPT, 10), 21, 200)) is Disposition.ALTERNATE
        assert window(session) == (10, 11, 12)
        verify(session, 3, 10, 21, 0, 0)
        assert window(session) == (200,)

    def test_behind_a_gap_it_is_no_gap(self):
        """No Nack for a branch: what it hangs on may be a text that nobody has."""
        session = streaming()
        message = branch((*PROMPT, 10, 11, 22), 100)
        assert session.receive_draft(message) is Disposition.ALTERNATE

    def test_its_own_chain_still_has_gaps(self):
        session = prepared()
        ahead = draft((*PROMPT, 20, 100, 101, 102), 103)
        assert session.receive_draft(ahead) is Disposition.GAP

    def test_one_that_fits_is_the_window(self):
        """The correction was quicker than the branch."""
        session = streaming()
        session.receive_draft(draft(PROMPT, 10))
        verify(session, 1, 20, 0)
        late = branch((*PROMPT, 20), 100, 101)
        assert session.receive_draft(late) is Disposition.KEPT
        assert window(session) == (100, 101)
        assert session.receive_draft(late) is Disposition.DUPLICATE
        assert session.receive_draft(branch((*PROMPT, 20, 100, 101), 102)) is Disposition.KEPT

    def test_they_are_bounded(self):
        session = streaming(ahead=256, max_tokens=600)
        for runner_up in range(20, 26):
            session.receive_draft(branch((*PROMPT, runner_up), *range(100, 200)))
        assert len(session.alternates) == MAX_ALTERNATES
        assert session.alternates.num_evicted == 600 - MAX_ALTERNATES


class TestAdopted:
    @pytest.mark.parametrize("mode", MATCHING)
    def test_at_once(self, mode):
        session = prepared(mode=mode)
        step = verify(session, 3, 20, 0, 0, 0)
        assert step.delta.token_ids == (20,)
        assert window(session) == (100, 101, 102)
        assert session.num_adopted == 3
        assert session.begin_verify(4) == (100, 101, 102)

    def test_by_a_plain_step(self):
        session = prepared()
        verify(session, 0, 20)
        assert window(session) == (100, 101, 102)

    def test_behind_a_bonus_that_differs(self):
        """Two of three are verified and accepted, and the bonus is not the draft's third."""
        session = prepared(after=(10, 11, 22))
        step = verify(session, 2, 10, 11, 22)
        assert step.delta.num_accepted_tokens == 2
        assert window(session) == (100, 101, 102)

    def test_behind_a_bonus_past_the_window(self):
        session = prepared(after=(10, 11, 12, 23))
        verify(session, 3, 10, 11, 12, 23)
        assert window(session) == (100, 101, 102)

    def test_not_behind_another_token(self):
        session = prepared()
        verify(session, 3, 24, 0, 0, 0)
        assert (window(session), session.num_adopted, len(session.alternates)) == ((), 0, 0)

    def test_not_while_the_draft_was_right(self):
        session = prepared()
        verify(session, 1, 10, 11)
        assert (window(session), session.num_adopted) == ((12,), 0)

    def test_not_behind_a_window(self):
        """The target went the draft's own way, past a place where a branch would have begun."""
        session = prepared()
        session.receive_draft(branch((*PROMPT, 10), 21, 200))
        verify(session, 0, 10)
        assert (window(session), session.num_adopted) == ((11, 12), 0)
        verify(session, 0, 21)
        assert window(session) == (200,)

    def test_the_verdict_is_the_same(self):
        with_branch, without = prepared(), streaming()
        without.receive_draft(draft(PROMPT, 10, 11, 12))
        steps = [verify(session, 3, 20, 0, 0, 0) for session in (with_branch, without)]
        assert steps[0] == steps[1]

    def test_what_is_adopted_counts_as_any_proposal(self):
        session = prepared()
        verify(session, 3, 20, 0, 0, 0)
        step = verify(session, 4, 100, 101, 7, 0)
        assert step.delta.num_draft_tokens == 3
        assert step.delta.num_accepted_tokens == 2
        assert step.delta.token_ids == (100, 101, 7)
        assert session.num_adopted == 0

    def test_only_once(self):
        session = prepared()
        verify(session, 3, 20, 0, 0, 0)
        verify(session, 0, 5)
        assert window(session) == ()

    def test_after_the_draft_is_lost(self):
        """What is here is as good as before."""
        session = prepared()
        session.lose_draft()
        verify(session, 3, 20, 0, 0, 0)
        assert window(session) == (100, 101, 102)

    def test_not_after_the_end(self):
        session = prepared(after=(EOS,))
        verify(session, 3, EOS, 0, 0, 0)
        assert session.is_finished
        assert session.window_len == 0

    def test_never_beyond_what_may_be_proposed(self):
        """max_tokens 5: the last of them is the target's own."""
        session = streaming(max_tokens=5)
        session.receive_draft(branch((*PROMPT, 20), 100, 101, 102))
        with pytest.raises(RemoteProtocolError, match="beyond its limit 7"):
            session.receive_draft(branch((*PROMPT, 20), 100, 101, 102, 103))
        verify(session, 0, 20)
        assert window(session) == (100, 101, 102)
        assert verify(session, 9, 100, 101, 102, 103).delta.finish_reason == "length"

    def test_while_the_draft_rests(self):
        session = prepared()
        session.max_draft_ahead = 0
        assert verify(session, 3, 20, 0, 0, 0).verdict is None
        assert window(session) == (100, 101, 102)


class TestDead:
    @pytest.mark.parametrize("dies_by", ["empty_window", "reopen", "close"])
    def test_with_the_window(self, dies_by):
        session = prepared()
        if dies_by == "reopen":
            session.lose_draft()
        getattr(session, dies_by)()
        assert len(session.alternates) == 0

    def test_behind_what_is_committed(self):
        """A round that agrees leaves what may still come true, and only that."""
        session = prepared(after=(20,), then=(100, 101))
        session.receive_draft(branch((*PROMPT, 10, 11, 12, 23), 300, 301))
        verify(session, 2, 10, 11, 12)
        assert session.committed_len == 6
        assert len(session.alternates) == 2
        verify(session, 0, 23)
        assert window(session) == (300, 301)

    def test_all_others_with_a_correction(self):
        session = prepared()
        session.receive_draft(branch((*PROMPT, 10, 11, 22), 200))
        verify(session, 3, 20, 0, 0, 0)
        assert len(session.alternates) == 0

    @pytest.mark.parametrize("start", [4, 5])
    def test_too_late(self, start):
        """The target has gone another way at or before the place where the branch begins."""
        session = streaming()
        for token_id in (10, 11):
            verify(session, 0, token_id)
        context = (*PROMPT, 20, 30)[:start]
        late = branch(context, 100, 101, 102)
        assert session.receive_draft(late) is Disposition.STALE
        assert len(session.alternates) == 0

    def test_all_of_it_committed_meanwhile(self):
        session = streaming()
        for token_id in (20, 100, 101):
            verify(session, 0, token_id)
        assert session.receive_draft(branch((*PROMPT, 20), 100)) is Disposition.DUPLICATE
        assert session.receive_draft(branch((*PROMPT, 20), 7)) is Disposition.STALE
        assert session.receive_draft(branch((*PROMPT, 20), 100, 7, 8)) is Disposition.STALE

    def test_the_rest_of_one_that_is_half_committed(self):
        session = streaming()
        verify(session, 0, 20)
        session.receive_draft(draft((*PROMPT, 20), 50, last_round=1))
        message = branch((*PROMPT, 20), 100, 101)
        assert session.receive_draft(message) is Disposition.ALTERNATE
        verify(session, 1, 100, 0)
        assert window(session) == (101,)


class TestGoingOn:
    """The draft hears the verdict and goes on from the branch, as its own chain."""

    def test_behind_what_it_has_sent(self):
        session = prepared()
        verify(session, 3, 20, 0, 0, 0)
        more = draft((*PROMPT, 20, 100, 101, 102), 103, last_round=1)
        assert session.receive_draft(more) is Disposition.KEPT
        assert window(session) == (100, 101, 102, 103)

    def test_a_lost_part_is_a_gap(self):
        """Healed as any other: the Nack says where, and the draft sends it again."""
        session = prepared(then=(100,))
        verify(session, 3, 20, 0, 0, 0)
        more = draft((*PROMPT, 20, 100, 101, 102), 103, last_round=1)
        assert session.receive_draft(more) is Disposition.GAP
        assert Nack(7, 1, len(session.log)).have_len == 5
        again = draft((*PROMPT, 20, 100), 101, 102, 103, last_round=1)
        assert session.receive_draft(again) is Disposition.KEPT
        assert window(session) == (100, 101, 102, 103)

    def test_what_its_old_chain_still_sends_is_no_gap(self):
        session = prepared(then=(100,))
        verify(session, 3, 20, 0, 0, 0)
        assert session.receive_draft(draft((*PROMPT, 10, 11, 12), 13)) is Disposition.STALE
        assert session.receive_draft(draft((*PROMPT, 10), 11)) is Disposition.DIVERGED
        assert window(session) == (100,)

    def test_branches_of_its_old_chain_are_held_and_die(self):
        session = prepared()
        verify(session, 3, 20, 0, 0, 0)
        old = branch((*PROMPT, 10, 11, 12, 23), 300)
        assert session.receive_draft(old) is Disposition.ALTERNATE
        verify(session, 3, 100, 101, 102, 103)
        assert len(session.alternates) == 0

    def test_a_late_part_of_the_branch(self):
        session = prepared()
        verify(session, 3, 20, 0, 0, 0)
        late = branch((*PROMPT, 20, 100, 101, 102), 103)
        assert session.receive_draft(late) is Disposition.KEPT
        assert window(session) == (100, 101, 102, 103)

    def test_a_repeated_verdict_has_no_proposals(self):
        session = prepared()
        verify(session, 3, 20, 0, 0, 0)
        assert session.receive_nack(3).token_ids == (20,)


class TestBrokenRules:
    def test_nobody_asked_for_it(self):
        session = streaming(fan_out=0)
        with pytest.raises(RemoteProtocolError, match="a branch, and no fan-out was granted"):
            session.receive_draft(branch((*PROMPT, 20), 100))
        assert (session.window_len, len(session.alternates)) == (0, 0)

    @pytest.mark.parametrize("mode", LAWFUL)
    def test_never_in_the_rejection_modes(self, mode):
        session = streaming(mode=mode, fan_out=2)
        assert session.fan_out == 0
        with pytest.raises(RemoteProtocolError, match="no fan-out was granted"):
            session.receive_draft(branch((*PROMPT, 20), 100))

    def test_beyond_its_credit(self):
        session = streaming(ahead=4)
        assert session.receive_draft(branch((*PROMPT, 20), 100, 101, 102)) is (
            Disposition.ALTERNATE
        )
        with pytest.raises(RemoteProtocolError, match="beyond its limit 7"):
            session.receive_draft(branch((*PROMPT, 21), 100, 101, 102, 103))

    def test_about_the_prompt(self):
        with pytest.raises(RemoteProtocolError, match="draft at 2, opened at 3"):
            streaming().receive_draft(branch((1, 9), 100))

    def test_of_another_epoch(self):
        message = branch((*PROMPT, 20), 100, epoch=2)
        assert streaming().receive_draft(message) is Disposition.STALE_EPOCH


class TestFanOut:
    def test_it_is_told(self):
        session = streaming(fan_out=2)
        assert verify(session, 0, 10).verdict.fan_out == 2
        session.fan_out = 3
        assert verify(session, 0, 11).verdict.fan_out == 3
        session.lose_draft()
        assert session.reopen().fan_out == 3

    @pytest.mark.parametrize("mode", LAWFUL)
    def test_the_rejection_modes_have_none(self, mode):
        session = streaming(mode=mode, fan_out=2)
        session.lose_draft()
        assert session.reopen().fan_out == 0

    def test_one_that_was_granted_by_a_verdict(self):
        session = streaming(fan_out=0)
        session.fan_out = 1
        with pytest.raises(RemoteProtocolError):
            session.receive_draft(branch((*PROMPT, 20), 100))  # the draft cannot know yet
        verify(session, 0, 10)
        assert session.receive_draft(branch((*PROMPT, 10, 20), 100)) is Disposition.ALTERNATE

    def test_it_is_not_taken_back(self):
        """Branches that are under way when the policy thinks better of it are no crime."""
        session = prepared()
        session.fan_out = 0
        assert verify(session, 1, 10, 11).verdict.fan_out == 0
        late = branch((*PROMPT, 10, 11, 22), 200)
        assert session.receive_draft(late) is Disposition.ALTERNATE

    def test_a_new_draft_needs_a_grant_of_its_own(self):
        session = prepared()
        session.fan_out = 0
        session.lose_draft()
        session.reopen()
        assert session.link is LinkState.OPENING
        with pytest.raises(RemoteProtocolError, match="no fan-out was granted"):
            session.receive_draft(branch((*PROMPT, 20), 100, epoch=2))
