from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--suite", "everything"], "no suite 'everything'; there are grid, single, adaptive"),
        (["--corrections", "0.5,0.4"], "corrections must rise"),
        (["--corrections", "much"], "--corrections much"),
        (["--json", "/proc/nowhere/rows.json"], "cannot write /proc/nowhere/rows.json"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    arguments: list[str], problem: str
) -> None:
    result = CliRunner().invoke(app, ["bench", "orchestration", *arguments])
    assert result.exit_code == 1
    assert problem in result.stderr


def test_a_short_run_writes_rows_and_tables(tmp_path: Path) -> None:
    """One pass of every step, with a target that takes a millisecond."""
    rows, tables = tmp_path / "new" / "rows.json", tmp_path / "tables.md"
    short = "--runs 1 --seconds 0.1 --warmup 0 --draft-ms 0.3 --verify-ms 1 --row-ms 0"
    files = ["--json", str(rows), "--markdown", str(tables)]
    arguments = ["bench", "orchestration", "--suite", "steps", *short.split(), *files]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    made = json.loads(rows.read_text())
    assert [row["batch"] for row in made] == [n for n in (1, 4, 16, 64, 16, 4, 1) for _ in "ab"]
    assert {row["scheme"] for row in made} == {"no_draft", "ours"}
    assert {row["verify_ms"] for row in made} == {1.0}
    assert "step 4, 64 clients" in result.output
    assert "step 4, 64 clients" in tables.read_text()
