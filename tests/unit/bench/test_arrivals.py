from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean, pvariance

import pytest

from paceline.bench.arrivals import arrival_times

NUM = 20_000


def first(rate: float, burstiness: float, seed: int, num: int = NUM) -> list[float]:
    return list(islice(arrival_times(rate, burstiness, seed), num))


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert first(4.0, 1.0, 7, 100) == first(4.0, 1.0, 7, 100)
    assert first(4.0, 1.0, 7, 100) != first(4.0, 1.0, 8, 100)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_spread_of_their_law(burstiness: float) -> None:
    """Gamma gaps: mean 1 / rate, and 1 / burstiness as their squared coefficient of variation;
    1 is what exponential gaps, a Poisson process, have."""
    times = first(5.0, burstiness, 1)
    gaps = [times[0], *(after - before for before, after in pairwise(times))]
    assert fmean(gaps) == pytest.approx(1 / 5.0, rel=0.03)
    assert pvariance(gaps) / fmean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.06)
    assert min(gaps) >= 0


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    counts = [0] * 2000
    for time_s in first(5.0, 1.0, 3):
        if time_s < len(counts):
            counts[int(time_s)] += 1
    assert pvariance(counts) / fmean(counts) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_a_rate_that_is_none_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError):
        next(arrival_times(rate, burstiness, 0))
