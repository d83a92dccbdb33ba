"""The frame of `paceline top`: rates with their history, targets, drafts, who serves whom.

Fits 80 columns. Columns that no replica has a value for are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.cli.fleet_pools import pools
from paceline.cli.top_data import History, Look, Rates, link_state
from paceline.cli.values import (
    NOTHING,
    SOURCE_LEGEND,
    SOURCE_LETTERS,
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

# The full block is left out: bars of one line would run into those of the line above.
BARS = "▁▂▃▄▅▆▇"
GAP = " "
SPARK_MIN, SPARK_MARGIN = 10, 36
MAX_ROWS = 32
NAME_CHARS = 12
# From this width on there is room for addresses.
ADDRESS_WIDTH = 112
# So many stand closer together.
MANY_COLUMNS = 9
RESTS = "rests: passes without drafts were faster"
RESTING = "open"  # of the breaker that compares drafting with control passes


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[Json], str]
    is_left: bool = False


def frame(look: Look, rates: Rates, history: History, url: str, width: int) -> Group:
    parts: list[RenderableType] = [_headline(look, rates, url)]
    if look.problem:
        parts.append(Text(look.problem, style="bold red"))
    parts.append(Text())
    parts.append(_rates_table(rates, history, width))
    found = pools(look.fleet) if look.fleet is not None else []
    for name, pool in found:
        if name and len(found) > 1:
            parts.append(Text(f"\n{name}", style="bold"))
        parts += _pool(pool, width)
    return Group(*parts)


def sparkline(values: Sequence[float | None], top: float, num_chars: int) -> str:
    """The last `num_chars` values as bars of 0 to `top`; a gap is a space."""
    shown = list(values)[-num_chars:]
    if top <= 0:
        return "".join(GAP if value is None else BARS[0] for value in shown)
    last = len(BARS) - 1
    return "".join(
        GAP if value is None else BARS[max(0, min(last, round(last * value / top)))]
        for value in shown
    )


def short_name(value: object) -> str:
    """Serve names replicas app#deployment#random: the last part tells them apart."""
    return word(value).rpartition("#")[2][-NAME_CHARS:]


def _headline(look: Look, rates: Rates, url: str) -> Text:
    text = Text("paceline top", style="bold")
    text.append(f"  {word(url)}", style="not bold")
    if look.fleet is None:
        return text
    waiting = "yellow" if rates.num_waiting else ""
    text.append(f"  {rates.num_running} running", style="not bold green")
    text.append(f"  {rates.num_waiting} waiting", style=f"not bold {waiting}")
    return text


def _rates_table(rates: Rates, history: History, width: int) -> Table:
    num_chars = max(SPARK_MIN, width - SPARK_MARGIN)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", min_width=8)
    table.add_column()
    table.add_column(style="dim")
    highest_k = _highest(history.num_speculative_tokens)
    highest_rate = _highest(history.tokens_per_s)
    rows = (
        ("tokens/s", fixed(rates.tokens_per_s, 1), history.tokens_per_s, highest_rate, "cyan"),
        ("acceptance", percent(rates.acceptance_rate), history.acceptance_rate, 1.0, "green"),
        ("K", fixed(rates.num_speculative_tokens, 1), history.num_speculative_tokens,
         highest_k, "magenta"),
    )  # fmt: skip
    for name, value, past, top, style in rows:
        scale = "" if not past or top <= 0 else percent(top) if top == 1.0 else figure(round(top))
        bars = Text(sparkline(tuple(past), top, num_chars), style=style)
        table.add_row(name, Text(value, style="bold"), bars, f"max {scale}" if scale else "")
    return table


def _highest(values: Iterable[float | None]) -> float:
    return max((value for value in values if value is not None), default=0.0)


def _pool(pool: Json, width: int) -> list[RenderableType]:
    targets, drafts = dicts(pool.get("targets")), dicts(pool.get("drafts"))
    parts: list[RenderableType] = [Text()]
    if pool.get("problem"):
        parts.append(Text(word(pool["problem"]), style="yellow"))
    elif targets:
        parts.append(_table(targets, _target_columns(drafts, width)))
    else:
        parts.append(Text("No target has reported to the controller.", style="yellow"))
    if drafts:
        parts += [Text(), _table(drafts, _draft_columns(targets))]
    for name, items in (("targets", targets), ("drafts", drafts)):
        hidden = max(whole(pool.get(f"num_{name}")), len(items)) - min(len(items), MAX_ROWS)
        if hidden > 0:
            parts.append(Text(f"and {hidden} more {name}", style="dim"))
    if any(_sources(target) != NOTHING for target in targets[:MAX_ROWS]):
        parts.append(Text(SOURCE_LEGEND, style="dim"))
    notes = {word(item["config_error"]) for item in [pool, *targets] if item.get("config_error")}
    parts += [Text(note, style="bold red") for note in sorted(notes)]
    parts += [
        Text(f"{name} {RESTS}", style="yellow") for name in map(_named, filter(_rests, targets))
    ]
    return parts


def _target_columns(drafts: list[Json], width: int) -> list[_Column]:
    known = {word(draft.get("replica_id")): draft for draft in drafts}

    def served_by(target: Json) -> str:
        names = [word(name) for name in listed(target.get("drafts"))]
        states = {name: link_state(target, known.get(name)) for name in names}
        shown = [short_name(n) + (f" ({s})" if s else "") for n, s in states.items()]
        return ", ".join(shown) or "none"

    address = _Column("address", lambda target: word(target.get("address")), is_left=True)
    return [
        _Column("target", _named, is_left=True),
        *([address] if width >= ADDRESS_WIDTH else []),
        _Column("run", lambda target: str(whole(target.get("num_running")))),
        _Column("wait", lambda target: str(whole(target.get("num_waiting")))),
        _Column("busy", lambda target: _share(target.get("busy_share"))),
        _Column("KV", lambda target: _share(target.get("kv_cache_usage"))),
        _Column("tok/s", lambda target: fixed(number(target.get("tokens_per_s")), 1)),
        _Column("K", lambda target: fixed(number(target.get("num_speculative_tokens")), 1)),
        _Column("win", lambda target: fixed(number(target.get("window")), 1)),
        _Column("acc", lambda target: _share(target.get("acceptance_rate"))),
        _Column("src", _sources),
        _Column("batch", lambda target: fixed(number(target.get("batch")), 1)),
        _Column("ms", lambda target: _positive(target.get("pass_ms"))),
        _Column("rtt", lambda target: _positive(target.get("rtt_ms"))),
        _Column("served by", served_by, is_left=True),
    ]


def _draft_columns(targets: list[Json]) -> list[_Column]:
    names = {word(t.get("address")): short_name(t.get("replica_id")) for t in targets}

    def serves(draft: Json) -> str:
        addresses = [word(address) for address in listed(draft.get("targets"))]
        return ", ".join(names.get(address, address) for address in addresses) or "none"

    return [
        _Column("draft", _named, is_left=True),
        _Column("sessions", _sessions),
        _Column("busy", lambda draft: _share(draft.get("busy_share"))),
        _Column("tok/s", lambda draft: fixed(number(draft.get("tokens_per_s")), 1)),
        _Column("step ms", lambda draft: _positive(draft.get("step_ms"))),
        _Column("batch", lambda draft: fixed(number(draft.get("batch")), 1)),
        _Column("serves", serves, is_left=True),
    ]


def _named(replica: Json) -> str:
    draining = " (draining)" if replica.get("is_draining") is True else ""
    return short_name(replica.get("replica_id")) + draining


def _sources(target: Json) -> str:
    """The letters of the sources that made proposals lately, most of them first."""
    shares = target.get("sources")
    known = shares if isinstance(shares, dict) else {}
    found = {source: number(known.get(source)) or 0.0 for source in SOURCE_LETTERS}
    used = sorted((source for source in found if found[source] > 0), key=lambda s: -found[s])
    return "".join(SOURCE_LETTERS[source] for source in used) or NOTHING


def _rests(target: Json) -> bool:
    return target.get("speculation_state") == RESTING


def _share(value: object) -> str:
    return percent(value).replace(" ", "")


def _sessions(draft: Json) -> str:
    return f"{whole(draft.get('num_sessions'))}/{whole(draft.get('max_sessions'))}"


def _positive(value: object) -> str:
    """A mean of nothing is reported as 0."""
    known = number(value)
    return fixed(known, 2) if known else NOTHING


def _table(items: list[Json], columns: list[_Column]) -> Table:
    shown = items[:MAX_ROWS]
    cells = {column.heading: [column.cell(item) for item in shown] for column in columns}
    used = [c for c in columns if any(cell != NOTHING for cell in cells[c.heading])]
    gap = 2 if len(used) < MANY_COLUMNS else 1
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold dim", pad_edge=False)
    for column in used:
        table.add_column(
            column.heading,
            justify="left" if column.is_left else "right",
            no_wrap=column is not used[-1],
            overflow="ellipsis" if column is not used[-1] else "fold",
        )
    for row in range(len(shown)):
        table.add_row(
            *(Text(cells[c.heading][row], style=_style(c, cells[c.heading][row])) for c in used)
        )
    return table


def _style(column: _Column, cell: str) -> str:
    if "(" in cell or cell == "none":
        return "yellow"
    return "bold" if column.heading in ("target", "draft") else ""
