"""What `paceline models list` prints."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from paceline import models
from paceline.cli.values import Json, size
from paceline.engine.medusa_source import MEDUSA_ALIASES, resolve_medusa
from paceline.errors import PacelineError


def states() -> list[Json]:
    """Every alias, of heads only those that are here; `folder` and `size_bytes` are None, and `fix`
    says what to do, where it is not ready."""
    found: list[Json] = []
    named = [(alias.name, alias.description, models.resolve) for alias in models.ALIASES.values()]
    named += [
        (alias.name, alias.description, resolve_medusa)
        for alias in MEDUSA_ALIASES.values()
        if alias.is_here
    ]
    for name, description, resolve in named:
        state: Json = {"name": name, "description": description}
        try:
            folder = resolve(name)
        except PacelineError as error:
            state |= {"is_ready": False, "folder": None, "size_bytes": None, "fix": str(error)}
        else:
            num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            where = {"folder": str(folder), "size_bytes": num_bytes, "fix": None}
            state |= {"is_ready": True, **where}
        found.append(state)
    return found


def table(found: list[Json]) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold dim", pad_edge=False)
    shown.add_column("model", no_wrap=True)
    shown.add_column("", no_wrap=True)
    shown.add_column("size", no_wrap=True, justify="right")
    shown.add_column("where", overflow="fold")
    for state in found:
        is_ready = state["is_ready"]
        where = Text(state["folder"] if is_ready else state["fix"])
        where.append(f"\n{state['description']}", style="dim")
        shown.add_row(
            Text(state["name"], style="bold"),
            Text("ready", style="green") if is_ready else Text("missing", style="yellow"),
            size(state["size_bytes"]) if is_ready else "",
            where,
        )
    return shown
