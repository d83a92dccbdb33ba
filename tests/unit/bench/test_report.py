from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench import ceiling
from paceline.bench.ceiling import Costs
from paceline.bench.orchestration import Outcome
from paceline.bench.report import captions, markdown, rows, tables
from paceline.bench.schemes import Cell, Effort, Kind, Measurement, Scheme, steady
from paceline.bench.suites import COLOCATED, EFFORTS, NO_DRAFT, SUITES, Group, Options, Steps

SETTING = steady(Costs(), 0.5, 32, 0.75)
OURS = Scheme(Kind.OURS, fan_out=2)


def measured(rate: float, **changes: object) -> Measurement:
    base = Measurement(rate, 0.9, 60.0, 90.0, 29.5, 0.64, k=2.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def outcome(scheme: Scheme, *rates: float, baseline: str = "colocated_lockstep") -> Outcome:
    runs = tuple(measured(rate) for rate in rates)
    return Outcome("single", "batch 32", baseline, Cell(SETTING, scheme), runs)


def test_a_row_says_what_later_checks_rely_on() -> None:
    runs = tuple(measured(rate, predicted_tokens_per_s=2000.0) for rate in (1800.0, 1900.0, 2100.0))
    row = rows([Outcome("single", "batch 32", "", Cell(SETTING, OURS), runs, 0.61)])[0]
    limit = ceiling.ceiling(Costs(), 0.75, 32)
    assert row["scheme"] == "ours"
    assert (row["draft_ms"], row["verify_ms"], row["rtt_ms"]) == (3.0, 25.0, 0.5)
    assert (row["acceptance"], row["batch"], row["target_busy"]) == (0.75, 32, 0.9)
    assert row["tokens_per_s"] == 1900.0
    assert row["spread"] == [1800.0, 2100.0]
    assert row["ceiling_tokens_per_s"] == pytest.approx(limit, rel=1e-3)
    assert row["eta"] == pytest.approx(1900.0 / limit, rel=1e-3)
    assert (row["predicted_tokens_per_s"], row["of_prediction"]) == (2000.0, 0.95)
    assert (row["runs"], row["row_ms"], row["fan_out"], row["k"]) == (3, 0.05, 2, 2.0)
    assert (row["gap_us"], row["gap_us_per_sequence"]) == (640.0, 20.0)
    assert row["measured_rtt_ms"] == 0.61
    assert row["expected_tokens_per_s"] == pytest.approx(
        ceiling.best_draft_ahead(Costs(), 0.75, 32, 0.5, 0.66), rel=1e-3
    )


def test_ratios_pair_the_runs_that_followed_each_other() -> None:
    """The machine was slow in the second run: that must not show in the ratios."""
    made = rows(
        [
            outcome(NO_DRAFT, 100.0, 50.0, 110.0),
            outcome(COLOCATED, 200.0, 100.0, 220.0),
            outcome(OURS, 240.0, 130.0, 264.0),
        ]
    )
    assert made[2]["vs_no_draft"] == [2.4, 2.4, 2.6]
    assert made[2]["vs_baseline"] == [1.2, 1.2, 1.3]
    assert made[0]["vs_no_draft"] is None
    assert made[1]["vs_baseline"] is None


def test_groups_settings_and_steps_are_not_mixed() -> None:
    far = replace(outcome(OURS, 240.0), cell=Cell(replace(SETTING, rtt_ms=9.0), OURS))
    other = replace(outcome(OURS, 240.0), group="batch 1")
    later = replace(outcome(OURS, 240.0), step=2)
    made = rows([outcome(NO_DRAFT, 100.0), far, later, other])
    assert [row["vs_no_draft"] for row in made] == [None] * 4


def test_the_baseline_may_be_the_best_fixed_k() -> None:
    made = rows(
        [
            outcome(Scheme(Kind.OURS, 2, label="fixed_2"), 100.0, 102.0, baseline="best fixed"),
            outcome(Scheme(Kind.OURS, 4, label="fixed_4"), 120.0, 118.0, baseline="best fixed"),
            outcome(Scheme(Kind.OURS, label="adaptive"), 132.0, 118.0, baseline="best fixed"),
        ]
    )
    assert made[2]["vs_baseline"] == [1.05, 1.0, 1.1]
    assert made[1]["vs_baseline"] is None


def test_where_no_formula_holds_there_is_no_eta() -> None:
    mixed = Cell(replace(SETTING, acceptance=None), OURS)
    row = rows([Outcome("adaptive", "mix", "", mixed, (measured(100.0),))])[0]
    assert row["ceiling_tokens_per_s"] is None
    assert row["eta"] is None
    assert row["expected_tokens_per_s"] is None
    assert row["tokens_per_s"] == 100.0


def test_tables_say_how_they_were_made() -> None:
    made = rows([outcome(NO_DRAFT, 1000.0), outcome(OURS, 2000.0)])
    text = markdown(made, "paceline bench orchestration --suite single")
    assert text.startswith("- `paceline bench orchestration --suite single`\n")
    assert "draft 3 ms + 0.01 ms a row, target 25 ms + 0.05 ms a row" in text
    assert "0.5, 0.66, 0.76, 0.85" in text
    assert "| ours | 0.5 | 2 | 2000 | 2000-2000 | 2 (2-2) |" in text
    assert "/ predicted" not in text  # nobody predicted anything
    assert [table.row_count for table in tables(made)] == [2]
    assert len(captions(made, "x")) == 3


def test_every_suite_compares_something_and_has_an_effort() -> None:
    assert set(SUITES) == set(EFFORTS)
    for name, make in SUITES.items():
        for part in make(Options()):
            schemes = part.schemes if isinstance(part, Steps) else [c.scheme for c in part.cells]
            assert NO_DRAFT in schemes, name
            assert len({scheme.name for scheme in schemes}) > 1


def test_the_grid_is_the_issues() -> None:
    cells = [cell for part in SUITES["grid"](Options()) for cell in group_of(part).cells]
    ours = [cell.setting for cell in cells if cell.scheme.kind is Kind.OURS]
    assert {setting.rtt_ms for setting in ours} == {0.5, 2.0, 10.0}
    assert {setting.acceptance for setting in ours} == {0.6, 0.75, 0.9}
    assert {setting.batch for setting in ours} == {1, 8, 32, 64}
    assert len(ours) == 36
    assert {cell.scheme.kind for cell in cells} == set(Kind)


def test_quick_takes_less_than_three_minutes() -> None:
    assert seconds_of("quick") < 160


def test_the_fan_out_that_is_asked_for_is_ours() -> None:
    cells = group_of(SUITES["single"](Options(fan_out=4))[0]).cells
    fans = {cell.scheme.name: cell.scheme.fan_out for cell in cells}
    assert fans["ours_chain"] == 0
    assert fans["ours_fan_out_4"] == 4
    assert Options().fan_out == 2


def group_of(part: object) -> Group:
    assert isinstance(part, Group)
    return part


def seconds_of(name: str) -> float:
    """Roughly, with a second to start each service and the search for lock-step's K."""
    effort: Effort = EFFORTS[name]
    total = 0.0
    for part in SUITES[name](Options()):
        cells = {
            cell if cell.scheme.kind in (Kind.OURS, Kind.DISAGGREGATED) else cell.scheme
            for cell in group_of(part).cells
        }
        for cell in cells:
            scheme = cell.scheme if isinstance(cell, Cell) else cell
            warmup_s = effort.warmup_s if scheme.kind is Kind.OURS else 0.3
            start_s = 1.0 if scheme.kind is Kind.OURS else 0.1
            total += effort.runs * (warmup_s + effort.seconds + start_s) + 3 * scheme.is_lockstep
    return total
