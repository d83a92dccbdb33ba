"""`paceline bench tracing`: every mode in turn, with passes of a few milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.bench.tracing import MODES, Cost, Mode, Run, _cost
from paceline.cli.main import app


def test_a_short_run_prints_every_mode_and_writes_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    short = "--batch 2 --runs 1 --seconds 0.3 --warmup 0.1 --draft-ms 0.3 --verify-ms 3"
    arguments = ["bench", "tracing", *short.split(), "--json", str(rows)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    made = json.loads(rows.read_text())
    assert [row["sample_ratio"] for row in made] == [None, 0.0, 0.1, 1.0]
    assert [row["num_spans"] > 0 for row in made][::3] == [False, True]
    assert made[1]["num_spans"] == 0
    assert all(row["tokens_per_s"] > 0 and row["cpu_ms"] > 0 for row in made)
    assert made[0]["ratio"] == 1.0
    assert "sample ratio" in result.output


def test_what_cannot_be_written_is_said_before_anything_runs() -> None:
    arguments = ["bench", "tracing", "--json", "/proc/nowhere/rows.json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "/proc/nowhere/rows.json" in result.stderr


def test_runs_are_compared_with_those_beside_them() -> None:
    """A slow minute of the machine hits both."""
    runs = [Run(90.0, 2.0, 5, 1), Run(40.0, 4.0, 7, 0), Run(9.9, 3.0)]
    cost = _cost(Mode(1.0), runs, [100.0, 50.0, 10.0])
    assert cost == Cost(Mode(1.0), tuple(runs), cost.ratios)
    assert cost.ratios == pytest.approx((0.9, 0.8, 0.99))
    assert (cost.ratio, cost.tokens_per_s, cost.cpu_ms) == (pytest.approx(0.9), 40.0, 3.0)
    assert (cost.num_spans, cost.num_dropped) == (12, 1)


def test_where_the_spans_of_a_mode_go(tmp_path: Path) -> None:
    assert not MODES[0].config(tmp_path, "http://127.0.0.1:4317").is_on
    assert MODES[2].config(tmp_path, "").file_dir == str(tmp_path)
    sent = MODES[3].config(tmp_path, "http://127.0.0.1:4317")
    assert (sent.otlp_endpoint, sent.file_dir) == ("http://127.0.0.1:4317", "")
