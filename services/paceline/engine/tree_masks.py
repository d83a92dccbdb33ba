"""Which rows of a tree see which, and where in their texts they are: tensors for attention calls.

A row of a tree sees what was committed before it, its ancestors and itself. Distances, which a
sliding window measures, count depths and not slots. Knows no model, block or token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.token_tree import node_depths, node_paths


@dataclass(frozen=True, slots=True)
class TreeTile:
    """Rows of a tile: the first `num_committed` are no nodes, the others `first_node` and so on.

    `base` is how many positions lie before the tree: node j is written behind them, at
    `base` + j, and is the token at position `base` - 1 + its depth of its text.
    """

    parents: tuple[int, ...]
    base: int
    num_committed: int
    first_node: int
    num_rows: int

    @property
    def nodes(self) -> range:
        return range(self.first_node, self.first_node + self.num_rows - self.num_committed)

    def positions(self) -> list[int]:
        """Of each row, its place in its text."""
        first = self.base - self.num_committed
        depths = node_depths(self.parents)
        committed = range(first, self.base) if self.num_committed else ()
        return [*committed, *(self.base - 1 + depths[node] for node in self.nodes)]

    def key_positions(self, length: int) -> torch.Tensor:
        """int64 [length]: of each position of the cache, the place in its text of what is there."""
        places = torch.arange(length)
        depths = torch.tensor(node_depths(self.parents))[: length - self.base]
        places[self.base : self.base + len(depths)] = self.base - 1 + depths
        return places

    def hidden(self) -> torch.Tensor:
        """bool [rows, nodes up to the last row]: nodes that a row does not see."""
        nodes, paths = self.nodes, node_paths(self.parents)
        hidden = torch.ones(self.num_rows, nodes.stop, dtype=torch.bool)
        for row, node in enumerate(nodes, self.num_committed):
            hidden[row, list(paths[node])] = False
        return hidden


def hide_nodes(mask: torch.Tensor, trees: Sequence[TreeTile | None]) -> None:
    """Make a causal mask [tiles, 1, rows, length] that of trees; None: a tile without one."""
    for index, tree in enumerate(trees):
        if tree is not None:
            hidden = tree.hidden().to(mask.device)
            nodes = mask[index, 0, :, tree.base : tree.base + hidden.shape[1]]
            nodes.masked_fill_(hidden, float("-inf"))


def tree_places(
    lengths: Sequence[int], trees: Sequence[TreeTile | None], num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 on the CPU: places in their texts of rows [tiles, num_rows] and of what they read
    [tiles, longest of `lengths`], which are those that each tile sees."""
    rows = [
        list(range(length - num_rows, length)) if tree is None else tree.positions()
        for length, tree in zip(lengths, trees, strict=True)
    ]
    longest = max(lengths)
    keys = [
        torch.arange(longest) if tree is None else tree.key_positions(longest) for tree in trees
    ]
    return torch.tensor(rows), torch.stack(keys)
