"""From measurements to rows of JSON and to tables, for the terminal and for Markdown.

Ratios are taken run by run, between schemes measured one after the other, and then the median.
Knows no process and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import Any, Literal

from rich.table import Table

from paceline.bench import ceiling as formulas
from paceline.bench.orchestration import Outcome, middle
from paceline.bench.schemes import Kind

Row = dict[str, Any]

_COLUMNS = (
    ("scheme", "scheme"),
    ("RTT ms", "rtt_ms"),
    ("K", "k"),
    ("tokens/s", "tokens_per_s"),
    ("spread", "spread"),
    ("/ no draft", "vs_no_draft"),
    ("/ baseline", "vs_baseline"),
    ("eta", "eta"),
    ("/ predicted", "of_prediction"),
    ("target busy", "target_busy"),
    ("gap us", "gap_us"),
)
# In Markdown, which nobody has to fit into a terminal.
_MORE_COLUMNS = (
    ("gap us / sequence", "gap_us_per_sequence"),
    ("draft busy", "draft_busy"),
    ("tokens / pass", "tokens_per_pass"),
    ("rows / pass", "rows_per_pass"),
    ("pass ms", "pass_ms"),
    ("expected tokens/s", "expected_tokens_per_s"),
    ("late passes", "late_passes"),
    ("failures", "failures"),
)


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """One per outcome, in order. Rates are tokens/s, medians over the runs; `spread` least and
    most. `ceiling_tokens_per_s` and `eta` are None where no formula holds. `k` is the mean number
    of proposals verified per sequence and pass; `gap_us` the time between two passes."""
    made = []
    for _, members in groupby(outcomes, key=lambda outcome: (outcome.suite, outcome.group)):
        group = list(members)
        made += [_row(outcome, group) for outcome in group]
    return made


def _row(outcome: Outcome, group: list[Outcome]) -> Row:
    setting, scheme, runs = outcome.cell.setting, outcome.cell.scheme, outcome.runs
    costs = setting.costs
    rate = median(outcome.rates)
    limit = None
    if setting.acceptance is not None:
        limit = formulas.ceiling(costs, setting.acceptance, setting.batch)
    predicted = middle(runs, "predicted_tokens_per_s")
    gap_us = 1e3 * (middle(runs, "gap_ms") or 0.0)
    return {
        "suite": outcome.suite,
        "group": outcome.group,
        "scheme": scheme.name,
        "draft_ms": costs.draft_ms,
        "verify_ms": costs.verify_ms,
        "rtt_ms": setting.rtt_ms,
        "acceptance": setting.acceptance,
        "batch": setting.batch,
        "tokens_per_s": _round(rate),
        "ceiling_tokens_per_s": _round(limit),
        "eta": _round(rate / limit if limit else None),
        "target_busy": _round(middle(runs, "target_busy")),
        "k": _round(middle(runs, "k")),
        "fan_out": scheme.fan_out,
        "runs": len(runs),
        "spread": [_round(min(outcome.rates)), _round(max(outcome.rates))],
        "vs_no_draft": _ratio(outcome, _find(group, outcome, Kind.NO_DRAFT.value)),
        "vs_baseline": _ratio(outcome, _baseline(group, outcome)),
        "predicted_tokens_per_s": _round(predicted),
        "of_prediction": _round(rate / predicted if predicted else None),
        "expected_tokens_per_s": _round(_expected(outcome)),
        "row_ms": costs.verify_row_ms,
        "draft_row_ms": costs.draft_row_ms,
        "corrections": list(setting.script.corrections),
        "measured_rtt_ms": _round(outcome.measured_rtt_ms),
        "draft_busy": _round(middle(runs, "draft_busy")),
        "tokens_per_pass": _round(middle(runs, "tokens_per_pass")),
        "rows_per_pass": _round(middle(runs, "rows_per_pass")),
        "pass_ms": _round(middle(runs, "pass_ms")),
        "gap_us": _round(gap_us),
        "gap_us_per_sequence": _round(gap_us / setting.batch),
        "late_passes": sum(run.num_late for run in runs),
        "failures": sum(run.num_failures for run in runs),
        "step": outcome.step,
    }


def _expected(outcome: Outcome) -> float | None:
    """What the formulas say of this scheme; None where they say nothing."""
    setting, scheme = outcome.cell.setting, outcome.cell.scheme
    costs, batch, acceptance = setting.costs, setting.batch, setting.acceptance
    if scheme.kind is Kind.NO_DRAFT:
        return formulas.no_draft(costs, batch)
    if acceptance is None or (scheme.kind is Kind.OURS and scheme.k is not None):
        return None
    if scheme.kind is Kind.OURS:
        shares = setting.script.corrections[: scheme.fan_out]
        correction = shares[-1] if shares else 0.0
        return formulas.best_draft_ahead(costs, acceptance, batch, setting.rtt_ms, correction)
    rtt_ms = setting.rtt_ms if scheme.kind is Kind.DISAGGREGATED else 0.0
    k = round(middle(outcome.runs, "k") or 0)
    return formulas.lockstep(costs, acceptance, batch, k, rtt_ms)


def _find(group: Iterable[Outcome], like: Outcome, name: str) -> Outcome | None:
    for other in group:
        is_same = other.cell.setting == like.cell.setting and other.step == like.step
        if is_same and other.cell.scheme.name == name:
            return other
    return None


def _baseline(group: list[Outcome], outcome: Outcome) -> Outcome | None:
    """The scheme that is named, or the fixed K that was fastest here."""
    if outcome.baseline != "best fixed":
        return _find(group, outcome, outcome.baseline)
    fixed = [other for other in group if other.cell.scheme.k is not None]
    return max(fixed, key=lambda other: median(other.rates), default=None)


def _ratio(outcome: Outcome, base: Outcome | None) -> list[float | None] | None:
    """Median, least and most of the ratios of runs that followed each other."""
    if base is None or base is outcome:
        return None
    ratios = [mine / its for mine, its in zip(outcome.rates, base.rates, strict=True) if its]
    if not ratios:
        return None
    return [_round(median(ratios)), _round(min(ratios)), _round(max(ratios))]


def _round(value: float | None) -> float | None:
    """Four digits: more would pretend."""
    return None if value is None else float(f"{value:.4g}")


# -- tables ---------------------------------------------------------------------------------


def captions(made: Sequence[Row], command: str) -> list[str]:
    """What must be known to read the tables."""
    lines = [f"`{command}`"]
    kinds = _by(made, "draft_ms", "draft_row_ms", "verify_ms", "row_ms")
    for costs, members in kinds:
        titles = dict.fromkeys(str(row["group"]) for row in members)
        where = f": {'; '.join(titles)}" if len(kinds) > 1 else ""
        lines.append(
            f"draft {costs[0]:g} ms + {costs[1]:g} ms a row, target {costs[2]:g} ms +"
            f" {costs[3]:g} ms a row{where}"
        )
    shares = {tuple(row["corrections"]) for row in made}
    for share in sorted(shares):
        text = ", ".join(f"{value:g}" for value in share)
        lines.append(f"a correction is among the draft's first 1, 2, ... runner-ups: {text}")
    rtts = {(row["rtt_ms"], row["measured_rtt_ms"]) for row in made if row["measured_rtt_ms"]}
    for rtt_ms, measured in sorted(rtts):
        lines.append(f"RTT {rtt_ms:g} ms: measured {measured:g} ms by pings")
    return lines


def _by(made: Sequence[Row], *names: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in made:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.items())


def tables(made: Sequence[Row]) -> list[Table]:
    """One per group, for a terminal."""
    drawn = []
    for title, header, lines in _grids(made, _COLUMNS):
        table = Table(title=title, title_justify="left")
        for name in header:
            justify: Literal["left", "right"] = "left" if name == "scheme" else "right"
            table.add_column(name, justify=justify, no_wrap=True)
        for line in lines:
            table.add_row(*line)
        drawn.append(table)
    return drawn


def markdown(made: Sequence[Row], command: str) -> str:
    """The same tables and how they were made."""
    parts = ["\n".join(f"- {line}" for line in captions(made, command))]
    for title, header, lines in _grids(made, (*_COLUMNS, *_MORE_COLUMNS)):
        rule = [":--" if name == "scheme" else "--:" for name in header]
        body = "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))
        parts.append(f"**{title}**\n\n{body}")
    return "\n\n".join(parts) + "\n"


def _grids(
    made: Sequence[Row], columns: Sequence[tuple[str, str]]
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and cells of each group; a column that says nothing there is left out."""
    grids = []
    for (suite, group), members in _by(made, "suite", "group"):
        told = [
            (name, key)
            for name, key in columns
            if any(row[key] not in (None, 0) for row in members) or key == "scheme"
        ]
        limits = {row["ceiling_tokens_per_s"] for row in members} - {None}
        ceiling = f"; ceiling {limits.pop():g} tokens/s" if len(limits) == 1 else ""
        lines = [[_cell(row[key]) for _, key in told] for row in members]
        grids.append((f"{suite}: {group}{ceiling}", [name for name, _ in told], lines))
    return grids


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        if len(value) == 3:
            return f"{value[0]:.3g} ({value[1]:.3g}-{value[2]:.3g})"
        return "-".join(f"{each:g}" for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
