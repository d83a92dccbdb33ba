"""`paceline bench orchestration`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.suites import Options

# Wider than many a terminal: a line that wraps is easier to read than cells that are cut.
TABLE_COLUMNS = 200
SUITE_NAMES = ("grid", "single", "adaptive", "adversarial", "steps")


def bench_orchestration(
    quick: Annotated[
        bool, typer.Option("--quick", help="A few settings, under 3 minutes.")
    ] = False,
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITE_NAMES)}.")] = "grid",
    json_file: Annotated[Path | None, typer.Option("--json", help="Rows go here.")] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Tables go here.")
    ] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs of each scheme.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Length of a run.")] = None,
    warmup: Annotated[float | None, typer.Option(min=0.0, help="Seconds before it.")] = None,
    draft_ms: Annotated[float, typer.Option(min=0.0, help="A draft pass.")] = 3.0,
    verify_ms: Annotated[float, typer.Option(min=0.01, help="A target pass.")] = 25.0,
    draft_row_ms: Annotated[float, typer.Option(min=0.0, help="And each row of it.")] = 0.01,
    row_ms: Annotated[float, typer.Option(min=0.0, help="And each row of it (target).")] = 0.05,
    fan_out: Annotated[
        int, typer.Option(min=0, max=4, help="Likely corrections that our draft prepares for.")
    ] = 2,
    corrections: Annotated[
        str,
        typer.Option(help="How often they are the draft's 1st, 2nd at the latest, ... runner-up."),
    ] = "0.5,0.66,0.76,0.85",
) -> None:
    """Measure scheduling against its ceiling, with engines that only cost time."""
    import asyncio
    from dataclasses import replace

    from rich.console import Console

    from paceline.bench.orchestration import run_suite
    from paceline.bench.report import captions, markdown, rows, tables
    from paceline.bench.suites import EFFORTS, SUITES
    from paceline.cli.console import out, status_display

    if quick and suite != "grid":
        raise ConfigError("--quick and --suite exclude each other")
    name = "quick" if quick else suite
    if name not in SUITES:
        raise ConfigError(f"no suite {name!r}; there are {', '.join(SUITE_NAMES)}")
    effort = EFFORTS[name]
    effort = replace(
        effort,
        runs=effort.runs if runs is None else runs,
        warmup_s=effort.warmup_s if warmup is None else warmup,
        seconds=effort.seconds if seconds is None else seconds,
    )
    options = _options(draft_ms, verify_ms, draft_row_ms, row_ms, fan_out, corrections)
    for path in (json_file, markdown_file):
        if path is not None:
            _write(path, "", "a")  # a path that cannot be written fails now, not in half an hour
    with status_display() as say:
        outcomes = asyncio.run(run_suite(name, SUITES[name](options), effort, say))
        say("")
    made = rows(outcomes)
    wide = Console(width=max(out.width, TABLE_COLUMNS), soft_wrap=False, highlight=False)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    for line in captions(made, command):
        out.print(line, markup=False)
    for table in tables(made):
        wide.print(table)
    if json_file is not None:
        _write(json_file, _json(made))
    if markdown_file is not None:
        _write(markdown_file, markdown(made, command))


def _options(
    draft_ms: float,
    verify_ms: float,
    draft_row_ms: float,
    row_ms: float,
    fan_out: int,
    corrections: str,
) -> Options:
    from paceline.bench.ceiling import Costs
    from paceline.bench.suites import Options
    from paceline.engine.scripted import Script

    try:
        shares = tuple(float(share) for share in corrections.split(",") if share.strip())
        Script.steady(0.0, shares)
    except ValueError as error:
        raise ConfigError(f"--corrections {corrections}: {error}") from None
    return Options(Costs(draft_ms, verify_ms, draft_row_ms, row_ms), shares, fan_out)


def _json(made: list[dict[str, object]]) -> str:
    import json

    return json.dumps(made, indent=1) + "\n"


def _write(path: Path, text: str, mode: Literal["a", "w"] = "w") -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
