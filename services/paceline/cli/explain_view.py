"""What `paceline explain` prints: per target the decision, its inputs and its candidates.

Reads the JSON of GET /fleet and trusts none of it: what is missing is shown as "-".
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.fleet_pools import pools
from paceline.cli.values import (
    Json,
    dicts,
    figure,
    fixed,
    listed,
    number,
    percent,
    whole,
    word,
)

CHOSEN = "=>"
CEILINGS = {
    "max_draft_ahead": "draft-ahead",
    "max_fan_out": "fan-out",
    "max_num_speculative_tokens": "K",
}


def show_fleet(console: Console, fleet: Json) -> None:
    """Every model's targets, then its drafts."""
    found = pools(fleet)
    for name, pool in found:
        if len(found) > 1:
            _line(console, f"model {name}\n", "bold underline")
        _show_pool(console, pool)


def _show_pool(console: Console, fleet: Json) -> None:
    if problem := fleet.get("problem"):
        _line(console, f"{word(problem)}\n", "bold red")
        return
    targets, drafts = dicts(fleet.get("targets")), dicts(fleet.get("drafts"))
    if error := fleet.get("config_error"):
        _line(console, f"{error}; the values before stay in force", "bold red")
    if not targets:
        _line(console, "No target has reported to the controller.", "")
    for target in targets:
        _show_target(console, target)
    if drafts:
        console.print(_drafts_table(drafts))
    for name, shown in (("targets", targets), ("drafts", drafts)):
        hidden = whole(fleet.get(f"num_{name}")) - len(shown)
        if hidden > 0:
            _line(console, f"and {hidden} more {name}", "")


def _show_target(console: Console, target: Json) -> None:
    _line(console, f"target {word(target.get('replica_id'))}", "bold")
    drafts = ", ".join(map(word, listed(target.get("drafts")))) or "none"
    _line(
        console,
        f"  {whole(target.get('num_running'))} running, {whole(target.get('num_waiting'))} "
        f"waiting; K in force {figure(target.get('num_speculative_tokens'))}; drafts: {drafts}",
        "",
    )
    if error := target.get("config_error"):
        _line(console, f"  {error}; the values before stay in force", "bold red")
    for kind in dicts(target.get("classes")):
        _line(console, f"  {_class_line(kind)}", "")
    if limits := _ceilings(target.get("ceilings")):
        busy = percent(target.get("draft_utilization"))
        _line(console, f"  drafts are scarce (busy {busy}): {limits}", "yellow")
    explanation = target.get("explanation")
    if not isinstance(explanation, dict):
        _line(console, "  It has not decided anything yet.\n", "")
        return
    inputs = explanation.get("inputs")
    if isinstance(inputs, dict) and inputs:
        console.print(_inputs_table(inputs))
    choices = dicts(explanation.get("choices"))
    if choices:
        console.print(_choices_table(choices, whole(explanation.get("chosen"))))
    _line(console, f"  {word(explanation.get('reason'))}\n", "")


def _class_line(kind: Json) -> str:
    rate, num = percent(kind.get("acceptance_rate")), figure(kind.get("num_draft_tokens"))
    mode, draft_model = word(kind.get("mode")), word(kind.get("draft_model"))
    temperature = figure(kind.get("temperature"))
    return (
        f"accepted {rate} of {num} proposals ({mode}, temperature {temperature}, "
        f"draft {draft_model})"
    )


def _inputs_table(inputs: Json) -> Table:
    table = Table(title="  decided from", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in inputs.items():
        table.add_row(Text(word(name)), figure(value))
    return table


def _choices_table(choices: list[Json], chosen: int) -> Table:
    table = Table(title="  candidates (one pass)", title_justify="left")
    table.add_column("")
    for heading in ("K", "rows", "tokens", "pass ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for place, choice in enumerate(choices):
        pass_us, tokens = number(choice.get("pass_us")), number(choice.get("tokens_per_pass"))
        per_s = 1e6 * tokens / pass_us if pass_us and tokens is not None else None
        table.add_row(
            CHOSEN if place == chosen else "",
            figure(choice.get("num_speculative_tokens")),
            figure(choice.get("rows")),
            fixed(tokens, 2),
            fixed(None if pass_us is None else pass_us / 1e3, 2),
            fixed(per_s, 1),
            style="bold green" if place == chosen else "",
        )
    return table


def _drafts_table(drafts: list[Json]) -> Table:
    table = Table(title="drafts", title_justify="left")
    for heading in ("draft", "sequences", "busy", "step ms", "batch", "targets", ""):
        table.add_column(heading, justify="left" if heading == "draft" else "right")
    for draft in drafts:
        table.add_row(
            Text(word(draft.get("replica_id"))),
            f"{whole(draft.get('num_sessions'))} / {whole(draft.get('max_sessions'))}",
            percent(draft.get("busy_share")),
            fixed(number(draft.get("step_ms")), 2),
            fixed(number(draft.get("batch")), 1),
            str(len(listed(draft.get("targets")))),
            "draining" if draft.get("is_draining") is True else "",
        )
    return table


def _ceilings(data: Any) -> str:
    limits = data if isinstance(data, dict) else {}
    given = {what: limits.get(name) for name, what in CEILINGS.items()}
    said = [f"{what} at most {figure(v)}" for what, v in given.items() if v is not None]
    return ", ".join(said)


def _line(console: Console, text: str, style: str) -> None:
    console.print(Text(text, style=style))
