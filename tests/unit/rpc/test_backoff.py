from __future__ import annotations

import pytest

from paceline.rpc.backoff import Backoff


def test_pauses_double_up_to_the_limit() -> None:
    backoff = Backoff(0.1, 1.0, uniform=lambda: 0.0)
    assert [backoff.next_s() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_jitter_takes_up_to_half() -> None:
    draws = iter([0.5, 0.999, 0.0])
    backoff = Backoff(1.0, 8.0, uniform=lambda: next(draws))
    assert [backoff.next_s() for _ in range(3)] == [0.75, pytest.approx(1.001), 4.0]


def test_reset_starts_over() -> None:
    backoff = Backoff(0.1, 1.0, uniform=lambda: 0.0)
    for _ in range(5):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.1


@pytest.mark.parametrize(("min_s", "max_s"), [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_bounds_are_checked(min_s: float, max_s: float) -> None:
    with pytest.raises(ValueError, match="min_s"):
        Backoff(min_s, max_s, uniform=lambda: 0.0)
