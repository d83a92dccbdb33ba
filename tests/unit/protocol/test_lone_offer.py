"""The lone wait against proposals that the target has at hand, by hand.

Acceptance .7, K = 4, pass 10 ms, draft token 1 ms: a chain commits 3.333 tokens; with a wait for
three it takes 12.886 + 3 ms (.2098 tokens/ms), the full one 12.020. A start at once with an offer
of which e are expected right goes on with f = .7 - .21 e: (1 + e + 3.333 f) / (10 + 12.020 f).
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.protocol.lone_wait import LocalOffer, LonePolicy, WindowOutlook, even_chain

MS = 1000


def waits(offer, *, have=0, want=4, acceptance=0.7, row_us=0.0, token_us=1 * MS):
    policy = LonePolicy(50 * MS)
    policy.pass_us.value, policy.draft_token_us.value = 10 * MS, token_us
    policy.row_us = row_us
    return policy.wait_until(WindowOutlook(have, want, 0, False, offer), acceptance, 0) > 0


@pytest.mark.parametrize(
    ("expected", "is_worth_a_wait"),
    [(0.0, True), (0.5, True), (0.55, True), (0.6, False), (1.0, False)],
)
def test_a_wait_must_gain_more_than_what_is_at_hand(expected, is_worth_a_wait):
    """.2031 at .5, .2055 at .55, .2079 at .6: only that is, with 2 % more, over .2098."""
    assert waits(LocalOffer(1, expected)) is is_worth_a_wait


def test_without_an_offer_it_waits():
    assert waits(None)


def test_the_rows_of_an_offer_cost():
    assert not waits(LocalOffer(1, 1.0), row_us=300.0)
    assert waits(LocalOffer(12, 1.0), row_us=300.0)


def test_what_the_window_has_is_weighed_beside_it():
    """Three are here, and the fourth is not worth its wait, whatever is at hand."""
    assert waits(LocalOffer(1, 0.1), have=0)
    assert not waits(LocalOffer(1, 0.1), have=3)


@given(
    acceptance=st.floats(0.05, 1.0),
    token_us=st.integers(100, 12 * MS),
    row_us=st.floats(0.0, 2.0 * MS),
    have=st.integers(0, 3),
    more=st.integers(1, 16),
)
@example(acceptance=0.7, token_us=1 * MS, row_us=0.0, have=2, more=14)
@example(acceptance=0.8, token_us=2 * MS, row_us=0.0, have=0, more=8)
@example(acceptance=0.95, token_us=7 * MS, row_us=0.0, have=1, more=15)
def test_a_better_offer_never_makes_it_wait(have, more, **asked):
    """Neither when it overtakes the draft, nor when it becomes better than a start without it."""
    waited = [
        waits(LocalOffer(8, e / 20), have=have, want=have + more, **asked) for e in range(161)
    ]
    assert waited == sorted(waited, reverse=True)


class TestRate:
    """a = 1/2, K = 2, pass 12, in full windows of 1."""

    def rate(self, expected, num_come):
        return even_chain(0.5, 2, 12.0).offered_rate(LocalOffer(3, expected), num_come, 1)

    def test_a_draft_that_is_overtaken_brings_nothing_to_the_next_pass(self):
        """Two tokens are committed and one is here: the chain ends with the pass."""
        assert self.rate(1.0, 1) == pytest.approx(2 / 12)

    def test_a_draft_that_keeps_up_goes_on(self):
        """Right about both: .25; a pass with none, then 2/3 of one with one (1.5 tokens)."""
        assert self.rate(1.0, 2) == pytest.approx((2 + 0.25 * 2) / (12 + 0.25 * 20))

    def test_between_two_whole_numbers_it_is_a_mix_of_them(self):
        """Of a pass that goes on, see above, and one that commits 3 in 12."""
        assert self.rate(1.5, 2) == pytest.approx((0.5 * 2.5 + 0.5 * 3) / (0.5 * 17 + 0.5 * 12))

    def test_more_that_is_right_is_never_worth_less(self):
        """Three are here at the end: a fourth token that is right would end the chain."""
        chain = even_chain(0.95, 16, 10.0)
        rates = [chain.offered_rate(LocalOffer(8, e / 10), 3, 16) for e in range(81)]
        assert rates == sorted(rates)
        assert rates[20] == rates[30] > 4 / 10
        assert rates[80] == pytest.approx(9 / 10)

    def test_more_than_the_chain_knows_of_ends_it(self):
        assert self.rate(9.0, 50) == pytest.approx(10 / 12)

    def test_an_offer_of_nothing_is_a_plain_pass(self):
        chain = even_chain(0.7, 4, 10.0)
        assert chain.offered_rate(LocalOffer(0, 0.0), 10, 4) == pytest.approx(
            chain.rate(0, 4, 4, 0.0)
        )
