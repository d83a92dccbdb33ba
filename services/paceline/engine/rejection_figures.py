"""What the rejections of a log say about a draft: sums over its entries, and their table.

Knows no model: the ids that a draft can propose are given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from paceline.engine.rejection_files import Rejection


@dataclass(frozen=True, slots=True)
class RejectionFigures:
    """`num_contexts`: different places among all `num_entries`; `num_bare` hold no context.

    `taken`: mean probability, at T = 1, of the token that the target took; `best`: of its most
    likely one; `greedy`: how often the two are the same. `num_outside`: tokens taken that the
    draft can never propose (None: no draft was named). `tokens`: (id, times), most often first.
    `num_torn`: lines that were no entries.
    """

    models: tuple[str, ...]
    num_entries: int
    num_contexts: int
    num_bare: int
    sources: dict[str, int]
    taken: float
    best: float
    greedy: float
    num_outside: int | None
    tokens: tuple[tuple[int, int], ...]
    num_torn: int = 0


def rejection_figures(
    entries: Iterable[Rejection], num_tokens: int, vocab: Collection[int] | None = None
) -> RejectionFigures:
    """`vocab`: what a draft can propose."""
    models: set[str] = set()
    places: set[int] = set()
    sources: Counter[str] = Counter()
    tokens: Counter[int] = Counter()
    taken = best = 0.0
    num_bare = num_greedy = 0
    for entry in entries:
        models.add(entry.model)
        places.add(entry.context_hash)
        sources[entry.source or "unknown"] += 1
        tokens[entry.token_id] += 1
        num_bare += not entry.context
        first = max((pair[1] for pair in entry.top), default=entry.logprob)
        taken += math.exp(entry.logprob)
        best += math.exp(max(first, entry.logprob))
        num_greedy += entry.logprob >= first
    num = sum(tokens.values())
    outside = None
    if vocab is not None:
        known = frozenset(vocab)
        outside = sum(times for token_id, times in tokens.items() if token_id not in known)
    often = sorted(tokens.items(), key=lambda pair: (-pair[1], pair[0]))
    return RejectionFigures(
        models=tuple(sorted(models)),
        num_entries=num,
        num_contexts=len(places),
        num_bare=num_bare,
        sources=dict(sources.most_common()),
        taken=taken / max(num, 1),
        best=best / max(num, 1),
        greedy=num_greedy / max(num, 1),
        num_outside=outside,
        tokens=tuple(islice(often, num_tokens)),
    )
