"""The lone wait against proposals that the target has at hand, by hand.

Acceptance .7, K = 4, pass 10 ms, draft token 1 ms: a chain commits 3.333 tokens; with a wait for
three it takes 12.886 + 3 ms (.2098 tokens/ms), the full one 12.020. A start at once with an offer
of which e are expected right goes on with f = .7 - .21 e: (1 + e + 3.333 f) / (10 + 12.020 f).
"""

import pytest

from paceline.protocol.lone_wait import LocalOffer, LonePolicy, WindowOutlook, even_chain

MS = 1000


def waits(offer, *, have=0, row_us=0.0, token_us=1 * MS):
    policy = LonePolicy(50 * MS)
    policy.pass_us.value, policy.draft_token_us.value = 10 * MS, token_us
    policy.row_us = row_us
    return policy.wait_until(WindowOutlook(have, 4, 0, False, offer), 0.7, 0) > 0


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

    def test_more_than_the_chain_knows_of_ends_it(self):
        assert self.rate(9.0, 50) == pytest.approx(10 / 12)

    def test_an_offer_of_nothing_is_a_plain_pass(self):
        chain = even_chain(0.7, 4, 10.0)
        assert chain.offered_rate(LocalOffer(0, 0.0), 10, 4) == pytest.approx(
            chain.rate(0, 4, 4, 0.0)
        )
