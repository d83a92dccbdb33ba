"""What is drawn: run lengths, ranks, text lengths, and what passes cost."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from paceline.simulate.config import TargetKind
from paceline.simulate.costs import PassCost
from paceline.simulate.draws import RunLengths, draw_length
from paceline.simulate.metrics import Histogram
from paceline.simulate.traffic_config import ClassConfig, LengthConfig

COUNT = 40_000


def classes(*items: dict[str, Any]) -> tuple[ClassConfig, ...]:
    return tuple(ClassConfig.model_validate({"name": str(i), **x}) for i, x in enumerate(items))


def survivals(acceptance: Any, most: int) -> list[float]:
    """P(run >= k), measured."""
    runs, _ = RunLengths(classes({"acceptance": acceptance}), 1).draw(np.zeros(COUNT, np.int64))
    return [float((runs >= k).mean()) for k in range(most + 1)]


def test_runs_are_geometric() -> None:
    for acceptance in (0.3, 0.9):
        expected = [acceptance**k for k in range(7)]
        assert survivals(acceptance, 6) == pytest.approx(expected, abs=0.01)
    assert survivals(0.0, 1) == [1.0, 0.0]
    assert survivals(1.0, 1) == [1.0, 1.0]


def test_acceptance_by_position() -> None:
    expected = [1, 0.9, 0.9 * 0.5, 0.9 * 0.5 * 0.7, 0.9 * 0.5 * 0.7**2]
    assert survivals([0.9, 0.5, 0.7], 4) == pytest.approx(expected, abs=0.01)
    assert survivals([0.9, 0.0], 2) == pytest.approx([1, 0.9, 0], abs=0.01)


def test_one_draw_is_like_many() -> None:
    for acceptance in (0.8, [0.8, 0.6]):
        items = classes({"acceptance": acceptance, "runner_up": [0.5, 0.7]})
        many, ranks = RunLengths(items, 1).draw(np.zeros(COUNT, np.int64))
        one = RunLengths(items, 2)
        pairs = [one.draw_one(0) for _ in range(COUNT // 8)]
        assert sum(run for run, _ in pairs) / len(pairs) == pytest.approx(many.mean(), rel=0.05)
        for rank in range(3):
            share = sum(found == rank for _, found in pairs) / len(pairs)
            assert share == pytest.approx(float((ranks == rank).mean()), abs=0.025)


def test_ranks_of_corrections() -> None:
    items = classes({"runner_up": [0.5, 0.66]}, {"runner_up": []})
    runs = RunLengths(items, 1)
    _, ranks = runs.draw(np.zeros(COUNT, np.int64))
    assert [float((ranks == r).mean()) for r in range(3)] == pytest.approx(
        [0.34, 0.5, 0.16], abs=0.01
    )
    assert not runs.draw(np.ones(100, np.int64))[1].any()


def test_drift_goes_there_and_back() -> None:
    drift = {"acceptance": 0.9, "period_s": 10.0}
    items = classes({"acceptance": 0.1, "drift": drift})
    runs = RunLengths(items, 1)
    for at_s, acceptance in ((0.0, 0.1), (2.5, 0.5), (5.0, 0.9), (7.5, 0.5), (10.0, 0.1)):
        runs.set_time(at_s * 1e6)
        drawn, _ = runs.draw(np.zeros(COUNT, np.int64))
        assert float((drawn >= 1).mean()) == pytest.approx(acceptance, abs=0.01)


@pytest.mark.parametrize("shape", ["fixed", "uniform", "exponential", "lognormal"])
def test_lengths(shape: Any) -> None:
    config = LengthConfig(distribution=shape, mean=200, sigma=0.5, min=20, max=380)
    random = Random(1)
    drawn = [draw_length(config, random) for _ in range(4000)]
    assert min(drawn) >= 20
    assert max(drawn) <= 380
    assert (min(drawn) == max(drawn)) == (shape == "fixed")
    if shape in ("fixed", "uniform"):
        assert sum(drawn) / len(drawn) == pytest.approx(200, rel=0.02)


def test_pass_costs() -> None:
    plain = PassCost(TargetKind(base_ms=20, row_ms=0.1, seq_ms=0.5))
    assert plain.us(30, 10) == pytest.approx(20_000 + 3_000 + 5_000)
    stairs = [{"rows": 8, "ms": 10}, {"rows": 16, "ms": 11}, {"rows": 32, "ms": 15}]
    measured = PassCost(TargetKind.model_validate({"staircase": stairs}))
    assert [measured.us(rows, 1) for rows in (1, 8, 9, 16, 32)] == [10e3, 10e3, 11e3, 11e3, 15e3]
    assert measured.us(48, 1) == pytest.approx(15e3 + 16 * 250)


def test_percentiles_of_the_histogram() -> None:
    histogram = Histogram()
    assert histogram.percentile_ms(50) is None
    for _ in range(3):
        histogram.add(np.arange(1, 1001, dtype=np.float64) * 1000)
    assert histogram.count == 3000
    for percent in (50, 90, 99):
        assert histogram.percentile_ms(percent) == pytest.approx(10 * percent, rel=0.01)
