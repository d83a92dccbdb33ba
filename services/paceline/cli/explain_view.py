"""What `paceline explain` prints: per target the decision, its inputs and its candidates.

Reads the JSON of GET /fleet and trusts none of it: what is missing is shown as "-".
"""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Json = dict[str, Any]

CHOSEN = "=>"
NOTHING = "-"
CEILINGS = {
    "max_draft_ahead": "draft-ahead",
    "max_fan_out": "fan-out",
    "max_num_speculative_tokens": "K",
}


def show_fleet(console: Console, fleet: Json) -> None:
    """Every target, then the drafts."""
    targets, drafts = _dicts(fleet.get("targets")), _dicts(fleet.get("drafts"))
    if error := fleet.get("config_error"):
        _line(console, f"{error}; the values before stay in force", "bold red")
    if not targets:
        _line(console, "No target has reported to the controller.", "")
    for target in targets:
        _show_target(console, target)
    if drafts:
        console.print(_drafts_table(drafts))
    for name, shown in (("targets", targets), ("drafts", drafts)):
        hidden = _whole(fleet.get(f"num_{name}")) - len(shown)
        if hidden > 0:
            _line(console, f"and {hidden} more {name}", "")


def _show_target(console: Console, target: Json) -> None:
    _line(console, f"target {_word(target.get('replica_id'))}", "bold")
    drafts = ", ".join(map(_word, _list(target.get("drafts")))) or "none"
    _line(
        console,
        f"  {_whole(target.get('num_running'))} running, {_whole(target.get('num_waiting'))} "
        f"waiting; K in force {_figure(target.get('num_speculative_tokens'))}; drafts: {drafts}",
        "",
    )
    if error := target.get("config_error"):
        _line(console, f"  {error}; the values before stay in force", "bold red")
    for kind in _dicts(target.get("classes")):
        _line(console, f"  {_class_line(kind)}", "")
    if limits := _ceilings(target.get("ceilings")):
        busy = _percent(target.get("draft_utilization"))
        _line(console, f"  drafts are scarce (busy {busy}): {limits}", "yellow")
    explanation = target.get("explanation")
    if not isinstance(explanation, dict):
        _line(console, "  It has not decided anything yet.\n", "")
        return
    inputs = explanation.get("inputs")
    if isinstance(inputs, dict) and inputs:
        console.print(_inputs_table(inputs))
    choices = _dicts(explanation.get("choices"))
    if choices:
        console.print(_choices_table(choices, _whole(explanation.get("chosen"))))
    _line(console, f"  {_word(explanation.get('reason'))}\n", "")


def _class_line(kind: Json) -> str:
    rate, num = _percent(kind.get("acceptance_rate")), _figure(kind.get("num_draft_tokens"))
    mode, draft_model = _word(kind.get("mode")), _word(kind.get("draft_model"))
    temperature = _figure(kind.get("temperature"))
    return (
        f"accepted {rate} of {num} proposals ({mode}, temperature {temperature}, "
        f"draft {draft_model})"
    )


def _inputs_table(inputs: Json) -> Table:
    table = Table(title="  decided from", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in inputs.items():
        table.add_row(Text(_word(name)), _figure(value))
    return table


def _choices_table(choices: list[Json], chosen: int) -> Table:
    table = Table(title="  candidates (one pass)", title_justify="left")
    table.add_column("")
    for heading in ("K", "rows", "tokens", "pass ms", "tokens/s"):
        table.add_column(heading, justify="right")
    for place, choice in enumerate(choices):
        pass_us, tokens = _number(choice.get("pass_us")), _number(choice.get("tokens_per_pass"))
        per_s = 1e6 * tokens / pass_us if pass_us and tokens is not None else None
        table.add_row(
            CHOSEN if place == chosen else "",
            _figure(choice.get("num_speculative_tokens")),
            _figure(choice.get("rows")),
            _fixed(tokens, 2),
            _fixed(None if pass_us is None else pass_us / 1e3, 2),
            _fixed(per_s, 1),
            style="bold green" if place == chosen else "",
        )
    return table


def _drafts_table(drafts: list[Json]) -> Table:
    table = Table(title="drafts", title_justify="left")
    for heading in ("draft", "sequences", "busy", "step ms", "batch", "targets", ""):
        table.add_column(heading, justify="left" if heading == "draft" else "right")
    for draft in drafts:
        table.add_row(
            Text(_word(draft.get("replica_id"))),
            f"{_whole(draft.get('num_sessions'))} / {_whole(draft.get('max_sessions'))}",
            _percent(draft.get("busy_share")),
            _fixed(_number(draft.get("step_ms")), 2),
            _fixed(_number(draft.get("batch")), 1),
            str(len(_list(draft.get("targets")))),
            "draining" if draft.get("is_draining") is True else "",
        )
    return table


def _ceilings(data: Any) -> str:
    limits = data if isinstance(data, dict) else {}
    given = {what: limits.get(name) for name, what in CEILINGS.items()}
    said = [f"{what} at most {_figure(v)}" for what, v in given.items() if v is not None]
    return ", ".join(said)


# -- values -------------------------------------------------------------------------------------


def _line(console: Console, text: str, style: str) -> None:
    console.print(Text(text, style=style))


def _word(value: Any) -> str:
    """Control characters are not passed on: a name must not steer the terminal."""
    text = NOTHING if value is None else str(value)
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _whole(value: Any) -> int:
    return int(_number(value) or 0)


def _figure(value: Any) -> str:
    """At most four digits that matter; whole numbers as they are."""
    number = _number(value)
    if number is None:
        return NOTHING
    return f"{number:.0f}" if number == int(number) else f"{number:.4g}"


def _fixed(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _percent(value: Any) -> str:
    number = _number(value)
    return NOTHING if number is None else f"{100 * number:.0f} %"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[Json]:
    return [item for item in _list(value) if isinstance(item, dict)]
