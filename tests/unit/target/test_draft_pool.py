"""Which draft takes a sequence, and what is queued for it."""

import pytest

from paceline.config import RpcConfig
from paceline.protocol.draft_table import SUPPORTED_MODES
from paceline.protocol.messages import (
    MAX_BRANCH_TOKENS,
    CloseReason,
    CloseSession,
    Hello,
    OpenSession,
    Verdict,
)
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.draft_pool import (
    ALLOWANCE_FLOOR,
    ANSWERS_EXTRA,
    ANSWERS_PER_POSITION,
    DraftPool,
    max_answers,
)

CONFIG = RpcConfig(max_remote_errors=3)
GREEDY, COUPLED = VerificationMode.GREEDY, VerificationMode.COUPLED


def hello(*, max_sessions=8, modes=SUPPORTED_MODES):
    return Hello(1, "b", "d", "toy", 64, "", 512, max_sessions, modes)


def message(number):
    return CloseSession(number, 1, CloseReason.FINISHED)


@pytest.fixture
def pool():
    made = DraftPool(CONFIG)
    for link_id in (1, 2):
        made.attach(link_id, hello())
    return made


class TestChoose:
    def test_nobody(self):
        assert DraftPool(CONFIG).choose(GREEDY, 0) is None

    def test_the_first_of_equals(self, pool):
        assert pool.choose(GREEDY, 0) == 1

    def test_the_least_loaded(self, pool):
        pool.get(1).sessions.update({5, 6})
        pool.get(2).sessions.add(7)
        assert pool.choose(GREEDY, 0) == 2

    def test_avoid(self, pool):
        pool.get(2).sessions.update({5, 6})
        assert pool.choose(GREEDY, 0, avoid=1) == 2

    def test_avoid_is_the_last_resort(self, pool):
        pool.detach(2)
        assert pool.choose(GREEDY, 0, avoid=1) == 1

    def test_a_context_too_short_for_the_sequence(self, pool):
        assert pool.choose(GREEDY, 0, length=511) == 1
        assert pool.choose(GREEDY, 0, length=512) is None

    def test_draining(self, pool):
        pool.get(1).is_draining = True
        assert pool.choose(GREEDY, 0) == 2
        pool.get(2).is_draining = True
        assert pool.choose(GREEDY, 0) is None

    def test_busy_for_a_while(self, pool):
        pool.get(1).busy_until_us = 100
        assert [pool.choose(GREEDY, now) for now in (0, 99, 100)] == [2, 2, 1]

    def test_full(self):
        pool = DraftPool(CONFIG)
        pool.attach(1, hello(max_sessions=2))
        pool.get(1).sessions.add(5)
        assert pool.choose(GREEDY, 0) == 1
        pool.get(1).sessions.add(6)
        assert pool.choose(GREEDY, 0) is None

    def test_modes(self):
        pool = DraftPool(CONFIG)
        pool.attach(1, hello(modes=(GREEDY,)))
        pool.attach(2, hello(modes=(COUPLED,)))
        assert [pool.choose(mode, 0) for mode in (GREEDY, COUPLED)] == [1, 2]
        assert pool.choose(VerificationMode.BLOCK, 0) is None


class TestLinks:
    def test_detach_returns_what_it_served(self, pool):
        pool.get(1).sessions.update({5, 6})
        assert pool.detach(1) == {5, 6}
        assert len(pool) == 1
        assert pool.get(1) is None
        assert pool.detach(1) == set()
        assert list(pool.links()) == [2]

    def test_release(self, pool):
        pool.get(1).sessions.update({5, 6})
        pool.release(1, 5)
        pool.release(1, 99)
        pool.release(None, 6)
        pool.release(9, 6)
        assert pool.get(1).sessions == {6}

    def test_strikes(self, pool):
        pool.strike(9)
        for _ in range(2):
            pool.strike(1)
        assert pool.take_outlaws() == []
        pool.strike(1)
        assert pool.take_outlaws() == [1]


class TestOutbox:
    def test_in_order_per_link_and_once(self, pool):
        pool.send(2, message(1))
        pool.send(1, message(2))
        pool.send(2, message(3))
        assert pool.take_outbox() == {1: [message(2)], 2: [message(1), message(3)]}
        assert pool.take_outbox() == {}

    def test_to_nobody(self, pool):
        pool.send(None, message(1))
        pool.send(9, message(1))
        assert pool.take_outbox() == {}

    def test_what_was_taken_does_not_grow(self, pool):
        pool.send(1, message(1))
        taken = pool.take_outbox()
        pool.send(1, message(2))
        assert taken == {1: [message(1)]}


def verdict(credit, fan_out=0):
    return Verdict(1, 1, 5, (10, 11), 1, 7 + credit, 1, fan_out=fan_out)


def opening(credit, fan_out=0):
    tokens = (1, 2, 3)
    return OpenSession(1, 1, 2, tokens, SamplingParams(), GREEDY, 3 + credit, fan_out=fan_out)


class TestAllowance:
    """What an honest draft may answer: each position of the credit that the message states, and
    each token of the branches that it allows, in a message of its own, twice over."""

    @pytest.mark.parametrize("make", [verdict, opening])
    @pytest.mark.parametrize(
        ("credit", "fan_out", "num_tokens"),
        [
            (0, 0, 0),
            (16, 0, 16),
            (256, 0, 256),
            (4, 1, 4 + 4 * 4),
            (4, 3, 4 + 4 * 3 * 4),
            (0, 4, 0),
            (16, 4, 16 + MAX_BRANCH_TOKENS),
            (256, 4, 256 + MAX_BRANCH_TOKENS),
        ],
    )
    def test_of_one_message(self, make, credit, fan_out, num_tokens):
        expected = ANSWERS_PER_POSITION * num_tokens + ANSWERS_EXTRA
        assert max_answers(make(credit, fan_out)) == expected

    def test_a_credit_that_lies_behind_the_text(self):
        assert max_answers(verdict(-3)) == ANSWERS_EXTRA

    def spent(self, pool):
        count = 0
        while pool.spend(1):
            count += 1
        return count

    def test_an_honest_draft_with_branches_is_no_flood(self, pool):
        """32 sequences, and all that each verdict may bring back comes, in single tokens."""
        pool.get(1).sessions.update(range(32))
        for _ in range(3):
            for _ in range(32):
                pool.send(1, verdict(16, 4), grants=True)
            assert all(pool.spend(1) for _ in range(32 * (16 + MAX_BRANCH_TOKENS)))
        assert pool.get(1).strikes == 0

    def test_but_it_has_an_end(self, pool):
        pool.get(1).sessions.update(range(32))
        for _ in range(32 * 100):
            pool.send(1, verdict(16, 4), grants=True)
        assert self.spent(pool) == 32 * 2 * max_answers(verdict(16, 4))
        assert pool.get(1).strikes == 1

    def test_a_smaller_credit_takes_nothing_away(self, pool):
        """What was sent under the larger one may be on its way."""
        pool.get(1).sessions.update(range(32))
        for _ in range(64):
            pool.send(1, verdict(16, 4), grants=True)
        before = pool.get(1).allowance
        pool.send(1, verdict(0), grants=True)
        assert pool.get(1).allowance >= before
        assert self.spent(pool) >= before

    def test_without_branches_it_is_as_small_as_ever(self, pool):
        pool.get(1).sessions.update(range(32))
        for _ in range(1000):
            pool.send(1, verdict(16), grants=True)
        assert self.spent(pool) == max(ALLOWANCE_FLOOR, 32 * 2 * (2 * 16 + ANSWERS_EXTRA))

    def test_an_answer_grants_nothing(self, pool):
        for _ in range(1000):
            pool.send(1, verdict(16, 4))
        assert self.spent(pool) == ALLOWANCE_FLOOR
