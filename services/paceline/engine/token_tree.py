"""A tree of proposals in one item: what may be asked of it, and which path a target takes. Pure.

Node j goes on from node `parents[j]`, which comes before it, or from the item's committed tokens
if that is -1 (the root). Rows of a tree lie in the cache in the order of the nodes, one slot each;
the place that a node has in its text is that of its depth. Knows no tensor, slot or block.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.base import StepItem


def tree_problem(item: StepItem) -> str:
    """What is wrong with an item's tree, in a few words; empty: nothing, or it has none."""
    parents = item.tree_parents
    if not parents:
        return ""
    if item.num_samples != len(parents) + 1:
        return f"{len(parents)} nodes need {len(parents) + 1} samples, not {item.num_samples}"
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            return f"node {node} of a tree cannot go on from node {parent}"
    if item.rule is not None or item.num_runner_ups:
        return "a tree has neither a rule nor runner-ups"
    if item.max_rows is not None or item.num_prompt_logprobs is not None:
        return "a tree is no part of a prefill"
    if item.sampling.needs_history:
        return "a tree cannot have penalties, a grammar or min tokens"
    return ""


def node_depths(parents: Sequence[int]) -> list[int]:
    """Of each node, how many places behind the committed tokens it is: 1 and more."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def node_paths(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Of each node, the nodes from the root down to itself."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        paths.append((node,) if parent < 0 else (*paths[parent], node))
    return paths


def sample_offsets(item: StepItem) -> Sequence[int]:
    """Of each sampled row, how many output indices it is behind the first."""
    if item.tree_parents:
        return [0, *node_depths(item.tree_parents)]
    return range(item.num_samples)


def accepted_nodes(
    parents: Sequence[int], node_ids: Sequence[int], sampled: Sequence[int]
) -> tuple[int, ...]:
    """The path that the target takes; of nodes that say the same, it takes the first.

    `sampled` has the token that follows the root, then the one that follows each node.
    """
    accepted: list[int] = []
    place = -1
    for node, (parent, token_id) in enumerate(zip(parents, node_ids, strict=True)):
        if parent == place and token_id == sampled[place + 1]:
            accepted.append(node)
            place = node
    return tuple(accepted)


def accepted_rows(item: StepItem, sampled: Sequence[int]) -> tuple[int, ...]:
    """Which of a tree's sampled rows say what is committed: the root's, then the accepted ones.

    `sampled` has a token per sampled row. The last of these rows says the token behind the tree.
    """
    parents = item.tree_parents
    nodes = accepted_nodes(parents, item.token_ids[-len(parents) :], sampled)
    return (0, *(node + 1 for node in nodes))
