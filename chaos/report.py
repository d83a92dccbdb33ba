"""The table of a run, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from chaos.run import Result

NOTHING = "-"  # nothing of the kind was there to be judged
COLUMNS = (
    ("scenario", 18), ("seed", 6), ("fired", 8), ("requests", 9), ("failed", 7),
    ("identical", 10), ("lost", 5), ("dup", 4), ("stall", 7), ("stall s", 8),
    ("back s", 7), ("verdict", 0),
)  # fmt: skip


def header() -> str:
    return _row([name for name, _ in COLUMNS])


def line(result: Result) -> str:
    """One run, and its own figures below it."""
    row = _judged([result], result.seed)
    return row + "".join(f"\n    {name}: {value}" for name, value in result.figures.items())


def table(results: Sequence[Result]) -> str:
    """One row for each scenario: sums over its seeds, and the worst of what has one."""
    rows = ["", "over all seeds: sums, and the worst stall and return"]
    rows.append(_row(["scenario", "seeds", *(name for name, _ in COLUMNS[2:])]))
    for name in dict.fromkeys(result.scenario for result in results):
        those = [result for result in results if result.scenario == name]
        rows.append(_judged(those, len(those)))
    return "\n".join([*rows, ""])


def _judged(results: Sequence[Result], seed: int) -> str:
    """`stall` is in rounds of the undisturbed service."""
    skipped = next((result.skipped for result in results if result.skipped), "")
    if skipped:
        return _row([results[0].scenario, seed, f"skipped: {skipped}"])
    found = [result.findings for result in results]
    has_texts, has_gaps = any(f.tokens_compared for f in found), any(f.num_gaps for f in found)
    broken = [text for result in results for text in result.violations]
    return _row(
        [
            results[0].scenario,
            seed,
            sum(result.faults_fired for result in results),
            sum(f.requests for f in found),
            sum(f.failed for f in found),
            ("yes" if all(f.text_identical for f in found) else "NO") if has_texts else NOTHING,
            sum(f.tokens_lost for f in found) if has_texts else NOTHING,
            sum(f.tokens_duplicated for f in found) if has_texts else NOTHING,
            f"{max(r.worst_stall_rounds for r in results):.1f}" if has_gaps else NOTHING,
            f"{max(f.worst_stall_s for f in found):.2f}" if has_gaps else NOTHING,
            f"{max(result.draft_back_s for result in results):.1f}",
            "BROKEN: " + "; ".join(broken) if broken else "ok",
        ]
    )


def _row(cells: Iterable[object]) -> str:
    """Fewer cells than columns: the last one may be long."""
    padded = [str(cell).ljust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=False)]
    return "".join(padded).rstrip()


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
