"""The table of a run, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from chaos.run import Result

COLUMNS = (
    ("scenario", 18), ("seed", 5), ("fired", 6), ("requests", 9), ("failed", 7),
    ("identical", 10), ("lost", 5), ("dup", 4), ("stall", 7), ("stall s", 8),
    ("back s", 7), ("verdict", 0),
)  # fmt: skip


def header() -> str:
    return "".join(name.ljust(width) for name, width in COLUMNS).rstrip()


def line(result: Result) -> str:
    """One run. `stall` is in rounds of the undisturbed service."""
    if result.skipped:
        return f"{result.scenario.ljust(18)}{str(result.seed).ljust(5)}skipped: {result.skipped}"
    found = result.findings
    verdict = "ok" if not result.violations else "BROKEN: " + "; ".join(result.violations)
    cells = (
        result.scenario,
        result.seed,
        result.faults_fired,
        found.requests,
        found.failed,
        "yes" if found.text_identical else "NO",
        found.tokens_lost,
        found.tokens_duplicated,
        f"{result.worst_stall_rounds:.1f}",
        f"{found.worst_stall_s:.2f}",
        f"{result.draft_back_s:.1f}",
        verdict,
    )
    row = "".join(
        str(cell).ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)
    ).rstrip()
    return row + "".join(f"\n    {name}: {value}" for name, value in result.figures.items())


def summary(results: Sequence[Result]) -> str:
    """What a reader wants to know first, last."""
    done = [result for result in results if not result.skipped]
    broken = [result for result in done if result.violations]
    tokens = sum(result.findings.tokens_compared for result in done)
    requests = sum(result.findings.requests for result in done)
    fired = sum(result.faults_fired for result in done)
    return (
        f"{len(done)} runs, {fired} faults fired, {requests} requests, {tokens} tokens compared: "
        f"{len(broken)} broken, {len(results) - len(done)} skipped"
    )


def write(results: Sequence[Result], path: Path) -> None:
    rows = [result.as_json() for result in results]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
