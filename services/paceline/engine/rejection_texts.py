"""What a draft can learn from rejections: the texts in which it failed, and where in them.

Rejections of one answer follow each other: the log holds nearly the same context many times. They
are put together again by their hashes, so that every token is read about once and not once for
each rejection behind it. A work folder keeps the texts that it was begun with, for its owner only:
the logs themselves grow on.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.engine.rejection_files import Rejection, read_rejections
from paceline.errors import ConfigError
from paceline.protocol.token_log import retract_hash

KEPT = "rejections.json"


@dataclass(frozen=True, slots=True)
class RejectedText:
    """`places`: ascending indices of tokens; what the target took behind them was not proposed."""

    ids: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """`num_places`: different contexts among `num_entries` log entries. `num_bare` entries have no
    context, `num_adapted` are of requests with an adapter, whose law is not the target's."""

    texts: tuple[RejectedText, ...]
    num_entries: int
    num_bare: int
    num_adapted: int

    @property
    def num_places(self) -> int:
        return sum(len(text.places) for text in self.texts)

    def sentence(self) -> str:
        said = f"{self.num_places:,} rejected places in {len(self.texts):,} texts of the log"
        if self.num_bare:
            said += f"; {bare_sentence(self.num_bare, self.num_entries)}"
        if self.num_adapted:
            said += f"; {self.num_adapted:,} entries of requests with an adapter are left out"
        return said


def bare_sentence(num_bare: int, num_entries: int) -> str:
    return f"{num_bare:,} of {num_entries:,} entries have no context: rejection_log.context_tokens"


def gather_rejections(paths: Sequence[Path], length: int, longest: int) -> Rejected:
    """`length`: so many last tokens of a context count; a text has twice as many at most, and at
    most `longest`. `ConfigError` where there is nothing to learn from."""
    contexts: dict[int, Rejection] = {}
    models: set[str] = set()
    num_entries = num_bare = num_adapted = 0
    for entry in read_rejections(paths):
        num_entries += 1
        models.add(entry.model)
        if len(models) > 1:
            names = ", ".join(sorted(models))
            raise ConfigError(f"the rejections are of several models ({names}): name one's files")
        if entry.adapter:
            num_adapted += 1
        elif not entry.context:
            num_bare += 1
        else:
            known = contexts.get(entry.context_hash)
            if known is None or len(known.context) < len(entry.context):
                contexts[entry.context_hash] = replace(entry, top=())
    named = ", ".join(map(str, paths))
    if not num_entries:
        raise ConfigError(f"there are no rejections in {named} yet")
    if not contexts:
        why = bare_sentence(num_bare, num_entries)
        if num_adapted:
            why += f"; {num_adapted:,} are of requests with an adapter"
        raise ConfigError(f"nothing to learn from in {named}: {why}")
    texts = tuple(join_contexts(contexts, min(length, longest), min(2 * length, longest)))
    return Rejected(texts, num_entries, num_bare, num_adapted)


def join_contexts(
    contexts: dict[int, Rejection], length: int, longest: int
) -> Iterator[RejectedText]:
    """The same texts in whatever order the entries come."""
    chains: list[_Chain] = []
    tails: dict[int, _Chain] = {}
    for entry in sorted(contexts.values(), key=lambda e: (e.context_len, e.context_hash)):
        chain, added = _predecessor(entry, contexts, tails)
        if chain is None or len(chain.ids) + len(added) > longest:
            chain = _Chain([], [])
            chains.append(chain)
            added = entry.context[-length:]
        chain.ids += added
        chain.places.append(len(chain.ids) - 1)
        tails[entry.context_hash] = chain
    for chain in chains:
        yield RejectedText(tuple(chain.ids), tuple(chain.places))


@dataclass(slots=True)
class _Chain:
    ids: list[int]
    places: list[int]


def _predecessor(
    entry: Rejection, contexts: dict[int, Rejection], tails: dict[int, _Chain]
) -> tuple[_Chain | None, array[int]]:
    """The text that ends where the rejection before this one was, and what came after it.

    Taken out of `tails`: a second answer from there on begins a text of its own.
    """
    before = entry.context_hash
    for num, token_id in enumerate(reversed(entry.context), 1):
        before = retract_hash(before, token_id)
        earlier = contexts.get(before)
        if earlier is not None and earlier.context_len == entry.context_len - num:
            return tails.pop(before, None), entry.context[-num:]
    return None, entry.context


# ------------------------------------------------------------------------------- the work folder


def kept_rejections(paths: Sequence[Path], length: int, longest: int, work: Path) -> Rejected:
    """Those of the work folder; it begins with what the log holds now."""
    path = work / KEPT
    if not path.exists():
        rejected = gather_rejections(paths, length, longest)
        _write(rejected, path)
        return rejected
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: delete the work folder") from error


def _write(rejected: Rejected, path: Path) -> None:
    staged = path.with_suffix(".new")
    row = {
        "texts": [[text.ids, text.places] for text in rejected.texts],
        "counts": [rejected.num_entries, rejected.num_bare, rejected.num_adapted],
    }
    staged.unlink(missing_ok=True)
    with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(row, file)
    staged.rename(path)


def _parsed(row: Any) -> Rejected:
    texts = tuple(RejectedText(tuple(ids), tuple(places)) for ids, places in row["texts"])
    num_entries, num_bare, num_adapted = row["counts"]
    return Rejected(texts, num_entries, num_bare, num_adapted)
