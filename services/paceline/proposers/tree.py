"""Candidates of Medusa heads to a chain or a tree of guesses. Knows no head and no model."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

from paceline.proposers.base import NOTHING, LocalProposal

Prior = tuple[tuple[float, ...], ...]


def geometric_prior(
    first: float = 0.6, by_head: float = 0.75, by_rank: float = 0.3, num_heads: int = 16
) -> Prior:
    """Acceptance of head h's candidate of rank r, given that the path above it was accepted:
    first * by_head**h * by_rank**r. Heads lose with distance what they look ahead, and a second
    candidate is right about as often as the rest together."""
    return tuple(
        tuple(first * by_head**head * by_rank**rank for rank in range(num_heads))
        for head in range(num_heads)
    )


PRIOR = geometric_prior()


def chain(head_token_ids: Sequence[Sequence[int]], max_tokens: int) -> LocalProposal:
    """Each head's best candidate, up to a head that has none."""
    token_ids: list[int] = []
    for candidates in head_token_ids[: max(0, max_tokens)]:
        if not candidates:
            break
        token_ids.append(candidates[0])
    return LocalProposal(tuple(token_ids))


def candidate_tree(
    head_token_ids: Sequence[Sequence[int]], max_nodes: int, max_depth: int, prior: Prior = PRIOR
) -> LocalProposal:
    """The `max_nodes` paths that are accepted most often by `prior`, at most `max_depth` deep.

    Entry h of `head_token_ids` has the candidates for a place, best first, behind any path;
    `prior`[h][r] is in [0, 1]; a candidate outside it, or of 0, is not taken. The most likely node
    comes first, so parents come before children and any first nodes are a tree, too (`cut`). A
    repeated candidate counts once. A tree without branches comes as a chain.
    """
    candidates = [tuple(dict.fromkeys(ids)) for ids in head_token_ids[: max(0, max_depth)]]
    sizes = tuple(len(ids) for ids in candidates)
    nodes = _layout(sizes, max(0, max_nodes), prior)
    return _proposal(
        tuple(candidates[head][rank] for _, head, rank in nodes),
        tuple(parent for parent, _, _ in nodes),
    )


def cut(proposal: LocalProposal, max_nodes: int) -> LocalProposal:
    """The first `max_nodes` nodes: of a tree from `candidate_tree`, the most likely ones."""
    if max_nodes <= 0:
        return NOTHING
    if len(proposal.token_ids) <= max_nodes:
        return proposal
    return _proposal(proposal.token_ids[:max_nodes], proposal.parents[:max_nodes])


def _proposal(token_ids: tuple[int, ...], parents: tuple[int, ...]) -> LocalProposal:
    is_chain = all(parent == node - 1 for node, parent in enumerate(parents))
    return LocalProposal(token_ids, () if is_chain else parents)


@lru_cache(maxsize=256)
def _layout(
    sizes: tuple[int, ...], max_nodes: int, prior: Prior
) -> tuple[tuple[int, int, int], ...]:
    """(parent, head, rank) of each node, for heads with so many candidates."""
    nodes: list[tuple[int, int, int]] = []
    # The least is popped: minus the likelihood, then whatever is higher up.
    heap: list[tuple[float, int, int, int]] = []

    def offer(prob: float, parent: int, head: int) -> None:
        if head < min(len(sizes), len(prior)):
            for rank, own in enumerate(prior[head][: sizes[head]]):
                if own > 0.0:
                    heapq.heappush(heap, (-prob * own, head, parent, rank))

    offer(1.0, -1, 0)
    while heap and len(nodes) < max_nodes:
        minus, head, parent, rank = heapq.heappop(heap)
        offer(-minus, len(nodes), head + 1)
        nodes.append((parent, head, rank))
    return tuple(nodes)
