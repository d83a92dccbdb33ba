from __future__ import annotations

from random import Random

import numpy as np
import pytest

from paceline.bench.statistics import Samples, percentile, ratio, spread


def test_percentiles_lie_between_the_two_nearest_ranks() -> None:
    ordered = [10.0, 20.0, 30.0, 40.0]
    found = [percentile(ordered, percent) for percent in (0, 25, 50, 90, 100)]
    assert found == pytest.approx([10.0, 17.5, 25.0, 37.0, 40.0])


def test_percentiles_are_numpys() -> None:
    random = Random(5)
    for size in (1, 2, 3, 10, 101):
        ordered = sorted(random.expovariate(1) for _ in range(size))
        for percent in (0, 1, 50, 90, 99, 99.9, 100):
            expected = float(np.percentile(ordered, percent))
            assert percentile(ordered, percent) == pytest.approx(expected)


@pytest.mark.parametrize(("ordered", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_what_has_no_percentile_is_refused(ordered: list[float], percent: float) -> None:
    with pytest.raises(ValueError):
        percentile(ordered, percent)


def test_summary_of_known_samples() -> None:
    samples = Samples()
    for value in range(1, 101):
        samples.add(value / 1000)
    assert samples.summary(1000) == {
        "count": 100,
        "mean": 50.5,
        "p50": 50.5,
        "p90": 90.1,
        "p99": 99.01,
        "max": 100.0,
    }
    quantiles = samples.quantiles(1000)
    assert (len(quantiles), quantiles[0], quantiles[50], quantiles[100]) == (101, 1, 50.5, 100)


def test_no_sample_is_null_and_not_zero() -> None:
    assert Samples().summary()["p99"] is None
    assert Samples().quantiles() == []
    assert spread([]) == {"count": 0, "median": None, "min": None, "max": None}


def test_a_value_counts_as_often_as_it_says() -> None:
    samples = Samples()
    samples.add(1.0, times=3)
    samples.add(5.0)
    assert (samples.count, samples.mean) == (4, 2.0)
    assert samples.summary()["p50"] == 1.0


def test_samples_are_bounded_and_stay_a_fair_sample() -> None:
    samples, again = Samples(max_samples=1000), Samples(max_samples=1000)
    for value in range(20_000):
        samples.add(value)
        again.add(value)
    assert (samples.num_kept, samples.count) == (1000, 20_000)
    assert samples.mean == pytest.approx(9999.5)
    # The 1000 first alone would give 500.
    assert samples.summary()["p50"] == pytest.approx(10_000, abs=1000)
    assert samples.summary() == again.summary()


def test_spread_and_ratio() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"count": 3, "median": 2.0, "min": 1.0, "max": 3.0}
    assert ratio(3, 2) == 1.5
    assert ratio(3, 0) is None
