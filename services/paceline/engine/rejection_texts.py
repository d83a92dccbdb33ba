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
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.engine.rejection_files import MAX_ID, Rejection, Torn, read_rejections
from paceline.errors import ConfigError
from paceline.protocol.token_log import retract_hash

KEPT = "rejections.json"
# What the target said about the texts is kept in their order.
_REMEDY = "delete it, and every teacher-*.safetensors beside it"
_NUM_COUNTS = (3, 4)  # an older release kept no torn lines


@dataclass(frozen=True, slots=True)
class RejectedText:
    """`places`: ascending indices of tokens; what the target took behind them was not proposed."""

    ids: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """`num_places`: different contexts among `num_entries` log entries. `num_bare` entries have no
    context, `num_adapted` are of requests with an adapter, whose law is not the target's.
    `num_torn` lines are none."""

    texts: tuple[RejectedText, ...]
    num_entries: int
    num_bare: int
    num_adapted: int
    num_torn: int = 0

    @property
    def num_places(self) -> int:
        return sum(len(text.places) for text in self.texts)

    def sentence(self) -> str:
        said = f"{self.num_places:,} rejected places in {len(self.texts):,} texts of the log"
        if self.num_bare:
            said += f"; {bare_sentence(self.num_bare, self.num_entries)}"
        if self.num_adapted:
            said += f"; {self.num_adapted:,} entries of requests with an adapter are left out"
        if self.num_torn:
            said += f"; {torn_sentence(self.num_torn)}"
        return said


def bare_sentence(num_bare: int, num_entries: int) -> str:
    return f"{num_bare:,} of {num_entries:,} entries have no context: rejection_log.context_tokens"


def torn_sentence(num_torn: int) -> str:
    return f"{num_torn:,} torn lines are left out"


def gather_rejections(paths: Sequence[Path], length: int, longest: int) -> Rejected:
    """`length`: so many last tokens of a context count; a text has twice as many at most, and at
    most `longest`. `ConfigError` where there is nothing to learn from."""
    contexts: dict[int, Rejection] = {}
    models: set[str] = set()
    num_entries = num_bare = num_adapted = 0
    torn = Torn()
    for entry in read_rejections(paths, torn):
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
        why = f": {torn_sentence(torn.num)}" if torn.num else ""
        raise ConfigError(f"there are no rejections in {named} yet{why}")
    if not contexts:
        reasons = [bare_sentence(num_bare, num_entries)] if num_bare else []
        if num_adapted:
            reasons.append(
                f"{num_adapted:,} of {num_entries:,} entries are of requests with an adapter"
            )
        raise ConfigError(f"nothing to learn from in {named}: {'; '.join(reasons)}")
    texts = tuple(join_contexts(contexts, min(length, longest), min(2 * length, longest)))
    return Rejected(texts, num_entries, num_bare, num_adapted, torn.num)


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


def kept_rejections(
    paths: Sequence[Path], length: int, longest: int, vocab_size: int, work: Path
) -> Rejected:
    """Those of the work folder; it begins with what the log holds now. `ConfigError` unless a
    target with `vocab_size` ids and `longest` positions can read all of them."""
    path = work / KEPT
    if not path.exists():
        rejected = gather_rejections(paths, length, longest)
        if problem := _problem(rejected, longest, vocab_size):
            raise ConfigError(f"{', '.join(map(str, paths))}: {problem}")
        _write(rejected, path)
        return rejected
    try:
        rejected = _parsed(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {_REMEDY}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if problem := _problem(rejected, longest, vocab_size):
        raise ConfigError(f"{path}: {problem}: {_REMEDY}")
    return rejected


def _problem(rejected: Rejected, longest: int, vocab_size: int) -> str:
    for number, text in enumerate(rejected.texts, 1):
        if max(text.ids) >= vocab_size:
            return (
                f"text {number} has token id {max(text.ids)}, the target has {vocab_size} ids: it "
                "was made with another tokenizer"
            )
        if len(text.ids) > longest:
            return f"text {number} has {len(text.ids)} tokens, the target {longest} positions"
    return ""


def _write(rejected: Rejected, path: Path) -> None:
    staged = path.with_suffix(".new")
    r = rejected
    row = {
        "texts": [[text.ids, text.places] for text in r.texts],
        "counts": [r.num_entries, r.num_bare, r.num_adapted, r.num_torn],
    }
    staged.unlink(missing_ok=True)
    with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(row, file)
    staged.rename(path)


def _parsed(row: Any) -> Rejected:
    """`ValueError`, `TypeError` or `LookupError` where `_write` did not write it."""
    texts = tuple(_parsed_text(ids, places) for ids, places in row["texts"])
    counts = _numbers(row["counts"], MAX_ID)
    if not texts or len(counts) not in _NUM_COUNTS:
        raise ValueError("there is no text, or not every count")
    return Rejected(texts, *counts)


def _parsed_text(ids: Any, places: Any) -> RejectedText:
    text = RejectedText(_numbers(ids, MAX_ID), _numbers(places, len(ids) - 1))
    is_ascending = all(one < next_one for one, next_one in pairwise(text.places))
    if not text.ids or not text.places or not is_ascending:
        raise ValueError("a text without tokens or places, or places out of order")
    return text


def _numbers(values: Any, most: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(
        type(value) is int and 0 <= value <= most for value in values
    ):
        raise ValueError(f"not whole numbers from 0 to {most}")
    return tuple(values)
