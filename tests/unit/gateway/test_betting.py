"""The sequential test: its false alarms, exactly and in simulation, and how soon it sees a bug."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random

import pytest

from paceline.gateway.betting import MAX_E_VALUE, STAKES, Bets, SequentialTest

BOTH, UP = (1, -1), (1,)


def coins(num: int) -> Iterator[tuple[float, ...]]:
    return itertools.product((1.0, -1.0), repeat=num)


def wealth(sides: tuple[int, ...], values: tuple[float, ...], tolerance: float = 0.0) -> float:
    bets = Bets([sides], tolerance)
    for value in values:
        bets.receive([value])
    return math.exp(bets.log_e_value())


@pytest.mark.parametrize("sides", [UP, BOTH])
def test_fair_coins_win_nothing_on_average(sides: tuple[int, ...]) -> None:
    """Over every one of the 2 ** 12 sequences: the mean wealth is 1, and it ever comes to 4 in at
    most a quarter of them (Ville)."""
    num = 12
    assert math.fsum(wealth(sides, run) for run in coins(num)) / 2**num == pytest.approx(1.0)
    ever = sum(
        any(wealth(sides, run[:length]) >= 4.0 for length in range(1, num + 1))
        for run in coins(num)
    )
    assert 0 < ever <= 2**num / 4


def test_within_the_tolerance_nothing_is_won_either() -> None:
    """A coin whose mean is the tolerance, on the side that it favours."""
    tolerance, num = 0.1, 10
    up = (1.0 + tolerance) / 2.0
    mean = math.fsum(
        up ** run.count(1.0) * (1.0 - up) ** run.count(-1.0) * wealth(UP, run, tolerance)
        for run in coins(num)
    )
    assert mean == pytest.approx(1.0)
    assert wealth(UP, (1.0,) * 50, tolerance) > 1e3


def test_a_one_sided_statistic_is_no_evidence_on_its_other_side() -> None:
    assert wealth(UP, (-1.0,) * 100) < 0.05
    assert wealth(BOTH, (-1.0,) * 100) > 1e3


def test_nothing_said_is_nothing_lost() -> None:
    bets = Bets([BOTH, UP], 0.05)
    bets.receive([None, None])
    assert bets.log_e_value() == 0.0


@pytest.mark.parametrize("value", [1.001, -2.0, math.nan])
def test_statistics_are_bounded(value: float) -> None:
    """A value beyond 1 could win more than its price."""
    with pytest.raises(ValueError, match=r"\[-1, 1\]"):
        Bets([BOTH], 0.0).receive([value])


class Stream:
    """A service in simulation: correlated statistics of mean `shift` and of several shapes."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.test = SequentialTest(([BOTH, BOTH, UP], [BOTH]), 0.0, era_len=16)

    def sample(self, shift: float = 0.0) -> float:
        for _ in range(8):
            base = self._random.uniform(-1.0, 1.0) * (1.0 - abs(shift)) + shift
            coin = 1.0 if self._random.random() < (1.0 + shift) / 2.0 else -1.0
            rare = 0.95 if self._random.random() < 0.05 else -0.05
            self.test.receive(0, [base, coin, rare])
        self.test.receive(1, [1.0 if self._random.random() < (1.0 + shift) / 2.0 else -1.0])
        self.test.end_sample()
        return self.test.e_value


def test_false_alarms_over_many_streams() -> None:
    """300 streams of 120 requests, looked at after every request, with restarts in between: at
    level 1/20 no more than 1/20 of them ever raise an alarm."""
    num_alarms = sum(
        max(stream.sample() for _ in range(120)) >= 20.0 for stream in map(Stream, range(300))
    )
    assert num_alarms <= 300 / 20


@pytest.mark.parametrize("shift", [0.1, -0.1, 0.5])
def test_a_shift_is_seen(shift: float) -> None:
    for seed in range(5):
        stream = Stream(seed)
        assert any(stream.sample(shift) >= 1000.0 for _ in range(200))


def test_a_bug_that_comes_late_is_seen_as_soon() -> None:
    """After 4,000 good requests; without starting over, the wealth lost would have to come back."""
    stream = Stream(1)
    assert all(stream.sample() < 1000.0 for _ in range(4000))
    assert any(stream.sample(0.2) >= 1000.0 for _ in range(100))


def test_the_shares_of_the_coin_add_up() -> None:
    """With no bet won or lost the coin is whole, but for shares that were thrown away: and of
    these there are ever more, so that few are left to look after."""
    test = SequentialTest(([BOTH],), 0.0, era_len=1)
    assert test.e_value == pytest.approx(1.0)
    for _ in range(3):
        test.end_sample()
        assert test.e_value == pytest.approx(1.0)
    for _ in range(10_000):
        test.end_sample()
    assert 0.5 < test.e_value < 1.0
    assert test.num_eras <= 2 * math.log2(10_000) + 3


def test_the_first_share_bets_for_ever() -> None:
    """A small shift from the start on is seen, if late."""
    stream = Stream(7)
    values = [stream.sample(0.03) for _ in range(1500)]
    assert max(values[:200]) < 1000.0 < max(values)


def test_the_e_value_is_a_number() -> None:
    test = SequentialTest(([BOTH],), 0.0)
    for _ in range(10_000):
        test.receive(0, [1.0])
    assert test.e_value == pytest.approx(MAX_E_VALUE)
    assert min(STAKES) > 0.0


def test_a_lost_bet_leaves_something() -> None:
    bets = Bets([UP], 0.1)
    for _ in range(10_000):
        bets.receive([-1.0])
    assert math.isfinite(bets.log_e_value())
