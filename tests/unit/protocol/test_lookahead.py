"""The policy's decisions, asked as the scheduler asks. Times in microseconds."""

import pytest

from paceline.protocol.draft_cost import MAX_BRANCH_BATCH
from paceline.protocol.lookahead import (
    AcceptanceClass,
    ClassCounts,
    DealState,
    Grant,
    Guidance,
    LookaheadLimits,
    LookaheadPolicy,
    PassRecord,
    SequenceLookahead,
    Window,
)
from paceline.protocol.profit import FIRST_CONTROL
from paceline.sampling.params import VerificationMode

GREEDY = VerificationMode.GREEDY
KEY = AcceptanceClass("draft", GREEDY, 0.0)
PASS_US = 25_000


class Rig:
    """Drives a policy; every proposal is right with the same share of the time, in turn."""

    def __init__(self, count=1, *, row_us=250.0, have=16, **limits):
        self.policy = LookaheadPolicy(LookaheadLimits(**limits))
        self.sequences = [SequenceLookahead(KEY) for _ in range(count)]
        for lookahead in self.sequences:
            self.policy.add(lookahead)
        self.row_us, self.have, self.now_us = row_us, have, 0
        self.grants = [Grant(0)] * count
        self.counts = []
        self.debt = 0.0

    def windows(self):
        return [Window(lookahead, self.have) for lookahead in self.sequences]

    def passes(self, number, alpha=0.75, *, draft_us=3_000, slow=0.0, foreseen=None):
        for _ in range(number):
            is_slow = any(grant.draft_ahead for grant in self.grants)
            self.counts = self.policy.plan(self.windows(), 0, 2048)
            if draft_us and any(grant.draft_ahead for grant in self.grants):
                self.policy.learn_draft_step(draft_us, 1)
            committed = 0
            for index, lookahead in enumerate(self.sequences):
                accepted = self.accept(self.counts[index], alpha)
                committed += accepted + 1
                self.policy.end_round(lookahead, self.counts[index], accepted, foreseen)
                self.grants[index] = self.policy.grant(lookahead)
            rows = len(self.sequences) + sum(self.counts)
            us = int((PASS_US + self.row_us * rows) * (1 + slow * is_slow))
            start_us, self.now_us = self.now_us + 100, self.now_us + 100 + us
            self.policy.end_pass(
                PassRecord(
                    len(self.sequences),
                    rows,
                    0,
                    sum(self.counts),
                    committed,
                    start_us,
                    self.now_us,
                    100,
                )
            )
        return self

    def accept(self, count, alpha):
        """A position is wrong whenever 1 - alpha of one has accumulated."""
        for position in range(count):
            self.debt += 1.0 - alpha
            if self.debt >= 1.0:
                self.debt -= 1.0
                return position
        return count


def caps(rig):
    return [lookahead.cap for lookahead in rig.sequences]


class TestBeforeMeasurements:
    def test_k_is_the_configured_one(self):
        rig = Rig(2)
        assert rig.policy.plan(rig.windows(), 0, 100) == [4, 4]
        assert rig.policy.grant(rig.sequences[0]) == Grant(9)
        assert caps(rig) == [4, 4]
        assert rig.policy.explain() is None

    def test_also_when_passes_take_no_time(self):
        rig = Rig()
        for _ in range(50):
            rig.policy.plan(rig.windows(), 0, 100)
            rig.policy.end_round(rig.sequences[0], 4, 0)
            rig.policy.end_pass(PassRecord(1, 5, 0, 4, 1, 7, 7, 0))
        assert rig.policy.plan(rig.windows(), 0, 100) == [4]

    def test_what_a_request_asks_for(self):
        rig = Rig()
        rig.sequences[0].asked = 2
        assert rig.policy.plan(rig.windows(), 0, 100) == [2]

    def test_scarce_rows_are_shared(self):
        rig = Rig(3)
        assert rig.policy.plan(rig.windows(), 0, 7) == [3, 2, 2]

    def test_no_rows_at_all(self):
        rig = Rig(3)
        assert rig.policy.plan(rig.windows(), 0, -2) == [0, 0, 0]
        assert rig.policy.plan([], 0, 10) == []


class TestPlan:
    def test_cheap_rows_and_good_drafts_make_long_blocks(self):
        rig = Rig(row_us=25).passes(60, 0.95)
        assert rig.policy.plan(rig.windows(), 0, 100)[0] >= 12

    def test_expensive_rows_make_short_ones(self):
        """.75 and an eighth of a pass per row: 1, 1.56, 1.86, 2.01, 2.06, 2.06, ... per pass."""
        rig = Rig(row_us=3000).passes(200, 0.75)
        assert 2 <= rig.policy.plan(rig.windows(), 0, 100)[0] <= 6

    def test_the_better_sequence_gets_more(self):
        rig = Rig(2, row_us=1000).passes(60, 0.7)
        good, bad = rig.sequences
        for _ in range(60):
            rig.policy.end_round(good, 4, 4)
            rig.policy.end_round(bad, 1, 0)
        counts = rig.policy.plan(rig.windows(), 0, 100)
        assert counts[0] >= counts[1] + 4

    def test_never_more_than_what_is_here_or_fits(self):
        rig = Rig(3, row_us=10).passes(60, 0.9)
        windows = [
            Window(lookahead, have)
            for lookahead, have in zip(rig.sequences, (0, 2, 9), strict=True)
        ]
        counts = rig.policy.plan(windows, 0, 100)
        assert counts[:2] == [0, 2]
        assert counts[2] <= 9
        assert sum(rig.policy.plan(windows, 0, 4)) == 4

    def test_a_request_for_less(self):
        rig = Rig(2, row_us=10).passes(60, 0.9)
        rig.sequences[0].asked = 3
        assert rig.policy.plan(rig.windows(), 0, 100)[0] == 3
        rig.sequences[0].asked = 0
        assert rig.policy.plan(rig.windows(), 0, 100)[0] == 0

    def test_one_window_in_32_gets_one_more(self):
        rig = Rig(row_us=3000).passes(300, 0.75)
        counts = [rig.policy.plan(rig.windows(), 0, 100)[0] for _ in range(96)]
        usual = min(counts)
        assert counts.count(usual + 1) == 3
        assert counts.count(usual) == 93

    def test_nothing_depends_on_chance(self):
        one = Rig(4).passes(200, 0.6)
        other = Rig(4).passes(200, 0.6)
        assert one.counts == other.counts
        assert one.grants == other.grants


class TestFixed:
    def test_by_the_deployment(self):
        rig = Rig(2, is_adaptive=False, num_speculative_tokens=3, row_us=5000).passes(200, 0.0)
        assert rig.counts == [3, 3]
        assert rig.grants == [Grant(7), Grant(7)]

    def test_by_the_request_beside_an_adaptive_one(self):
        rig = Rig(2, row_us=5000)
        rig.sequences[0].is_fixed, rig.sequences[0].asked = True, 3
        rig.passes(200, 0.0, slow=0.3)
        assert rig.counts[0] == 3
        assert rig.grants[0] == Grant(7)
        assert caps(rig)[1] == 0

    def test_deployment_ceilings_win(self):
        rig = Rig(max_num_speculative_tokens=5)
        rig.sequences[0].is_fixed, rig.sequences[0].asked = True, 40
        assert rig.policy.plan(rig.windows(), 0, 100) == [5]

    def test_off(self):
        rig = Rig(max_num_speculative_tokens=0).passes(100)
        assert rig.counts == [0]
        assert rig.grants == [Grant(0)]
        assert rig.policy.ceiling(rig.sequences[0]) == 0


class TestGrant:
    def test_twice_k_and_one(self):
        rig = Rig(2, row_us=2000).passes(240, 0.75)
        cap = rig.sequences[0].cap
        assert 1 <= cap <= 7
        assert rig.grants[0] == Grant(2 * cap + 1)

    def test_a_long_way_needs_more_ahead(self):
        """A round trip of two passes: K + 1 for each of the three until the answer is here."""
        rig = Rig(2, row_us=3000, max_draft_ahead=64)
        for _ in range(50):
            rig.policy.learn_rtt(2 * PASS_US)
        rig.passes(60, 0.75)
        cap = rig.sequences[0].cap
        assert rig.grants[0] == Grant(cap + 2 * (cap + 1)) or rig.grants[0] == Grant(
            cap + 3 * (cap + 1)
        )

    def test_a_lone_draft_is_idle_when_the_verdict_of_a_correction_is_there(self):
        """8 steps of 3 ms fit into a pass of 25: K for the next pass and 8, not 2 K + 1."""
        rig = Rig(row_us=25, max_draft_ahead=64).passes(60, 0.95)
        lookahead = rig.sequences[0]
        rig.policy.end_round(lookahead, 4, 4)
        full = rig.policy.grant(lookahead).draft_ahead
        rig.policy.end_round(lookahead, 4, 1)
        assert rig.policy.grant(lookahead).draft_ahead == lookahead.cap + 8 < full

    def test_never_beyond_the_limit(self):
        rig = Rig(row_us=10).passes(60, 0.95)
        assert rig.grants[0].draft_ahead == 16

    def test_branches(self):
        rig = Rig(max_fan_out=2).passes(60)
        assert rig.grants[0].fan_out == 2

    @pytest.mark.parametrize(
        ("batch", "fan_out"), [(MAX_BRANCH_BATCH, 2), (MAX_BRANCH_BATCH + 1, 0)]
    )
    def test_branches_only_in_small_batches(self, batch, fan_out):
        assert Rig(batch, max_fan_out=2).passes(20).grants[0].fan_out == fan_out

    def test_no_branches_in_the_rejection_modes(self):
        rig = Rig(max_fan_out=2)
        rig.sequences[0].key = AcceptanceClass("draft", VerificationMode.BLOCK, 1.0)
        assert rig.passes(60).grants[0].fan_out == 0

    def test_no_branches_while_they_make_the_draft_slow(self):
        rig = Rig(max_fan_out=2).passes(60, draft_us=3_000)
        assert rig.grants[0].fan_out == 2
        rig.passes(60, draft_us=15_000)
        assert rig.grants[0].fan_out == 0
        rig.passes(400, draft_us=3_000)
        assert rig.grants[0].fan_out == 2

    def test_no_branches_of_a_draft_that_makes_one_token_a_pass(self):
        assert Rig(max_fan_out=2).passes(60, draft_us=15_000).grants[0].fan_out == 0


class TestProfit:
    def test_control_stretch(self):
        rig = Rig(2, row_us=100).passes(FIRST_CONTROL + 12, 0.8)
        deal = rig.policy.profit.deal
        assert deal.resting.count >= 4
        assert deal.gain > 1.5
        assert deal.state is DealState.DRAFTING
        rig.passes(4, 0.8)
        assert min(rig.counts) > 0

    def test_drafts_that_slow_the_target_down(self):
        rig = Rig(2, row_us=0).passes(60, 0.1, slow=0.5)
        assert rig.policy.profit.deal.state is DealState.OPEN
        assert rig.grants == [Grant(0), Grant(0)]
        assert rig.counts == [0, 0]
        assert "slower" in rig.policy.explain().reason


class TestGuidance:
    def test_ceilings(self):
        rig = Rig(row_us=10).passes(60, 0.95)
        rig.policy.guide(Guidance(max_draft_ahead=5, max_num_speculative_tokens=2))
        assert rig.policy.ceiling(rig.sequences[0]) == 2
        assert rig.policy.grant(rig.sequences[0]) == Grant(5)
        rig.policy.guide(Guidance())
        assert rig.policy.ceiling(rig.sequences[0]) == 16

    def test_no_drafts_for_anybody(self):
        rig = Rig().passes(60)
        rig.policy.guide(Guidance(max_num_speculative_tokens=0))
        assert rig.policy.grant(rig.sequences[0]) == Grant(0)
        assert rig.policy.plan(rig.windows(), 0, 10) == [0]

    def test_fan_out(self):
        rig = Rig(max_fan_out=3).passes(60)
        rig.policy.guide(Guidance(max_fan_out=1))
        assert rig.policy.grant(rig.sequences[0]).fan_out == 1

    def test_priors(self):
        rig = Rig()
        rig.policy.guide(Guidance({KEY: ClassCounts((500.0,), (0.0,))}))
        rig.passes(10, 0.0)
        assert caps(rig) == [0]

    def test_own_counts_are_told(self):
        counts = Rig().passes(20, 1.0).policy.class_counts()[KEY]
        assert counts.accepted == counts.reached
        assert counts.reached[0] == pytest.approx(20, rel=0.2)


class TestLimits:
    def test_live(self):
        rig = Rig(row_us=10).passes(60, 0.95)
        rig.policy.set_limits(LookaheadLimits(max_num_speculative_tokens=3, max_draft_ahead=4))
        rig.passes(8, 0.95)
        assert rig.counts[0] <= 3
        assert rig.grants[0].draft_ahead <= 4
        rig.policy.set_limits(LookaheadLimits(is_adaptive=False, num_speculative_tokens=6))
        rig.passes(1)
        assert rig.counts == [6]
        assert rig.grants == [Grant(13)]

    def test_a_fixed_k_is_not_switched_off_by_what_was_measured_before(self):
        rig = Rig(2, row_us=0).passes(60, 0.1, slow=0.5)
        assert rig.policy.profit.deal.state is DealState.OPEN
        rig.policy.set_limits(LookaheadLimits(is_adaptive=False, num_speculative_tokens=3))
        rig.passes(2)
        assert rig.counts == [3, 3]
        assert rig.grants == [Grant(7), Grant(7)]

    def test_more_than_was_ever_predicted(self):
        rig = Rig(max_num_speculative_tokens=2).passes(60, 0.95)
        rig.policy.set_limits(
            LookaheadLimits(max_num_speculative_tokens=40, max_draft_ahead=80, max_lone_wait_us=7)
        )
        rig.have, rig.row_us = 60, 1
        rig.passes(200, 1.0)
        assert rig.counts[0] > 16
        assert rig.policy.lone.max_wait_us == 7


class TestSeen:
    def test_starvation(self):
        rig = Rig(row_us=2000).passes(200, 0.75)
        before, cap = rig.policy.starvation(), rig.sequences[0].cap
        rig.policy.plan([Window(rig.sequences[0], 0)], 0, 100)
        after = rig.policy.starvation()
        sums = rig.sequences[0].survivals.sums
        assert after.wanted - before.wanted == pytest.approx(sums[cap])
        assert after.missing - before.missing == pytest.approx(sums[cap])
        rig.policy.plan([Window(rig.sequences[0], cap)], 0, 100)
        assert rig.policy.starvation().missing == after.missing

    def test_explanation(self):
        rig = Rig(2, row_us=250).passes(200, 0.75)
        told = rig.policy.explain()
        assert told.inputs["num_sequences"] == 2
        assert told.inputs["acceptance_rate"] == pytest.approx(0.75, abs=0.1)
        assert told.inputs["pass_us"] == pytest.approx(PASS_US + 500, rel=0.05)
        assert told.inputs["row_us"] == pytest.approx(250, rel=0.3)
        assert told.inputs["draft_step_us"] == pytest.approx(3000)
        assert [choice.num_speculative_tokens for choice in told.choices] == list(range(17))
        best = max(told.choices, key=lambda choice: choice.tokens_per_s)
        chosen = told.choices[told.chosen]
        assert chosen.tokens_per_s >= 0.97 * best.tokens_per_s
        assert told.reason.startswith(f"K = {told.chosen}")
