"""Who owns which KV block. Pure bookkeeping: knows no tensor, no model and no token id.

A block holds `block_size` token positions. A sequence owns whole blocks, in order, and a length;
position i of a sequence lies in slot `blocks[i // block_size] * block_size + i % block_size`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.engine.base import OutOfBlocks
from paceline.errors import LocalProtocolError


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence.

    Invariant, between passes: len(blocks) == ceil(length / block_size). During a pass the blocks
    already cover the rows being written while `length` still counts only finished ones.
    """

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class BlockPool:
    """Allocates blocks to numbered sequences. Every block is free or owned by exactly one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token: {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Taken from the end, so low numbers go first and a small load stays in a small region.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_sequences(self) -> int:
        return len(self._tables)

    def blocks_for(self, length: int) -> int:
        """Blocks that hold `length` tokens."""
        return -(-length // self.block_size)

    def add(self, sequence_id: int) -> None:
        """Begin an empty sequence; `LocalProtocolError` when the id is in use."""
        if sequence_id in self._tables:
            raise LocalProtocolError(f"sequence {sequence_id} already exists")
        self._tables[sequence_id] = BlockTable()

    def table(self, sequence_id: int) -> BlockTable:
        """The table of a sequence; `LocalProtocolError` when there is none."""
        table = self._tables.get(sequence_id)
        if table is None:
            raise LocalProtocolError(f"unknown sequence {sequence_id}")
        return table

    def can_fit(self, lengths: Iterable[tuple[int, int]]) -> bool:
        """Whether the sequences can all be resized to (sequence_id, length) at once.

        A length below the present one counts as a rewind, whose blocks serve the others. An id
        that was not added counts as an empty sequence, so that admission can ask beforehand.
        """
        needed = 0
        for sequence_id, length in lengths:
            table = self._tables.get(sequence_id)
            needed += self.blocks_for(length) - (len(table.blocks) if table else 0)
        return needed <= len(self._free)

    def reserve(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Truncate each sequence to `start` and own blocks for `start + num_rows`, all or nothing.

        `rows` are (sequence_id, start, num_rows) of distinct known sequences with
        start <= length. Lengths become `start`: `commit` counts the rows once they are written.
        `OutOfBlocks` leaves everything as it was.
        """
        rows = list(rows)
        if not self.can_fit(
            (sequence_id, start + num_rows) for sequence_id, start, num_rows in rows
        ):
            raise OutOfBlocks(f"{len(rows)} sequences need more than {len(self._free)} free blocks")
        for sequence_id, start, _ in rows:
            self.truncate(sequence_id, start)
        for sequence_id, start, num_rows in rows:
            table = self._tables[sequence_id]
            for _ in range(self.blocks_for(start + num_rows) - len(table.blocks)):
                table.blocks.append(self._free.pop())

    def commit(self, sequence_id: int, length: int) -> None:
        """Count rows that a pass has written; blocks for them are owned already."""
        table = self.table(sequence_id)
        assert table.length <= length <= len(table.blocks) * self.block_size
        table.length = length

    def truncate(self, sequence_id: int, length: int) -> None:
        """Rewind: keep the first `length` tokens and return the blocks behind them."""
        table = self.table(sequence_id)
        if not 0 <= length <= table.length:
            raise LocalProtocolError(
                f"sequence {sequence_id}: cannot rewind to {length}, {table.length} are cached"
            )
        keep = self.blocks_for(length)
        self._free.extend(reversed(table.blocks[keep:]))
        del table.blocks[keep:]
        table.length = length

    def free(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self._free.extend(reversed(table.blocks))

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is lost, shared, or owned without need."""
        owned = [block for table in self._tables.values() for block in table.blocks]
        assert sorted(owned + self._free) == list(range(self.num_blocks)), "blocks lost or shared"
        for sequence_id, table in self._tables.items():
            assert len(table.blocks) == self.blocks_for(table.length), (
                f"sequence {sequence_id}: {len(table.blocks)} blocks for {table.length} tokens"
            )
