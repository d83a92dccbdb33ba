"""`paceline rejections`: what the rejection log of a target says about its draft."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import out, print_rows
from paceline.cli.values import json_line, word
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.engine.rejection_figures import RejectionFigures

Paths = Annotated[list[Path], typer.Argument(help="Files, or folders of them.", show_default=False)]
Draft = Annotated[
    str | None, typer.Option(help="Alias, folder or Hub id: what a larger --vocab would mend.")
]
Top = Annotated[int, typer.Option(min=0, max=1000, help="So many of the tokens missed most.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def rejections(paths: Paths, draft: Draft = None, top: Top = 10, as_json: AsJson = False) -> None:
    """Say which tokens a target's drafts miss, from its rejection log (rejection_log.file_dir).

    \b
    Examples:
      paceline rejections ~/rejections
      paceline rejections ~/rejections --draft smollm2-135m-draft
    """
    from paceline.engine.rejection_figures import rejection_figures
    from paceline.engine.rejection_files import Torn, read_rejections

    vocab = None if draft is None else _vocab(draft)
    torn = Torn()
    found = rejection_figures(read_rejections(paths, torn), top, vocab)
    found = replace(found, num_torn=torn.num)
    if not found.num_entries:
        why = f": {torn.num:,} torn lines are left out" if torn.num else ""
        raise ConfigError(f"there are no rejections in {', '.join(map(str, paths))} yet{why}")
    if as_json:
        out.print(json_line(asdict(found)), markup=False)
    else:
        print_rows(table(found, draft))


def _vocab(draft: str) -> range | list[int]:
    """The ids that the draft can propose."""
    from paceline import models
    from paceline.engine.draft_head import read_draft_vocab
    from paceline.engine.json_files import read_json

    folder = models.resolve(draft)
    chosen = read_draft_vocab(folder)
    if chosen is not None:
        return chosen
    config: Any = read_json(folder / "config.json")
    size = config.get("vocab_size") if isinstance(config, dict) else None
    if type(size) is not int or size < 1:
        raise ConfigError(f"{folder}/config.json names no vocab_size")
    return range(size)


def table(found: RejectionFigures, draft: str | None) -> Table:
    from rich.table import Table

    rows = Table(box=None, show_header=False, pad_edge=False)
    num = found.num_entries

    def row(name: str, text: str) -> None:
        rows.add_row(word(name), word(text))

    row("model", ", ".join(found.models))
    row("rejections", f"{num:,} in {found.num_contexts:,} different places")
    row("proposed by", ", ".join(f"{name} {times:,}" for name, times in found.sources.items()))
    row("token taken", f"probability {found.taken:.3f}, the likeliest one {found.greedy:.0%}")
    row("likeliest token", f"probability {found.best:.3f}")
    if found.num_outside is not None:
        row(f"{draft} never says", f"{found.num_outside:,} ({found.num_outside / num:.0%})")
    hint = " (rejection_log.context_tokens)" if found.num_bare else ""
    row("without context", f"{found.num_bare:,} of {num:,}{hint}")
    if found.num_torn:
        row("torn lines", f"{found.num_torn:,}, left out")
    for token_id, times in found.tokens:
        row(f"token {token_id}", f"{times:,} ({times / num:.1%})")
    return rows
