"""Predictions are summed up over exactly the passes that they were made for."""

import pytest

from paceline.protocol.forecast import Forecast
from paceline.protocol.lookahead_types import PassRecord


def record(*, idle_us: int | None = 1000, num_prefill_rows: int = 0) -> PassRecord:
    return PassRecord(1, 5, num_prefill_rows, 4, 3, 0, 25_000, idle_us)


def test_predicted_passes_and_measured_pauses_add_up():
    forecast = Forecast()
    forecast.plan(3.0, 24_000)
    forecast.end(record())
    forecast.plan(2.0, 26_000)
    forecast.end(record(idle_us=4000))
    assert (forecast.tokens, forecast.us) == (5.0, 55_000)
    assert forecast.tokens_per_s == pytest.approx(1e6 * 5 / 55_000)


@pytest.mark.parametrize("left_out", [record(idle_us=None), record(num_prefill_rows=1)])
def test_passes_that_are_left_out(left_out):
    forecast = Forecast()
    forecast.plan(3.0, 24_000)
    forecast.end(left_out)
    assert forecast.tokens_per_s == 0.0


def test_what_is_not_known_counts_for_no_pass():
    forecast = Forecast()
    forecast.plan(3.0, 24_000)
    forecast.plan(3.0, None)
    forecast.end(record())
    forecast.end(record())
    assert forecast.us == 0
