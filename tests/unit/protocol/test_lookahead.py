"""The lone wait in numbers computed by hand: E(count) / (pass time + wait) is maximised."""

from fractions import Fraction

import pytest

from paceline.protocol.lookahead import (
    AcceptanceEstimate,
    Average,
    LonePolicy,
    WindowOutlook,
    expected_tokens,
)

MS = 1000


def policy(*, max_wait_us=50 * MS, pass_us=10 * MS, token_us=1 * MS, rtt_us=None):
    made = LonePolicy(max_wait_us)
    made.pass_us.value, made.draft_token_us.value, made.rtt_us.value = pass_us, token_us, rtt_us
    return made


def outlook(have=0, want=4, since_us=0, is_flushed=False):
    return WindowOutlook(have, want, since_us, is_flushed)


@pytest.mark.parametrize("count", range(6))
def test_expected_tokens_is_the_geometric_sum(count):
    rate = Fraction(3, 4)
    assert expected_tokens(rate, count) == (1 - rate ** (count + 1)) / (1 - rate)


def test_expected_tokens_at_the_ends():
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0


class TestAcceptanceEstimate:
    def test_prior(self):
        assert AcceptanceEstimate().rate == pytest.approx(0.7)

    def test_a_plain_round_teaches_nothing(self):
        estimate = AcceptanceEstimate(3.0, 2.0)
        estimate.update(0, 0)
        assert (estimate.accepted, estimate.rejected) == (3.0, 2.0)

    def test_full_acceptance_is_censored(self):
        """After 4 of 4 nobody knows about the fifth: no rejection is counted."""
        estimate = AcceptanceEstimate()
        estimate.update(4, 4)
        assert (estimate.accepted, estimate.rejected) == (4.0, 0.0)
        assert estimate.rate == pytest.approx((4 + 2.8) / (4 + 4))

    def test_one_rejection_hides_the_rest(self):
        """1 of 4: one accepted, one rejected; positions 3 and 4 were never reached."""
        estimate = AcceptanceEstimate()
        estimate.update(4, 1)
        assert (estimate.accepted, estimate.rejected) == (1.0, 1.0)

    def test_old_rounds_fade(self):
        estimate = AcceptanceEstimate(10.0, 5.0)
        estimate.update(2, 1)
        assert estimate.accepted == pytest.approx(10.0)
        assert estimate.rejected == pytest.approx(5.5)


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

    def test_a_token_that_costs_what_it_brings(self):
        """E(1)/(10 + w) > 1/10 iff w < 10 * 0.5: at exactly 5 ms nothing is gained."""
        assert policy(token_us=5 * MS).wait_until(outlook(want=1), 0.5, 0) == 0

    def test_a_hopeless_draft(self):
        assert policy().wait_until(outlook(), 0.0, 0) == 0

    def test_proposals_that_are_due_already(self):
        """since + 4 tokens lies in the past: the wait is 0, so the pass starts."""
        assert policy().wait_until(outlook(since_us=0), 0.9, 4 * MS) == 4 * MS


class TestWait:
    def test_just_below_break_even(self):
        """w = 4.999 ms: (1.5 / 14.999 ms) > (1 / 10 ms). Margin: a quarter plus 200 us."""
        made = policy(token_us=4999)
        assert made.wait_until(outlook(want=1), 0.5, 0) == int(4999 * 1.25) + 200

    def test_the_best_count_wins(self):
        """pass 10, token 2, a = .8: rates .1, .15, .1743, .1845, .18676: wait for all four."""
        assert policy(token_us=2 * MS).wait_until(outlook(), 0.8, 0) == 8 * MS * 5 // 4 + 200

    def test_fewer_when_the_tail_does_not_pay(self):
        """pass 10, token 3, a = .6: rates .1, .1231, .1225, ...: wait for one."""
        assert policy(token_us=3 * MS).wait_until(outlook(), 0.6, 0) == 3 * MS * 5 // 4 + 200

    def test_what_is_here_need_not_be_waited_for(self):
        """have 1 of want 2: 1.9/10 against 2.71/(10 + 1): one more token, 1 ms."""
        assert policy().wait_until(outlook(have=1, want=2), 0.9, 0) == 1250 + 200

    def test_what_is_here_raises_the_bar(self):
        """a = .5, token 3: from 0, (1.5/13) > .1; from 1, (1.75/13) < (1.5/10)."""
        made = policy(token_us=3 * MS)
        assert made.wait_until(outlook(have=0, want=1), 0.5, 0) == 3750 + 200
        assert made.wait_until(outlook(have=1, want=2), 0.5, 0) == 0

    def test_time_already_passed_counts(self):
        """Draft started at 0, now 0.4 ms: the one token is 0.6 ms away."""
        made = policy()
        assert made.wait_until(outlook(want=1), 0.9, 400) == 400 + 750 + 200

    def test_a_round_trip_is_due_only_after_a_flush(self):
        made = policy(rtt_us=2 * MS)
        assert made.wait_until(outlook(want=1), 0.9, 0) == 1250 + 200
        assert made.wait_until(outlook(want=1, is_flushed=True), 0.9, 0) == 3750 + 200

    def test_unknown_round_trip_is_zero(self):
        assert policy().wait_until(outlook(want=1, is_flushed=True), 0.9, 0) == 1250 + 200

    def test_a_long_trip_does_not_pay(self):
        """a = .5: 5 ms is the break-even of one token, 4 ms trip + 1 ms draft reaches it."""
        made = policy(rtt_us=4 * MS)
        assert made.wait_until(outlook(want=1, is_flushed=True), 0.5, 0) == 0

    def test_the_cap_excludes_longer_waits(self):
        """Four tokens would be best (10.2 ms), but only 2 of them lie within a cap of 4.1 ms."""
        made = policy(token_us=2 * MS, max_wait_us=4100)
        assert made.wait_until(outlook(), 0.8, 0) == 4100

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
