"""Rows, baselines, the search for a ratio, and the command around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.simulate.agreement import compare, read_bench, setting
from paceline.simulate.load import Run
from paceline.simulate.results import Study
from tests.unit.simulate.settings import config, raw

SHORT: dict[str, Any] = {"batch": 4, "duration_s": 2.0}


def test_a_row_has_everything() -> None:
    settings = config(num_targets=2, output_tokens={"mean": 30}, **SHORT)
    row = Study(()).run(settings, "one")
    assert row["tokens_per_s"] == pytest.approx(2 * row["tokens_per_s_per_target"], rel=1e-3)
    assert row["cost_per_hour"] == 2 * 4 + 1
    expected = 1e6 * 9 / (3600 * row["tokens_per_s"])
    assert row["cost_per_million_tokens"] == pytest.approx(expected, rel=1e-4)
    assert row["ratio"] == pytest.approx(
        row["tokens_per_s"] / row["baseline"]["tokens_per_s"], rel=1e-3
    )
    assert row["baseline"]["cost_per_million_tokens"] > 0
    assert 0 < row["acceptance_rate"] < 1
    assert 0 < row["draft_busy"] <= 1
    assert row["mean_batch"] == pytest.approx(4, abs=1)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert row[name]["p50"] <= row[name]["p90"] <= row[name]["p99"]
    assert json.loads(json.dumps(row)) == row


def test_goodput_is_what_keeps_the_slo() -> None:
    settings = config(output_tokens={"mean": 20}, slo={"tpot_ms": 1.0}, **SHORT)
    row = Study(()).run(settings, "strict")
    assert row["requests_per_s"] > 0
    assert row["goodput_requests_per_s"] == row["goodput_share"] == 0
    lax = config(output_tokens={"mean": 20}, slo={"ttft_ms": 1e6, "tpot_ms": 1e6}, **SHORT)
    row = Study(()).run(lax, "lax")
    assert row["goodput_share"] == 1
    assert row["goodput_requests_per_s"] == row["requests_per_s"]


def test_without_drafts_the_ratio_is_one() -> None:
    row = Study(()).run(config(num_drafts=0, **SHORT), "alone")
    assert row["ratio"] == row["cost_ratio"] == 1
    assert row["draft_busy"] is row["acceptance_rate"] is None


def test_equal_baselines_run_once() -> None:
    said: list[str] = []
    study = Study((), lambda what, share: said.append(what) if share == 1 else None)
    runs = [Run({"x": a}, config(acceptance=a, **SHORT)) for a in (0.5, 0.9)]
    rows = study.sweep(runs)
    assert rows[0]["baseline"] == rows[1]["baseline"]
    assert sum("without drafts" in what for what in said) == 1


def found(goal: str, price: float, acceptance: float = 0.9, **find: Any) -> dict[str, Any]:
    data = raw(num_targets=2, batch=4, duration_s=1.0, acceptance=acceptance, has_baseline=False)
    data["hardware"]["drafts"]["small"]["price_per_hour"] = price
    data["find"] = {"goal": goal, "max_drafts_per_target": 1, **find}
    settings = type(config()).model_validate(data)
    return Study(()).find(settings)


def test_the_ratio_follows_the_price() -> None:
    cheap, dear = found("cost", 0.01), found("cost", 100.0)
    assert dear["num_drafts"] == 0
    assert cheap["num_drafts"] >= 1
    assert "tokens/s" in cheap["reason"]
    costs = {row["num_drafts"]: row["cost_per_million_tokens"] for row in cheap["tried"]}
    assert costs[cheap["num_drafts"]] <= 1.01 * min(costs.values())


def test_most_tokens_with_the_fewest_drafts() -> None:
    answer = found("throughput", 100.0, acceptance=0.6)
    rates = {row["num_drafts"]: row["tokens_per_s"] for row in answer["tried"]}
    best = rates[answer["num_drafts"]]
    assert best >= 0.99 * max(rates.values())
    fewer = [rate for number, rate in rates.items() if number < answer["num_drafts"]]
    assert all(rate < 0.99 * max(rates.values()) for rate in fewer)


BENCH = {
    "draft_ms": 3.0,
    "verify_ms": 25.0,
    "row_ms": 0.05,
    "draft_row_ms": 0.01,
    "rtt_ms": 0.5,
    "acceptance": 0.75,
    "batch": 8,
    "gap_us": 400.0,
    "step": None,
}


def test_against_the_bench(tmp_path: Path) -> None:
    """No draft is exact: 8 sequences in passes of 25.4 ms and a gap of 0.4 ms."""
    path = tmp_path / "bench.json"
    rows: list[dict[str, Any]] = [
        {**BENCH, "scheme": "no_draft", "tokens_per_s": 8 / 0.0258},
        {**BENCH, "scheme": "fixed_4", "tokens_per_s": 100.0, "fan_out": 0},
        {**BENCH, "scheme": "colocated_lockstep", "tokens_per_s": 500.0},
    ]
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    usable = read_bench(path)
    assert [row["scheme"] for row in usable] == ["no_draft", "fixed_4"]
    settings = config(duration_s=2.0)
    fixed = setting(settings, usable[1], usable)
    assert fixed.target_kind.overhead_ms == pytest.approx(0.4)
    assert fixed.speculation.lookahead == "fixed"
    assert fixed.speculation.num_speculative_tokens == 4
    lone = {**usable[1], "batch": 1, "gap_us": 9000.0}  # mostly waits for the draft
    quiet = {**usable[0], "batch": 1, "gap_us": 300.0}
    assert setting(settings, lone, [lone, quiet]).target_kind.overhead_ms == 0.3
    alone, ours = compare(settings, usable)
    assert alone.agrees
    assert alone.difference == pytest.approx(0, abs=0.015)
    assert not ours.agrees
    assert ours.difference > 0.05


def run_cli(tmp_path: Path, data: Any, *more: str) -> tuple[int, str, Path]:
    path, out = tmp_path / "fleet.yaml", tmp_path / "out.json"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    result = CliRunner().invoke(app, ["simulate", str(path), "--json", str(out), *more])
    return result.exit_code, result.output, out


def test_the_command(tmp_path: Path) -> None:
    data = raw(duration_s=1.0, batch=2, sweep={"fleet.num_drafts": [0, 1]})
    code, output, out = run_cli(tmp_path, data)
    assert code == 0, output
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [row["num_drafts"] for row in report["rows"]] == [0, 1]
    assert report["config"]["fleet"]["target"] == "large"
    assert report["find"] is None


def test_the_command_reads_a_trace_beside_its_file(tmp_path: Path) -> None:
    lines = ["time_s,prompt_tokens,output_tokens,class", "0.1,8,10,default", "0.2,8,10,default"]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    data = raw(duration_s=2.0, warmup_s=0, has_baseline=False)
    data["traffic"]["arrivals"] = {"process": "trace", "trace": "t.csv"}
    code, output, out = run_cli(tmp_path, data)
    assert code == 0, output
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert row["requests_per_s"] == 1
    assert row["tokens_per_s"] == 10


def test_errors_are_sentences(tmp_path: Path) -> None:
    code, output, _ = run_cli(tmp_path, raw(nothing=1))
    assert code == 1
    assert "unknown key nothing" in output
    assert "Traceback" not in output


def test_disagreement_is_an_exit_code(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    row = {**BENCH, "scheme": "no_draft", "tokens_per_s": 1000.0}
    bench.write_text(json.dumps({"rows": [row]}), encoding="utf-8")
    code, output, _ = run_cli(tmp_path, raw(duration_s=1.0), "--against", str(bench))
    assert code == 1
    assert "1 settings differ by more than 5%" in output
    bench.write_text("{}", encoding="utf-8")
    code, output, _ = run_cli(tmp_path, raw(), "--against", str(bench))
    assert code == 1
    assert "has no rows" in output
