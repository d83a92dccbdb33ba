"""Lays the rows of one pass out flat, and says which of them attend together.

Every item is cut into tiles of at most `MAX_TILE_ROWS` rows. Tiles with equally many rows and
similar lengths form a group, which is one attention call. Groups lie one after another in the
flat batch, so each is a slice of it. Knows slots and lengths; no weights, heads or logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.engine.attention_group import AttentionGroup
from paceline.engine.token_tree import node_depths, node_paths
from paceline.engine.tree_masks import TreeTile, hide_nodes, tree_places

# A long prefill chunk is causal: tile by tile it skips most of the masked half, and the masks
# stay small (rows x length).
MAX_TILE_ROWS = 128

# With `row_by_row` a pass has a multiple of so many rows: no vector kernel then treats the last
# elements of a tensor differently from the others.
ROW_MULTIPLE = 16

# Padding one tile by this many key positions x rows costs about what one more attention call
# costs (measured on CPU, SmolLM2-135M: about 35 us a call, 0.14 us a position and row).
CALL_COST_POSITIONS = 256


@dataclass(slots=True)  # one per row: see StepItem
class SequenceRows:
    """Rows `start, start + 1, ...` of one sequence in one pass: plain integers, cheap to send.

    `blocks` is the sequence's block table and covers every row; logits are wanted for the last
    `num_samples` rows. The block in which `start` lies is first made a copy of `copied_block`.
    `adapter` names the LoRA adapter of the sequence, if it has one. With `tree_parents` the last
    rows are a tree (see `StepItem`).
    """

    start: int
    token_ids: tuple[int, ...]
    num_samples: int
    blocks: tuple[int, ...]
    copied_block: int | None = None
    adapter: str = ""
    tree_parents: tuple[int, ...] = ()

    @property
    def tree_base(self) -> int:
        """The position of the first node of the tree, if there is one."""
        return self.start + len(self.token_ids) - len(self.tree_parents)

    def positions(self) -> Sequence[int]:
        """Of each row, its place in its text."""
        if not self.tree_parents:
            return range(self.start, self.start + len(self.token_ids))
        base = self.tree_base
        nodes = (base - 1 + depth for depth in node_depths(self.tree_parents))
        return (*range(self.start, base), *nodes)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Where one adapter's rows are: `rows` of the flat batch, `samples` of those that are sampled.

    int64 on the model's device.
    """

    adapter: str
    rows: torch.Tensor
    samples: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `offset .. offset + num_rows` of item `index`; they see `length` positions at most.

    A tile of one row that is a node of a tree reads no other node than its `path`: positions of
    its ancestors and its own, the last of the `length` that it sees.
    """

    index: int
    offset: int
    num_rows: int
    length: int
    path: tuple[int, ...] = ()


@dataclass(slots=True)
class PassPlan:
    """The flat batch. All index tensors are int64 on the model's device.

    `input_ids`, `position_ids`: [1, rows]. `write`: [rows], the KV slot of each row.
    `sample_rows`: [samples], rows whose logits are needed, in the order of the items.
    `adapter_rows` has an entry for each adapter in the pass.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write: torch.Tensor
    sample_rows: torch.Tensor
    groups: list[AttentionGroup] = field(default_factory=list)
    adapter_rows: tuple[AdapterRows, ...] = ()


def plan_pass(
    items: Sequence[SequenceRows],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    row_by_row: bool = False,
) -> PassPlan:
    """Lay out the rows of a pass; each item is another sequence.

    `row_by_row` gives each row an attention call of its own and fills the pass up with copies of
    its last row (`engine.reproducible` says why); a copy writes the same KV to the same slot.
    """
    max_rows = 1 if row_by_row else MAX_TILE_ROWS
    tiles_of = cut_tiles(items, max_rows)
    blocks = [item.blocks for item in items]
    places = [item.positions() for item in items]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    owners: list[int] = []
    row_of: dict[tuple[int, int], int] = {}
    groups: list[AttentionGroup] = []
    for tiles in [[tile] for tile in tiles_of] if row_by_row else group_tiles(tiles_of):
        groups.append(_attention_group(tiles, len(token_ids), items, block_size, dtype, device))
        for tile in tiles:
            item = items[tile.index]
            row_of[tile.index, tile.offset] = len(token_ids)
            start = item.start + tile.offset
            token_ids.extend(item.token_ids[tile.offset : tile.offset + tile.num_rows])
            owners.extend([tile.index] * tile.num_rows)
            positions.extend(places[tile.index][tile.offset : tile.offset + tile.num_rows])
            slots.extend(_slots(blocks[tile.index], start, tile.num_rows, block_size))
    num_copies = -len(token_ids) % ROW_MULTIPLE if row_by_row else 0
    if num_copies:
        tiles = [tiles_of[-1]] * num_copies
        groups.append(_attention_group(tiles, len(token_ids), items, block_size, dtype, device))
        for values in (token_ids, positions, slots, owners):
            values.extend(values[-1:] * num_copies)

    def as_index(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    sample_rows = _sample_rows(items, row_of, max_rows)
    return PassPlan(
        input_ids=as_index(token_ids)[None],
        position_ids=as_index(positions)[None],
        write=as_index(slots),
        sample_rows=as_index(sample_rows),
        groups=groups,
        adapter_rows=find_adapter_rows(items, owners, sample_rows, device),
    )


def find_adapter_rows(
    items: Sequence[SequenceRows],
    owners: Sequence[int],
    sample_rows: Sequence[int],
    device: torch.device,
) -> tuple[AdapterRows, ...]:
    """`owners`: of each row of the flat batch, the index of its item."""
    adapters = sorted({item.adapter for item in items if item.adapter})
    if not adapters:
        return ()
    names = [items[owner].adapter for owner in owners]

    def where(adapter: str, found: Iterable[str]) -> torch.Tensor:
        rows = [row for row, name in enumerate(found) if name == adapter]
        return torch.tensor(rows, dtype=torch.int64, device=device)

    return tuple(
        AdapterRows(each, where(each, names), where(each, (names[row] for row in sample_rows)))
        for each in adapters
    )


def cut_tiles(items: Sequence[SequenceRows], max_rows: int = MAX_TILE_ROWS) -> list[Tile]:
    """Items cut into tiles, in order."""
    tiles = []
    for index, item in enumerate(items):
        for offset in range(0, len(item.token_ids), max_rows):
            num_rows = min(max_rows, len(item.token_ids) - offset)
            tile = Tile(index, offset, num_rows, item.start + offset + num_rows)
            node = offset - (len(item.token_ids) - len(item.tree_parents))
            tiles.append(_node_tile(tile, item, node) if node >= 0 and num_rows == 1 else tile)
    return tiles


def _node_tile(tile: Tile, item: SequenceRows, node: int) -> Tile:
    base = item.tree_base
    path = tuple(base + each for each in node_paths(item.tree_parents)[node])
    return replace(tile, length=base + len(path), path=path)


def group_tiles(tiles: Sequence[Tile]) -> list[list[Tile]]:
    """Tiles of equally many rows together, as long as padding is cheaper than another call."""
    groups: list[list[Tile]] = []
    for tile in sorted(tiles, key=lambda tile: (tile.num_rows, -tile.length)):
        longest = groups[-1][0] if groups else None
        if longest is not None and longest.num_rows == tile.num_rows:
            padding = (longest.length - tile.length) * tile.num_rows
            if padding <= CALL_COST_POSITIONS:
                groups[-1].append(tile)
                continue
        groups.append([tile])
    return groups


def _slots(blocks: Sequence[int], start: int, num_rows: int, block_size: int) -> list[int]:
    return [
        blocks[position // block_size] * block_size + position % block_size
        for position in range(start, start + num_rows)
    ]


def _sample_rows(
    items: Sequence[SequenceRows], row_of: dict[tuple[int, int], int], max_rows: int
) -> list[int]:
    rows = []
    for index, item in enumerate(items):
        num_rows = len(item.token_ids)
        for row in range(num_rows - item.num_samples, num_rows):
            within = row % max_rows
            rows.append(row_of[index, row - within] + within)
    return rows


def _attention_group(
    tiles: Sequence[Tile],
    first_row: int,
    items: Sequence[SequenceRows],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    num_rows = tiles[0].num_rows
    lengths = tuple(tile.length for tile in tiles)
    length = max(lengths)
    blocks = [items[tile.index].blocks for tile in tiles]
    trees = [_tree_tile(tile, items[tile.index]) for tile in tiles]
    mask = _mask(tiles, num_rows, length, dtype, device)
    has_trees = any(trees)
    if has_trees:
        assert mask is not None, "a tile of one row has a path instead"
        hide_nodes(mask, trees)
    return AttentionGroup(
        first_row=first_row,
        num_tiles=len(tiles),
        num_rows=num_rows,
        length=length,
        read=_read_slots(blocks, tiles, length, block_size, device),
        mask=mask,
        lengths=lengths,
        tree_places=tree_places(lengths, trees, num_rows) if has_trees else None,
    )


def _tree_tile(tile: Tile, item: SequenceRows) -> TreeTile | None:
    """None where no row is a node, or where the one row reads nothing but its path."""
    num_nodes = len(item.tree_parents)
    first_node = tile.offset - (len(item.token_ids) - num_nodes)
    if not num_nodes or tile.path or first_node + tile.num_rows <= 0:
        return None
    num_committed = max(0, -first_node)
    return TreeTile(
        item.tree_parents, item.tree_base, num_committed, max(0, first_node), tile.num_rows
    )


def _read_slots(
    tables: Sequence[Sequence[int]],
    tiles: Sequence[Tile],
    length: int,
    block_size: int,
    device: torch.device,
) -> torch.Tensor | slice:
    if len(tiles) == 1 and not tiles[0].path:
        used = tables[0][: -(-length // block_size)]
        if used[-1] - used[0] == len(used) - 1 and list(used) == list(range(used[0], used[-1] + 1)):
            return slice(used[0] * block_size, used[0] * block_size + length)
    reach = max(length, *(tile.path[-1] + 1 for tile in tiles if tile.path), 0)
    num_blocks = -(-reach // block_size)
    padded = [(list(table) + [table[-1]] * num_blocks)[:num_blocks] for table in tables]
    lengths = torch.tensor([[tile.length] for tile in tiles], device=device)
    # Padding repeats the sequence's own last position, never a slot of somebody else: a masked
    # position has weight 0, and 0 x NaN of a stranger would still be NaN.
    position = torch.minimum(torch.arange(length, device=device)[None], lengths - 1)
    for index, tile in enumerate(tiles):
        if tile.path:  # padding repeats the last of these
            own = torch.tensor(tile.path, device=device)
            position[index, tile.length - len(own) : tile.length] = own
            position[index, tile.length :] = tile.path[-1]
    block = torch.tensor(padded, device=device).gather(1, position // block_size)
    return (block * block_size + position % block_size).flatten()


def _mask(
    tiles: Sequence[Tile], num_rows: int, length: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    if num_rows == 1 and all(tile.length == length for tile in tiles):
        return None
    lengths = torch.tensor([tile.length for tile in tiles], device=device)
    row = torch.arange(num_rows, device=device)
    last_visible = lengths[:, None] - num_rows + row[None]
    hidden = torch.arange(length, device=device)[None, None] > last_visible[:, :, None]
    mask = torch.zeros(len(tiles), num_rows, length, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None]
