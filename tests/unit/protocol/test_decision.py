"""The argmax of 2g.5 against brute force over all allotments."""

import itertools
import random

import pytest

from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.decision import best_rows, share_evenly, share_rows
from paceline.protocol.row_price import NEVER, RowPrice


def survivals(*values):
    sums = tuple(itertools.accumulate(values, initial=0.0))
    return Survivals(tuple(-value for value in values), sums, values[0])


def decide(windows, cost_us):
    negatives = sorted(n for s, have in windows for n in s.negatives[:have])
    num_rows, rate = best_rows(negatives, len(windows), cost_us, 0.0)
    return share_rows(windows, negatives, num_rows), rate


def brute_force(windows, cost_us):
    counts = itertools.product(*(range(have + 1) for _, have in windows))
    return max(
        sum(1 + s.sums[k] for (s, _), k in zip(windows, chosen, strict=True)) / cost_us[sum(chosen)]
        for chosen in counts
    )


@pytest.mark.parametrize("seed", range(20))
def test_as_good_as_every_allotment(seed):
    """Three windows of up to four, over a random staircase."""
    rng = random.Random(seed)
    windows = []
    for _ in range(3):
        alpha = rng.uniform(0.1, 0.95)
        windows.append((survivals(*(alpha**k for k in range(1, 5))), rng.randint(0, 4)))
    cost_us = list(itertools.accumulate(rng.choice([0.0, 0.0, 1.0, 4.0]) for _ in range(13)))
    cost_us = [10 + us for us in cost_us]
    counts, rate = decide(windows, cost_us)
    tokens = sum(1 + s.sums[k] for (s, _), k in zip(windows, counts, strict=True))
    assert tokens / cost_us[sum(counts)] == pytest.approx(rate)
    assert rate == pytest.approx(brute_force(windows, cost_us))
    assert all(count <= have for count, (_, have) in zip(counts, windows, strict=True))


def test_over_a_step_to_the_free_rows_behind_it():
    """The first proposal costs more than it brings, the other three come with it."""
    window = (survivals(0.9, 0.8, 0.7, 0.6), 4)
    assert decide([window], [10, 20, 20, 20, 20])[0] == [4]
    assert decide([window], [10, 20, 30, 40, 50])[0] == [0]


def test_the_fewest_rows_win_a_tie():
    assert decide([(survivals(0.5, 0.25), 2)], [10, 15, 17.5])[0] == [0]


def test_equal_proposals_go_to_the_first_windows():
    windows = [(survivals(0.5, 0.1), 2)] * 3
    assert decide(windows, [10, 10, 10, 90, 90, 90, 90])[0] == [1, 1, 0]


def test_scarce_rows_are_shared():
    assert share_evenly([4, 4, 4], 7) == [3, 2, 2]
    assert share_evenly([0, 1, 9], 7) == [0, 1, 6]
    assert share_evenly([4], -1) == [0]


class TestRowPrice:
    GROUP = (survivals(0.8, 0.64, 0.5), 3)

    def price(self, cost_us, price=None, sequences=2):
        made = price or RowPrice()
        made.update({self.GROUP: sequences}, 3 * sequences, sequences, cost_us, 0.0)
        return made

    def test_what_the_last_row_that_pays_survives_with(self):
        assert self.price([10, 10, 10, 10, 10, 90, 90]).survival == pytest.approx(0.64)

    def test_nothing_pays(self):
        assert self.price([10, 20, 30, 40, 50, 60, 70]).survival == NEVER

    def test_a_gain_of_less_than_a_percent_is_none(self):
        assert self.price([10, 14, 17.9, 22, 26, 30, 34]).survival == NEVER

    def test_it_does_not_flutter(self):
        """Three rows a sequence are best, then two by a hair: .64 would gain 1 %."""
        made = self.price([10] * 7)
        assert made.survival == pytest.approx(0.5)
        self.price([10, 10, 10, 10, 10, 12, 12.2], made)
        assert made.survival == pytest.approx(0.5)
        self.price([10, 10, 10, 10, 10, 14, 14], made)
        assert made.survival == pytest.approx(0.64)

    def test_another_batch_is_another_matter(self):
        made = self.price([10] * 7)
        self.price([10, *[10] * 8, 12, *[12.2] * 15], made, sequences=4)
        assert made.survival == pytest.approx(0.64)
