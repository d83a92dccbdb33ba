"""V(sequences, rows) from passes whose true costs are known."""

import random

import pytest

from paceline.protocol.pass_cost import MAX_CURVES, MAX_STEPS, PRIOR_ROW_SHARE, PassCost


def feed(cost, count, us, *, sequences=1, proposals=range(8), seed=1, other=0):
    """`count` passes; `us(rows)` is the true time."""
    rng = random.Random(seed)
    for _ in range(count):
        rows = sequences + rng.choice(list(proposals)) + other
        cost.record(sequences, rows, other, us(rows))


def ratio(cost, num_proposals, *, sequences=1):
    curve = cost.curve(sequences, 0, num_proposals)
    return curve[num_proposals] / curve[0]


class TestBeforeMeasurements:
    def test_nothing_is_predicted(self):
        cost = PassCost()
        assert not cost.is_measured
        assert cost.curve(1, 0, 4) is None
        assert cost.row_us(1) == 0.0

    def test_passes_that_took_no_time_were_not_measured(self):
        cost = PassCost()
        feed(cost, 50, lambda rows: 0)
        assert not cost.is_measured

    def test_eight_passes_are_enough(self):
        cost = PassCost()
        feed(cost, 7, lambda rows: 1000)
        assert not cost.is_measured
        feed(cost, 1, lambda rows: 1000)
        assert cost.is_measured


class TestSlopes:
    def test_one_shape_only_a_row_costs_one_percent(self):
        cost = PassCost()
        feed(cost, 300, lambda rows: 10_000, proposals=[0])
        assert ratio(cost, 5) == pytest.approx(1 + 5 * PRIOR_ROW_SHARE, rel=0.002)

    @pytest.mark.parametrize("share", [0.0, 0.002, 0.02, 0.12])
    def test_measured(self, share):
        cost = PassCost()
        feed(cost, 200, lambda rows: 10_000 * (1 + share * rows))
        expected = (1 + share * 9) / (1 + share)
        assert ratio(cost, 8) == pytest.approx(expected, rel=0.01)

    def test_through_noise(self):
        rng, cost = random.Random(3), PassCost()
        feed(cost, 400, lambda rows: (10_000 + 300 * rows) * rng.uniform(0.95, 1.05))
        assert cost.row_us(1) == pytest.approx(300, rel=0.25)

    def test_never_negative(self):
        cost = PassCost()
        feed(cost, 200, lambda rows: 10_000 - 100 * rows)
        assert cost.row_us(1) == 0.0
        assert ratio(cost, 7) >= 1.0

    def test_a_long_time_at_one_shape_does_not_wear_it_out(self):
        cost = PassCost()
        feed(cost, 200, lambda rows: 10_000 + 800 * rows)
        feed(cost, 3000, lambda rows: 10_000 + 800 * rows, proposals=[2])
        assert cost.row_us(1) == pytest.approx(800, rel=0.05)

    def test_a_sequence_is_not_taken_for_a_row(self):
        """Batches of 8 to 15 with two proposals each: a sequence costs 500, a row 100."""
        rng, cost = random.Random(5), PassCost()
        for _ in range(400):
            sequences = rng.randint(8, 15)
            rows = sequences + rng.randint(0, 2 * sequences)
            cost.record(sequences, rows, 0, 10_000 + 500 * sequences + 100 * rows)
        assert cost.row_us(10) == pytest.approx(100, rel=0.15)


class TestStairs:
    def test_padding_to_eights(self):
        """Rows 9 to 16 cost the same; the 17th costs a fifth of a pass."""
        cost = PassCost()
        feed(
            cost,
            2000,
            lambda rows: 8_000 + 2_000 * -(-rows // 8),
            sequences=8,
            proposals=range(25),
        )
        curve = cost.curve(8, 0, 24)
        assert curve[8] - curve[1] < 0.2 * (curve[9] - curve[8])

    def test_rising(self):
        rng, cost = random.Random(7), PassCost()
        feed(cost, 300, lambda rows: 10_000 * rng.uniform(0.8, 1.2), sequences=4)
        curve = cost.curve(4, 0, 40)
        assert curve == sorted(curve)

    def test_at_most_so_many_steps(self):
        cost = PassCost()
        feed(cost, 5000, lambda rows: 10_000 + rows, sequences=64, proposals=range(8000))
        group = cost._groups[False, 7]
        assert len(group.steps) <= MAX_STEPS
        assert cost.row_us(64) == pytest.approx(1.0, rel=0.05)


class TestRobust:
    def test_a_pause_of_the_process(self):
        cost = PassCost()
        feed(cost, 100, lambda rows: 10_000 + 100 * rows)
        before = cost.curve(1, 0, 8)
        cost.record(1, 5, 0, 100_000)
        cost.refresh()
        after = cost.curve(1, 0, 8)
        assert after[0] == pytest.approx(before[0], rel=0.02)
        assert after[8] == pytest.approx(before[8], rel=0.02)

    def test_one_pass_in_twenty_ten_times_as_long(self):
        rng, cost = random.Random(9), PassCost()
        feed(cost, 1000, lambda rows: (10_000 + 200 * rows) * (10 if rng.random() < 0.05 else 1))
        assert cost.curve(1, 0, 0)[0] == pytest.approx(10_200, rel=0.05)
        assert 100 < cost.row_us(1) < 400

    def test_a_new_level_is_believed(self):
        """The text has grown: everything takes twice as long, a row too."""
        cost = PassCost()
        feed(cost, 300, lambda rows: 10_000 + 500 * rows)
        feed(cost, 60, lambda rows: 20_000 + 500 * rows)
        cost.refresh()
        assert cost.curve(1, 0, 0)[0] == pytest.approx(20_500, rel=0.05)
        assert cost.row_us(1) == pytest.approx(500, rel=0.3)

    def test_drift(self):
        cost = PassCost()
        rng = random.Random(2)
        for number in range(1000):
            rows = 1 + rng.randrange(8)
            cost.record(1, rows, 0, 10_000 + 10 * number + 300 * rows)
        assert cost.curve(1, 0, 0)[0] == pytest.approx(20_300, rel=0.05)
        assert cost.row_us(1) == pytest.approx(300, rel=0.25)


class TestGroups:
    def test_a_batch_never_seen_asks_the_nearest(self):
        cost = PassCost()
        feed(cost, 200, lambda rows: 10_000 + 100 * rows, sequences=8)
        assert cost.curve(32, 0, 0)[0] == pytest.approx(10_000 + 100 * 32, rel=0.05)

    def test_batches_are_kept_apart(self):
        """Free rows for one sequence, expensive ones for many: the knee of a roofline."""
        cost = PassCost()
        feed(cost, 200, lambda rows: 10_000, sequences=1)
        feed(cost, 200, lambda rows: 10_000 + 500 * rows, sequences=64, proposals=range(64, 200))
        assert cost.row_us(1) < 20
        assert cost.row_us(64) == pytest.approx(500, rel=0.1)

    def test_passes_with_prompts_do_not_count_for_those_without(self):
        cost = PassCost()
        feed(cost, 200, lambda rows: 10_000 + 100 * rows)
        feed(cost, 200, lambda rows: 90_000, other=100)
        assert cost.curve(1, 0, 0)[0] == pytest.approx(10_100, rel=0.05)
        assert cost.curve(1, 100, 0)[0] == pytest.approx(90_000, rel=0.05)

    def test_with_nothing_else_they_do(self):
        cost = PassCost()
        feed(cost, 200, lambda rows: 10_000 + 100 * rows, other=16)
        assert cost.row_us(1) == pytest.approx(100, rel=0.1)


def test_curves_are_made_once_and_not_kept_for_ever():
    cost = PassCost()
    feed(cost, 20, lambda rows: 10_000)
    assert cost.curve(3, 0, 5) is cost.curve(3, 0, 2)
    for sequences in range(1, 300):
        cost.curve(sequences, 0, 4)
    assert len(cost._curves) <= MAX_CURVES
    cost.refresh()
    assert not cost._curves
