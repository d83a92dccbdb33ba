"""The ledger and its breaker: passes of known speed, virtual time."""

import itertools
import random

import pytest

from paceline.errors import LocalProtocolError
from paceline.protocol.profit import (
    CONTROL_PASSES,
    FIRST_CONTROL,
    MAX_INTERVAL,
    MAX_PAUSE_US,
    MIN_INTERVAL,
    MIN_PAUSE_US,
    TRANSITIONS,
    Deal,
    DealEvent,
    DealState,
    Profit,
    next_state,
)

PASS_US = 25_000


class Bench:
    """Passes of one sequence: `gain` times the tokens per second while drafting."""

    def __init__(self, gain, *, noise=0.0, tokens=2.0, settle_us=0.0):
        self.deal, self.gain, self.noise, self.tokens = Deal(), gain, noise, tokens
        self.settle_us = settle_us
        self.now_us, self.rng = 0, random.Random(1)
        self.states = []
        self.num_resting = 0

    def one(self, is_drafting=True):
        resting = self.deal.is_resting
        us = PASS_US * (1 + self.noise * self.rng.uniform(-1, 1))
        tokens = 1.0 if resting or not is_drafting else self.tokens
        if not resting and is_drafting:
            us *= self.tokens / self.gain
            tokens *= 1 + self.noise * self.rng.uniform(-1, 1)
        self.now_us += int(us)
        self.num_resting += resting
        self.deal.record(tokens, us, self.now_us, is_drafting and not resting, self.settle_us)
        self.states.append(self.deal.state)

    def passes(self, count, is_drafting=True):
        for _ in range(count):
            self.one(is_drafting)
        return self

    def seconds(self, count):
        end_us = self.now_us + 1e6 * count
        while self.now_us < end_us:
            self.one()
        return self


class TestTable:
    @pytest.mark.parametrize(("state", "event"), list(itertools.product(DealState, DealEvent)))
    def test_all_moves(self, state, event):
        if (state, event) in TRANSITIONS:
            assert next_state(state, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(LocalProtocolError):
                next_state(state, event)

    def test_every_state_is_reached_and_left(self):
        assert set(TRANSITIONS.values()) == set(DealState)
        assert {state for state, _ in TRANSITIONS} == set(DealState)


class TestLosing:
    def test_found_within_40_passes(self):
        bench = Bench(0.8).passes(40)
        assert bench.deal.state is DealState.OPEN

    def test_found_through_noise(self):
        assert DealState.OPEN in Bench(0.8, noise=0.3).passes(200).states

    def test_off_for_five_seconds_then_tried(self):
        bench = Bench(0.8).passes(40)
        opened_us = bench.deal.retry_us - MIN_PAUSE_US
        bench.seconds(4.5)
        assert bench.deal.state is DealState.OPEN
        bench.seconds(1)
        assert bench.deal.state is DealState.HALF_OPEN
        assert opened_us < 1_500_000

    def test_the_pause_doubles_up_to_five_minutes(self):
        bench = Bench(0.8).passes(40)
        pauses = set()
        for _ in range(9):
            pauses.add(bench.deal.pause_us)
            bench.now_us = bench.deal.retry_us
            bench.passes(100)
        assert sorted(pauses) == [
            *(MIN_PAUSE_US << i for i in range(6)),
            MAX_PAUSE_US,
        ]

    def test_what_is_lost_in_a_minute_is_little(self):
        """30 % slower while it drafts: over a minute less than 2 % in all."""
        bench = Bench(0.7).seconds(60)
        tokens = sum(
            1.0 if resting else 0.7
            for resting in (state is DealState.OPEN for state in bench.states)
        )
        assert tokens / len(bench.states) > 0.98

    def test_one_that_recovers_drafts_again(self):
        bench = Bench(0.8).passes(40)
        bench.gain = 1.3
        bench.seconds(8)
        assert bench.deal.state in (DealState.DRAFTING, DealState.CONTROL)

    def test_one_that_falls_again_soon_goes_on_doubling(self):
        bench = Bench(0.8).passes(40)
        bench.gain = 1.3
        bench.seconds(8)
        bench.gain = 0.7
        bench.passes(1000)
        assert bench.deal.state is DealState.OPEN
        assert bench.deal.pause_us >= 2 * MIN_PAUSE_US

    def test_one_that_turns_bad_is_found(self):
        """The last comparison was with better days: it is repeated at once."""
        bench = Bench(1.5).passes(3000)
        assert bench.deal.state is not DealState.OPEN
        bench.gain = 0.8
        bench.passes(500)
        assert bench.deal.state is DealState.OPEN


class TestPaying:
    @pytest.mark.parametrize("seed", range(5))
    def test_noise_does_not_open_it(self, seed):
        """Tokens of a pass from 1 to 5 by chance; it gains a tenth."""
        bench = Bench(1.1, noise=0.8, tokens=3.0)
        bench.rng.seed(seed)
        bench.passes(4000)
        assert DealState.OPEN not in bench.states

    def test_neither_does_a_pause_of_the_process(self):
        bench = Bench(1.2).passes(10)
        bench.deal.record(2.0, 20 * PASS_US, bench.now_us, True, 0.0)
        bench.passes(100)
        assert DealState.OPEN not in bench.states

    def test_control_costs_less_than_a_percent(self):
        """A gain of 1.5: what is not gained in control stretches, of all."""
        bench = Bench(1.5, noise=0.02).passes(2000)
        assert bench.num_resting >= 2 * CONTROL_PASSES
        assert bench.num_resting * (1 - 1 / 1.5) < 0.01 * 2000

    def test_stretches_become_rare(self):
        bench = Bench(1.5, noise=0.02).passes(9_000)
        assert bench.deal.interval == MAX_INTERVAL

    def test_not_while_the_gain_is_unclear(self):
        bench = Bench(1.03, noise=0.05).passes(3_000)
        assert bench.deal.interval == MIN_INTERVAL
        assert DealState.OPEN not in bench.states

    def test_the_first_one_comes_early(self):
        bench = Bench(1.5).passes(FIRST_CONTROL)
        assert bench.deal.state is DealState.CONTROL


class TestCounting:
    def test_a_draft_first_uses_up_its_credit(self):
        """It works 3 passes into the stretch: they and one more are not counted."""
        bench = Bench(1.5, settle_us=2.5 * PASS_US).passes(FIRST_CONTROL)
        before = bench.deal.resting.count
        bench.passes(4)
        assert bench.deal.resting.count == before == 0
        bench.passes(1)
        assert bench.deal.resting.count == 1

    def test_but_not_for_ever(self):
        bench = Bench(1.5, settle_us=1e12).passes(FIRST_CONTROL + 9)
        assert bench.deal.resting.count == 1

    def test_the_draft_is_woken_behind_the_last_control_pass(self):
        """Credit goes out with the verdicts of that pass; in the passes before it none does."""
        bench = Bench(1.5).passes(FIRST_CONTROL)
        may = []
        while bench.deal.state is DealState.CONTROL:
            may.append(bench.deal.may_grant)
            bench.one()
        assert may == [False] * (len(may) - 1) + [True]

    def test_without_drafts_nothing_is_compared(self):
        bench = Bench(1.0).passes(5000, is_drafting=False)
        assert set(bench.states) == {DealState.DRAFTING}
        assert bench.deal.gain is None


class TestBatches:
    def run(self, profit, sequences, count, gain, now_us):
        for _ in range(count):
            resting = profit.deal.is_resting
            us = PASS_US * (1.0 if resting else 2.0 / gain)
            now_us += int(us)
            tokens = sequences * (1 if resting else 2)
            profit.record(sequences, tokens, us, now_us, not resting, 0.0)
        return now_us

    def test_a_deal_for_each_size(self):
        profit = Profit()
        now_us = self.run(profit, 1, 100, 1.5, 0)
        now_us = self.run(profit, 64, 100, 0.7, now_us)
        assert profit.deal.state is DealState.OPEN
        self.run(profit, 1, 20, 1.5, now_us)
        assert profit.deal.state is DealState.DRAFTING

    def test_neighbors_overlap(self):
        """32 and 31 sequences in turn are one size, not two that forget each other."""
        profit = Profit()
        now_us = self.run(profit, 40, 60, 1.5, 0)
        deal = profit.deal
        for _ in range(50):
            now_us = self.run(profit, 31, 1, 1.5, now_us)
            assert profit.deal is deal
            now_us = self.run(profit, 32, 1, 1.5, now_us)

    def test_bounded(self):
        profit, now_us = Profit(), 0
        for sequences in range(1, 3000, 7):
            now_us = self.run(profit, sequences, 12, 1.5, now_us)
        assert len(profit._deals) <= 12

    def test_what_is_known_by_name(self):
        profit = Profit()
        self.run(profit, 1, 60, 1.5, 0)
        assert profit.inputs()["measured_gain"] == pytest.approx(1.5, rel=0.02)
