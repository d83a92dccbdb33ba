from __future__ import annotations

import random

import pytest

from paceline.bench import ceiling
from paceline.bench.ceiling import Costs

FREE_ROWS = Costs(draft_ms=3.0, verify_ms=25.0, draft_row_ms=0.0, verify_row_ms=0.0)
# The table of math.md 2g.4: V(0) = 25 ms, +1 % a row, d = 2.5 ms, B = 1.
TABLE = Costs(draft_ms=2.5, verify_ms=25.0, draft_row_ms=0.0, verify_row_ms=0.25)


def test_tokens_of_a_round() -> None:
    assert ceiling.tokens_per_round(0.5, 0) == 1.0
    assert ceiling.tokens_per_round(0.5, 2) == pytest.approx(1.75)
    assert ceiling.tokens_per_round(0.0, 8) == 1.0
    assert ceiling.tokens_per_round(1.0, 8) == 9.0


def test_no_draft_is_a_row_per_sequence() -> None:
    costs = Costs(verify_ms=20.0, verify_row_ms=0.5)
    assert ceiling.no_draft(costs, 10) == pytest.approx(10 / 0.025)


@pytest.mark.parametrize(("acceptance", "gain"), [(0.6, 2.30), (0.75, 3.49), (0.9, 7.49)])
def test_the_ceiling_with_free_rows_is_one_over_the_miss_rate(
    acceptance: float, gain: float
) -> None:
    limit = ceiling.ceiling(FREE_ROWS, acceptance, 4)
    assert limit / ceiling.no_draft(FREE_ROWS, 4) == pytest.approx(1 / (1 - acceptance), rel=0.01)
    # With rows that cost, within a few percent of the paper's column.
    priced = ceiling.ceiling(TABLE, acceptance, 1) / ceiling.no_draft(TABLE, 1)
    assert priced == pytest.approx(gain, rel=0.15)


@pytest.mark.parametrize(("acceptance", "gain"), [(0.6, 1.64), (0.75, 2.12), (0.9, 3.27)])
def test_lock_step_as_in_the_paper(acceptance: float, gain: float) -> None:
    k = ceiling.best_lockstep_k(TABLE, acceptance, 1)
    rate = ceiling.lockstep(TABLE, acceptance, 1, k)
    assert rate / ceiling.no_draft(TABLE, 1) == pytest.approx(gain, rel=0.05)
    far = ceiling.lockstep(TABLE, acceptance, 1, k, rtt_ms=20.0)
    assert 1e3 / far - 1e3 / rate == pytest.approx(20.0 / ceiling.tokens_per_round(acceptance, k))


def test_nobody_beats_the_ceiling() -> None:
    draw = random.Random(5)
    for _ in range(300):
        costs = Costs(
            draw.uniform(0.1, 20), draw.uniform(1, 60), draw.uniform(0, 1), draw.uniform(0, 1)
        )
        batch, acceptance = draw.choice((1, 2, 8, 64)), draw.random()
        rtt_ms, correction = draw.uniform(0, 30), draw.random()
        limit = ceiling.ceiling(costs, acceptance, batch) * (1 + 1e-9)
        k = ceiling.best_lockstep_k(costs, acceptance, batch)
        assert ceiling.lockstep(costs, acceptance, batch, k) <= limit
        ours = ceiling.best_draft_ahead(costs, acceptance, batch, rtt_ms, correction)
        assert ceiling.no_draft(costs, batch) <= ours <= limit


def test_prepared_corrections_and_a_short_wire_help() -> None:
    for batch in (1, 32):
        rates = [
            ceiling.best_draft_ahead(Costs(), 0.75, batch, 0.5, share) for share in (0, 0.5, 0.66)
        ]
        assert rates == sorted(rates)
        assert rates[0] < rates[2]
        far = ceiling.best_draft_ahead(Costs(), 0.75, batch, 100.0)
        assert far <= rates[0]


def test_a_draft_ahead_that_is_always_right_never_stops() -> None:
    costs = Costs(draft_ms=1.0, verify_ms=25.0, verify_row_ms=0.0)
    assert ceiling.draft_ahead(costs, 1.0, 2, 4) == pytest.approx(2 * 5 / 0.025)
    assert ceiling.draft_ahead_alone(costs, 1.0, 4) == pytest.approx(5 / 0.025)


def simulated(acceptance: float, k: int, correction: float) -> float:
    """Tokens per pass of one sequence, pass by pass, by what `draft_ahead` says happens."""
    draw = random.Random(7).random
    is_full, num_tokens, num_passes = True, 0, 100_000
    for _ in range(num_passes):
        num_wanted = k if is_full else 0
        num_accepted = 0
        while num_accepted < num_wanted and draw() < acceptance:
            num_accepted += 1
        num_tokens += num_accepted + 1
        was_guessed = num_accepted == num_wanted and draw() < acceptance
        is_full = was_guessed or draw() < correction
    return num_tokens / num_passes


@pytest.mark.parametrize("correction", [0.0, 0.66])
def test_draft_ahead_agrees_with_a_simulation(correction: float) -> None:
    costs = Costs(draft_ms=1.0, draft_row_ms=0.0, verify_ms=25.0, verify_row_ms=0.0)
    rate = ceiling.draft_ahead(costs, 0.75, 1, 4, 0.5, correction)
    assert rate * 0.025 == pytest.approx(simulated(0.75, 4, correction), rel=0.02)
