"""One attention call of a pass: which rows of the flat batch, which slots they read, and its mask.

Knows slots and places in a text; no sequence, weights, heads or logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch


@dataclass(slots=True)
class AttentionGroup:
    """One attention call: `num_tiles` x `num_rows` rows of the flat batch, from `first_row`.

    `read` selects slots of the KV pool, num_tiles x `length` of them: a slice when they happen to
    be consecutive (a view instead of a copy). `mask` is [num_tiles, 1, num_rows, length], 0 or
    -inf in the model's dtype; None when every row sees everything. `lengths` are the tiles' own:
    row r of a tile is at position lengths[tile] - num_rows + r, unless there are `tree_places`:
    int64 on the CPU, of the rows [num_tiles, num_rows] and of what is read [num_tiles, length].
    """

    first_row: int
    num_tiles: int
    num_rows: int
    length: int
    read: torch.Tensor | slice
    mask: torch.Tensor | None
    lengths: tuple[int, ...] = ()
    tree_places: tuple[torch.Tensor, torch.Tensor] | None = None
    # Made by the first layer that needs them, used by all: the mask repeated for each query head
    # of a KV head, by the number of those heads; and this group under a sliding window, by width.
    expanded_masks: dict[int, torch.Tensor] = field(default_factory=dict)
    windowed: dict[int, AttentionGroup] = field(default_factory=dict)

    def within(self, window: int) -> AttentionGroup:
        """This group when a row at position p sees only positions > p - window.

        Positions that no row sees are left out of `read`, so a local layer costs its window and
        not the whole text.
        """
        if self.length <= window:
            return self
        if window not in self.windowed:
            self.windowed[window] = self._cut(window)
        return self.windowed[window]

    def _cut(self, window: int) -> AttentionGroup:
        lowest = min(self.lengths) - self.num_rows
        if self.tree_places is not None:
            lowest = int(self.tree_places[0].min())
        first = max(0, lowest + 1 - window)
        if isinstance(self.read, slice):
            read: torch.Tensor | slice = slice(self.read.start + first, self.read.stop)
        else:
            read = self.read.view(self.num_tiles, self.length)[:, first:].flatten()
        mask = self.mask  # None: one row a tile and equal lengths, so the cut alone is the window
        if mask is not None:
            rows, keys = self._places(mask.device)
            is_past = keys[:, None, first:] <= rows[:, :, None] - window
            mask = mask[..., first:].masked_fill(is_past[:, None], float("-inf"))
        return replace(
            self,
            length=self.length - first,
            read=read,
            mask=mask,
            lengths=tuple(length - first for length in self.lengths),
            tree_places=None,
            expanded_masks={},
            windowed={},
        )

    def _places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`tree_places`, or the same where there is no tree."""
        if self.tree_places is not None:
            rows, keys = self.tree_places
            return rows.to(device), keys.to(device)
        first = torch.tensor(self.lengths, device=device)[:, None] - self.num_rows
        rows = first + torch.arange(self.num_rows, device=device)
        return rows, torch.arange(self.length, device=device)[None]
