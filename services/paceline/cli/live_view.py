"""What `paceline bench live` prints: tables of the result's figures, errors, one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.bench import page

CLIENT_IS_FULL = 0.8


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Texts from the service are shown as they are, without markup or control characters."""
    sides = page.sides(result)
    console.print(_table(("", *sides), page.overview(result), f"live: {result['model']}"))
    for name, summary in sides.items():
        title = f"latency, {name}" if len(sides) > 1 else "latency"
        console.print(_table(page.LATENCY_HEADINGS, page.latencies(summary), title))
    if failed := page.errors(result):
        console.print(_table(("side", "code", "requests", "example"), failed, "errors"))
    if sentence := page.comparison(result):
        console.print(sentence, markup=False)
    share = result["client_cpu_share"]
    if share is not None and share > CLIENT_IS_FULL:
        console.print(
            f"The client itself used {share:.0%} of a core: the service may be faster than this.",
            style="yellow",
        )


def _table(headings: tuple[str, ...], rows: list[page.Row], title: str) -> Table:
    table = Table(title=_plain(title), title_justify="left")
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column else "left")
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    return table


def _plain(cell: str) -> Text:
    return Text("".join(char if char.isprintable() else "\ufffd" for char in cell))
