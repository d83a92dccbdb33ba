"""The lone wait in numbers computed by hand: the wait plus the passes of one chain is minimised.

Passes of a chain: 1 + r, r(count) = a^(count+1) / (1 - a^(full+1)); full = min(want, pass / token).
A wait must shorten the chain by more than 2 %. Times in ms; the pass takes 10 unless said.
"""

import pytest

from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.lone_wait import (
    AcceptanceEstimate,
    Average,
    LonePolicy,
    WindowOutlook,
    even_chain,
)

MS = 1000


def policy(*, max_wait_us=50 * MS, pass_us=10 * MS, token_us=1 * MS, arrival_us=None, rtt_us=None):
    made = LonePolicy(max_wait_us)
    made.pass_us.value, made.rtt_us.value = pass_us, rtt_us
    made.draft_token_us.value, made.arrival_us.value = token_us, arrival_us
    return made


def outlook(have=0, want=4, since_us=0, is_flushed=False):
    return WindowOutlook(have, want, since_us, is_flushed)


class TestChain:
    """Whatever it starts with, a chain commits 1 / (1 - a) tokens: 2 at a = 1/2."""

    @pytest.mark.parametrize(
        ("count", "full", "passes"),
        [(0, 1, 5 / 3), (1, 1, 4 / 3), (1, 2, 9 / 7), (0, 2, 11 / 7)],
    )
    def test_passes(self, count, full, passes):
        """a = 1/2: .5/.75, .25/.75, .25/.875 and .5/.875 more than one."""
        rate = even_chain(0.5, 2, 12.0).rate(count, full, full, 0.0)
        assert rate == pytest.approx(2 / (12 * passes))

    def test_the_wait_is_paid_once(self):
        rate = even_chain(0.5, 1, 12.0).rate(1, 1, 1, 7.0)
        assert rate == pytest.approx(2 / (16 + 7))

    def test_the_second_pass_may_find_less_than_those_behind_it(self):
        """None: 1 + 1/2 (1 + 1/2 / .75) passes."""
        rate = even_chain(0.5, 1, 12.0).rate(0, 0, 1, 0.0)
        assert rate == pytest.approx(2 / (12 * 11 / 6))

    def test_rows_cost(self):
        """A pass with one proposal takes 12 + 3; 1 + 1/3 of them."""
        rate = even_chain(0.5, 1, 12.0, 3.0).rate(1, 1, 1, 0.0)
        assert rate == pytest.approx(2 / (15 * 4 / 3))

    def test_a_draft_that_never_errs_has_a_finite_chain(self):
        """51 passes, as at .98 for all of a window; each commits 5."""
        rate = even_chain(1.0, 4, 10.0).rate(4, 4, 4, 0.0)
        assert rate == pytest.approx(0.5)

    def test_a_draft_that_always_errs(self):
        assert even_chain(0.0, 4, 10.0).rate(3, 4, 4, 0.0) == pytest.approx(0.1)


class TestAcceptanceEstimate:
    def test_prior(self):
        assert AcceptanceEstimate().rate == pytest.approx(0.7)

    def test_a_plain_round_teaches_nothing(self):
        estimate = AcceptanceEstimate(3.0, 2.0)
        estimate.update(0, 0)
        assert (estimate.accepted, estimate.rejected) == (3.0, 2.0)

    def test_a_change_is_believed_at_once(self):
        """Else 48 right ones would be half forgotten after 15 rounds."""
        estimate = AcceptanceEstimate()
        for _ in range(30):
            estimate.update(8, 8)
        for _ in range(5):
            estimate.update(4, 0)
        assert estimate.rate < 0.65
        for _ in range(60):
            estimate.update(1, 0)
        for _ in range(4):
            estimate.update(2, 2)
        assert estimate.rate > 0.5

    def test_chance_is_no_change(self):
        estimate = AcceptanceEstimate()
        for number in range(60):
            estimate.update(4, (4, 3, 2, 4, 1)[number % 5])
            assert estimate.accepted + estimate.rejected >= min(2 * number, 16)

    def test_full_acceptance_is_censored(self):
        """After 4 of 4 nobody knows about the fifth: no rejection is counted."""
        estimate = AcceptanceEstimate()
        estimate.update(4, 4)
        assert (estimate.accepted, estimate.rejected) == (4.0, 0.0)
        assert estimate.rate == pytest.approx((4 + 6 * 0.7) / (4 + 6))

    def test_one_rejection_hides_the_rest(self):
        """1 of 4: one accepted, one rejected; positions 3 and 4 were never reached."""
        estimate = AcceptanceEstimate()
        estimate.update(4, 1)
        assert (estimate.accepted, estimate.rejected) == (1.0, 1.0)

    def test_half_of_what_was_seen_is_gone_after_15_rounds(self):
        estimate = AcceptanceEstimate(8.0, 4.0)
        for _ in range(15):
            estimate.update(1, 0)
        assert estimate.accepted == pytest.approx(4.0)

    def test_long_windows_do_not_make_it_slow(self):
        """16 of 16 for ever are 48 positions at most: four rejections in a row are seen."""
        estimate = AcceptanceEstimate()
        for _ in range(100):
            estimate.update(16, 16)
        assert estimate.accepted + estimate.rejected == pytest.approx(48)
        for _ in range(4):
            estimate.update(16, 0)
        assert estimate.rate < 0.9

    def test_the_mean_of_the_class_is_where_a_sequence_starts(self):
        assert AcceptanceEstimate(prior=0.2).rate == pytest.approx(0.2)


class TestAverage:
    def test_first_sample_is_taken_whole(self):
        average = Average()
        assert average.value is None
        average.update(10.0)
        assert average.value == 10.0

    def test_later_samples_by_weight(self):
        average = Average(10.0)
        average.update(20.0)
        assert average.value == pytest.approx(12.0)
        zero = Average(0.0)
        zero.update(5.0)
        assert zero.value == pytest.approx(1.0)


class TestNoWait:
    @pytest.mark.parametrize(
        "made",
        [policy(max_wait_us=0), policy(pass_us=None), policy(token_us=None)],
        ids=["switched off", "no pass yet", "no draft yet"],
    )
    def test_unknown_costs(self, made):
        assert made.wait_until(outlook(), 0.9, 7) == 7

    @pytest.mark.parametrize("have", [4, 5])
    def test_the_window_is_full(self, have):
        assert policy().wait_until(outlook(have=have), 0.9, 7) == 7

    def test_the_credit_is_used_up(self):
        assert policy().wait_until(outlook(want=0), 0.9, 7) == 7

    def test_break_even(self):
        """a = .5, full 1: 16.667 / 1.02 = 16.3399 against 13.3333 + w: w must be < 3.0065."""
        made = policy(token_us=5 * MS)
        assert made.wait_until(outlook(want=1), 0.5, 1993) == 1993

    def test_a_pass_pays_but_a_chain_does_not(self):
        """a = .7, token 4, full 2: one pass has 1.7 / 14 > 1 / 10; the chains take
        20.65 against 17.458 + 4, 15.221 + 8, ...: a pass at once loses less than it gains."""
        assert policy(token_us=4 * MS).wait_until(outlook(), 0.7, 0) == 0

    def test_a_hopeless_draft(self):
        assert policy().wait_until(outlook(), 0.0, 0) == 0

    def test_proposals_that_are_due_already(self):
        """since + 4 tokens lies in the past: the wait is 0, so the pass starts."""
        assert policy().wait_until(outlook(since_us=0), 0.9, 4 * MS) == 4 * MS


class TestWait:
    def test_just_below_break_even(self):
        """w = 3.006, see above. Margin: a quarter plus 200 us."""
        made = policy(token_us=5 * MS)
        assert made.wait_until(outlook(want=1), 0.5, 1994) == 1994 + int(3006 * 1.25) + 200

    def test_the_best_count_wins(self):
        """a = .8: 21.899, 20.519, 19.615, 19.092, 18.874: wait for all four."""
        assert policy().wait_until(outlook(), 0.8, 0) == 4 * MS * 5 // 4 + 200

    def test_fewer_when_the_tail_does_not_pay(self):
        """a = .6: 16.506, 14.904, 14.342, 14.405, 14.843: wait for two."""
        assert policy().wait_until(outlook(), 0.6, 0) == 2 * MS * 5 // 4 + 200

    def test_a_slow_draft_leaves_the_next_window_empty(self):
        """a = .5, token 6, 2.5 left. A pass at once sees it and the next come: 16.667 for the
        chain. After a wait of 2.5 only one comes, and the pass makes that itself: 14.167 + 2.5.
        Were the draft as far after the wait, that would be 13.333 + 2.5."""
        made = policy(token_us=6 * MS)
        assert made.wait_until(outlook(), 0.5, 3500) == 3500

    def test_rows_that_cost_make_a_wait_pay_less(self):
        """a = .6 for two tokens, see above; with rows of a fifth of a pass for one."""
        made = policy()
        made.row_us = 2 * MS
        assert made.wait_until(outlook(), 0.6, 0) == 1250 + 200
        assert made.last_count == 1

    def test_hazards_of_positions(self):
        """All the same up to the second proposal, and nothing behind it: wait for two of four."""
        right = (0.9, 0.8, 0.02, 0.0, 0.0, 0.0)
        sums = (0.0, 0.9, 1.7, 1.72, 1.72, 1.72, 1.72)
        survivals = Survivals(tuple(-value for value in right), sums, 0.5)
        made = policy()
        assert made.wait_until(outlook(), 0.9, 0, survivals) == 2500 + 200
        assert made.last_count == 2

    def test_but_one_token_at_least(self):
        """a = .5, token 12, 4 left. full 1: 17.33 > 16.34. Were it 0: 19 < 20 / 1.02."""
        assert policy(token_us=12 * MS).wait_until(outlook(want=1), 0.5, 8 * MS) == 8 * MS

    def test_what_is_here_need_not_be_waited_for(self):
        """have 1 of want 2, a = .9, full 2: 39.889 / 1.02 against 36.9 + 1: one more, 1 ms."""
        assert policy().wait_until(outlook(have=1, want=2), 0.9, 0) == 1250 + 200

    def test_what_is_here_raises_the_bar(self):
        """a = .5, token 2: from 0, 13.333 + 2 < 16.340; from 1, 11.429 + 2 > 12.605."""
        made = policy(token_us=2 * MS)
        assert made.wait_until(outlook(have=0, want=1), 0.5, 0) == 2500 + 200
        assert made.wait_until(outlook(have=1, want=2), 0.5, 0) == 0

    def test_time_already_passed_counts(self):
        """Draft started at 0, now 0.4 ms: the one token is 0.6 ms away."""
        made = policy()
        assert made.wait_until(outlook(want=1), 0.9, 400) == 400 + 750 + 200

    def test_a_round_trip_is_due_only_after_a_flush(self):
        """And then half a token more, for the pass that the correction interrupts."""
        made = policy(rtt_us=1 * MS)
        assert made.wait_until(outlook(want=1), 0.9, 0) == 1250 + 200
        assert made.wait_until(outlook(want=1, is_flushed=True), 0.9, 0) == 2500 * 5 // 4 + 200

    def test_unknown_round_trip_is_zero(self):
        assert policy().wait_until(outlook(want=1, is_flushed=True), 0.9, 0) == 1875 + 200

    def test_a_long_trip_does_not_pay(self):
        """a = .5: w must be < 3.0065; it is the trip + 1.5."""
        short, long = policy(rtt_us=1500), policy(rtt_us=1510)
        assert short.wait_until(outlook(want=1, is_flushed=True), 0.5, 0) == 3750 + 200
        assert long.wait_until(outlook(want=1, is_flushed=True), 0.5, 0) == 0

    @pytest.mark.parametrize(("token_us", "arrival_us"), [(MS, 2 * MS), (2 * MS, MS), (None, 2000)])
    def test_the_slower_of_draft_and_arrivals_counts(self, token_us, arrival_us):
        made = policy(token_us=token_us, arrival_us=arrival_us)
        assert made.wait_until(outlook(want=1), 0.9, 0) == 2500 + 200

    def test_the_cap_excludes_longer_waits(self):
        """a = .8: four tokens would be best, but only 2 of them lie within a cap of 2.1 ms."""
        assert policy(max_wait_us=2100).wait_until(outlook(), 0.8, 0) == 2100

    def test_the_cap_excludes_all(self):
        assert policy(max_wait_us=999).wait_until(outlook(), 0.9, 0) == 0


class TestProbing:
    def test_waits_that_keep_missing_are_tried_one_time_in_16(self):
        made = policy()
        for _ in range(4):  # 0.8^4 = .4096 < .5
            made.record_wait(hit=False)
        waits = [made.wait_until(outlook(), 0.9, 0) > 0 for _ in range(48)]
        assert waits == ([False] * 15 + [True]) * 3

    def test_three_misses_are_forgiven(self):
        made = policy()
        for _ in range(3):
            made.record_wait(hit=False)
        assert made.wait_until(outlook(), 0.9, 0) > 0

    def test_hits_restore_trust(self):
        """.4096 + .2 * (1 - .4096) = .52768 >= .5"""
        made = policy()
        for _ in range(4):
            made.record_wait(hit=False)
        made.record_wait(hit=True)
        assert made.wait_until(outlook(), 0.9, 0) > 0

    def test_a_full_window_uses_up_no_probe(self):
        made = policy()
        for _ in range(4):
            made.record_wait(hit=False)
        for _ in range(15):
            made.wait_until(outlook(have=4), 0.9, 0)
        assert [made.wait_until(outlook(), 0.9, 0) > 0 for _ in range(16)] == [False] * 15 + [True]
