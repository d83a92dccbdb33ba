"""Who uses which KV block. Pure bookkeeping: knows no tensor and no model.

A block holds `block_size` token positions. A sequence uses whole blocks, in order, and knows the
tokens in them; position i of a sequence lies in slot `blocks[i // block_size] * block_size +
i % block_size`. A full block may be used by several sequences that begin alike; it is never
written while it is.

A fork begins with the full blocks of another sequence. They are not counted one by one: it
*borrows* them, which costs nothing however long the text, and the lender must ask before it gives
one back or writes to it (`_settle`: from then on they are counted).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.engine.base import OutOfBlocks
from paceline.engine.block_table import BlockTable, Reservation, WantedRows
from paceline.engine.prefix_cache import PrefixCache, chain_digest, root_digest
from paceline.errors import LocalProtocolError

__all__ = ["BlockPool", "BlockTable", "Reservation", "WantedRows"]


@dataclass(slots=True)
class _Plan:
    """What a reserve would do, before it does anything. Invariant: the pool is unchanged."""

    # Change of each block's reference count.
    delta: Counter[int] = field(default_factory=Counter)
    overwritten: set[int] = field(default_factory=set)
    num_new: int = 0


class BlockPool:
    """Allocates blocks to numbered sequences.

    Every block is free, idle (only the prefix cache knows it; free as well) or used by sequences.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one token: {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_prefix_tokens = 0
        self.num_prefix_queries = 0
        # Taken from the end, so low numbers go first and a small load stays in a small region.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cache = PrefixCache()
        self._num_users: Counter[int] = Counter()
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + self._cache.num_idle

    @property
    def num_sequences(self) -> int:
        return len(self._tables)

    @property
    def tables(self) -> Mapping[int, BlockTable]:
        """By sequence id; to read only."""
        return self._tables

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
        that was not added counts as an empty sequence, so that admission can ask beforehand. What
        the prefix cache would spare is not counted, nor what a rewind takes before growing again
        if another sequence shares the blocks: those it may not overwrite.
        """
        plan = _Plan()
        for sequence_id, length in lengths:
            table = self._tables.get(sequence_id)
            blocks = table.blocks if table else []
            keep = self.blocks_for(length)
            if table is not None and length < table.length:
                self._settle_behind(table, length)
            plan.num_new += max(0, keep - len(blocks))
            plan.delta.subtract(blocks[keep:])
        return plan.num_new <= self._num_free_after(plan)

    def reserve(self, rows: Iterable[WantedRows]) -> list[Reservation]:
        """Truncate each sequence to `start` and give it blocks for its rows, all or nothing.

        `rows` are of distinct known sequences with start <= length. Lengths become `start`:
        `commit` counts the rows once they are written, `abort` gives them up.
        `OutOfBlocks` leaves everything as it was.
        """
        wanted_rows, plan = list(rows), _Plan()
        # First: what a fork shares may not be overwritten by the one that it comes from.
        forks = [wanted for wanted in wanted_rows if wanted.fork_of is not None]
        copied = {wanted.sequence_id: self._share(wanted, plan) for wanted in forks}
        others = [wanted for wanted in wanted_rows if wanted.fork_of is None]
        planned = [(wanted, *self._plan(wanted, plan)) for wanted in others]
        num_free = self._num_free_after(plan)
        if plan.num_new > num_free:
            for wanted in forks:
                self.truncate(wanted.sequence_id, 0)
            raise OutOfBlocks(f"a pass needs {plan.num_new} blocks, {num_free} are free")
        # In this order: what one gives back may serve another, but nothing that a sequence finds
        # in the prefix cache may be evicted for the new blocks of the next one.
        for wanted, _, _ in planned:
            self.truncate(wanted.sequence_id, wanted.start)
        for wanted, found, _ in planned:
            for block in found.values():
                self._use(block)
            table = self._tables[wanted.sequence_id]
            table.blocks.extend(found.values())
            table.digests.extend(found)
        for block in plan.overwritten:
            self._cache.unregister(block)
        splits = {wanted.sequence_id: (len(found), is_split) for wanted, found, is_split in planned}
        return [
            self._reserve_fork(wanted, copied[wanted.sequence_id])
            if wanted.fork_of is not None
            else self._reserve(wanted, *splits[wanted.sequence_id])
            for wanted in wanted_rows
        ]

    def _share(self, wanted: WantedRows, plan: _Plan) -> int | None:
        """Make the sequence the beginning of the one that it forks from, but for the last block if
        that is not full: returns the one to copy instead."""
        assert wanted.fork_of is not None
        table, lender = self.table(wanted.sequence_id), self.table(wanted.fork_of)
        if table.length or not 0 <= wanted.start <= lender.length:
            raise LocalProtocolError(f"sequence {wanted.sequence_id} cannot begin as a fork")
        self._settle(lender)
        num_shared, offset = divmod(wanted.start, self.block_size)
        table.borrow(lender, num_shared, wanted.start)
        plan.num_new += self.blocks_for(self._end(wanted, 0)) - num_shared
        return lender.blocks[num_shared] if offset else None

    def _settle(self, table: BlockTable) -> None:
        """Count the blocks that a fork has borrowed."""
        for block in table.blocks[: table.num_borrowed]:
            self._num_users[block] += 1
        table.give_back()

    def _settle_behind(self, table: BlockTable, length: int) -> None:
        """Before a sequence is cut to `length`: count what it may then give back or write to."""
        if length < table.num_borrowed * self.block_size:
            self._settle(table)
        for borrower in [*table.borrowers]:
            if length < borrower.num_borrowed * self.block_size:
                self._settle(borrower)

    def _plan(self, wanted: WantedRows, plan: _Plan) -> tuple[dict[bytes, int], bool]:
        """Named blocks found in the prefix cache, and whether a shared block must be replaced."""
        table = self.table(wanted.sequence_id)
        self._settle_behind(table, wanted.start)
        keep = self.blocks_for(wanted.start)
        plan.delta.subtract(table.blocks[keep:])
        found: dict[bytes, int] = {}
        is_split = False
        if wanted.start % self.block_size:
            block = table.blocks[keep - 1]
            is_split = self._num_users[block] + plan.delta[block] > 1
            if not is_split and self._cache.digest_of(block) is not None:
                plan.overwritten.add(block)
        else:
            found = self._find(wanted, table, plan)
        end = self._end(wanted, len(found))
        plan.num_new += self.blocks_for(end) - keep - len(found) + is_split
        return found, is_split

    def _find(self, wanted: WantedRows, table: BlockTable, plan: _Plan) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        if wanted.start != table.length:
            return found
        digest = table.digests[-1] if table.digests else root_digest(wanted.cache_salt)
        for index in range(self._num_candidates(wanted)):
            begin = index * self.block_size
            digest = chain_digest(digest, wanted.token_ids[begin : begin + self.block_size])
            block = self._cache.find(digest)
            if block is None or block in plan.overwritten:
                break
            found[digest] = block
            plan.delta[block] += 1
        return found

    def _num_candidates(self, wanted: WantedRows) -> int:
        """Whole blocks of the rows that could come from the prefix cache."""
        if not (self.enable_prefix_caching and wanted.is_cacheable):
            return 0
        return (len(wanted.token_ids) - wanted.num_needed) // self.block_size

    def _end(self, wanted: WantedRows, num_found: int) -> int:
        end = wanted.start + len(wanted.token_ids)
        if wanted.max_rows is None:
            return end
        return min(end, wanted.start + num_found * self.block_size + wanted.max_rows)

    def _num_free_after(self, plan: _Plan) -> int:
        """Free blocks once the plan's uses are counted, before any new block is taken."""
        num_free = self.num_free_blocks
        for block, delta in plan.delta.items():
            num_users = self._num_users[block]
            num_free += (num_users + delta == 0) - (num_users == 0)
        return num_free

    def _reserve(self, wanted: WantedRows, num_found: int, is_split: bool) -> Reservation:
        table = self._tables[wanted.sequence_id]
        if wanted.start == 0:
            table.cache_salt = wanted.cache_salt
        end = self._end(wanted, num_found)
        first = wanted.start + num_found * self.block_size
        redone: list[int] = []
        shared_block = None
        if is_split:
            index, offset = divmod(wanted.start, self.block_size)
            first -= offset
            redone = table.token_ids[first:]
            # Still used by this sequence until the rows are written: it may have to go back.
            shared_block, table.blocks[index] = table.blocks[index], self._take()
        for _ in range(self.blocks_for(end) - len(table.blocks)):
            table.blocks.append(self._take())
        num_prefix_tokens = num_found * self.block_size
        token_ids = wanted.token_ids[: end - wanted.start]
        if self._num_candidates(wanted):
            self.num_prefix_queries += len(token_ids)
            self.num_prefix_tokens += num_prefix_tokens
        return Reservation(
            sequence_id=wanted.sequence_id,
            start=wanted.start,
            first=first,
            end=end,
            token_ids=token_ids,
            computed_ids=(*redone, *token_ids[num_prefix_tokens:]),
            blocks=tuple(table.blocks),
            num_prefix_tokens=num_prefix_tokens,
            shared_block=shared_block,
        )

    def _reserve_fork(self, wanted: WantedRows, copied_block: int | None) -> Reservation:
        table, end = self._tables[wanted.sequence_id], self._end(wanted, 0)
        for _ in range(self.blocks_for(end) - len(table.blocks)):
            table.blocks.append(self._take())
        token_ids = wanted.token_ids[: end - wanted.start]
        return Reservation(
            sequence_id=wanted.sequence_id,
            start=wanted.start,
            first=wanted.start,
            end=end,
            token_ids=token_ids,
            computed_ids=tuple(token_ids),
            blocks=tuple(table.blocks),
            copied_block=copied_block,
            is_fork=True,
        )

    def commit(self, reservation: Reservation) -> None:
        """Count the rows that a pass has written, and name the blocks that they filled. Of a tree,
        those that were accepted, moved to their places; what the others took is given back."""
        table = self.table(reservation.sequence_id)
        assert table.length == reservation.start, "committed twice, or changed during the pass"
        table.token_ids.extend(reservation.token_ids)
        if reservation.shared_block is not None:
            self._release(reservation.shared_block)
        while len(table.blocks) > self.blocks_for(table.length):  # refused nodes of a tree
            self._release(table.blocks.pop())
        if not self.enable_prefix_caching:
            return
        for index in range(len(table.digests), table.length // self.block_size):
            digest = self._digest(table, index)
            table.digests.append(digest)
            self._cache.register(table.blocks[index], digest)

    def abort(self, reservation: Reservation) -> None:
        """The pass failed: whatever it wrote is never read, and `start` tokens are cached (of a
        fork none)."""
        table = self.table(reservation.sequence_id)
        if reservation.shared_block is not None:
            index = reservation.start // self.block_size
            self._release(table.blocks[index])
            table.blocks[index] = reservation.shared_block
        self.truncate(reservation.sequence_id, 0 if reservation.is_fork else reservation.start)

    def truncate(self, sequence_id: int, length: int) -> None:
        """Rewind: keep the first `length` tokens and give back the blocks behind them."""
        table = self.table(sequence_id)
        if not 0 <= length <= table.length:
            raise LocalProtocolError(
                f"sequence {sequence_id}: cannot rewind to {length}, {table.length} are cached"
            )
        if length == 0 and table.num_borrowed:  # a branch ends: nothing was counted
            del table.blocks[: table.num_borrowed]
            table.give_back()
        self._settle_behind(table, length)
        keep = self.blocks_for(length)
        # The last one first: of a chain, the end is given up before what it depends on.
        for block in reversed(table.blocks[keep:]):
            self._release(block)
        del table.blocks[keep:]
        table.cut(length)
        del table.digests[length // self.block_size :]

    def free(self, sequence_id: int) -> None:
        """Forget a sequence; unknown ids are ignored."""
        if sequence_id in self._tables:
            self.truncate(sequence_id, 0)
            del self._tables[sequence_id]

    def _use(self, block: int) -> None:
        self._cache.revive(block)
        self._num_users[block] += 1

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._cache.evict()
        self._num_users[block] += 1
        return block

    def _release(self, block: int) -> None:
        self._num_users[block] -= 1
        if self._num_users[block]:
            return
        del self._num_users[block]
        if self._cache.digest_of(block) is None:
            self._free.append(block)
        else:
            self._cache.retire(block)

    def _digest(self, table: BlockTable, index: int) -> bytes:
        begin = index * self.block_size
        parent = table.digests[index - 1] if index else root_digest(table.cache_salt)
        return chain_digest(parent, table.token_ids[begin : begin + self.block_size])

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is lost, miscounted, misnamed or used without need."""
        counted = (block for t in self._tables.values() for block in t.blocks[t.num_borrowed :])
        num_users = Counter(counted)
        assert num_users == self._num_users, "blocks lost or shared: users miscounted"
        blocks = [*num_users, *self._free, *self._cache.idle_blocks]
        assert sorted(blocks) == list(range(self.num_blocks)), "blocks lost or shared"
        self._cache.check_integrity()
        for block in self._free:
            assert self._cache.digest_of(block) is None, f"free block {block} has a name"
        texts: dict[int, list[int]] = {}
        for sequence_id, table in self._tables.items():
            self._check_table(f"sequence {sequence_id}", table)
            self._check_texts(f"sequence {sequence_id}", table, texts)

    def _check_texts(self, where: str, table: BlockTable, texts: dict[int, list[int]]) -> None:
        """Each block holds one text, whoever uses it; `texts` are those of the tables so far."""
        for index, block in enumerate(table.blocks):
            mine = table.token_ids[: (index + 1) * self.block_size]
            other = texts.setdefault(block, mine)
            length = min(len(mine), len(other))
            assert mine[:length] == other[:length], f"{where}: block {block} has another's text"
        for borrower in table.borrowers:
            number = borrower.num_borrowed
            assert borrower.lender is table, f"{where}: lends to one that does not know"
            assert borrower.blocks[:number] == table.blocks[:number], f"{where}: lends no more"

    def _check_table(self, where: str, table: BlockTable) -> None:
        assert len(table.blocks) == self.blocks_for(table.length), (
            f"{where}: {len(table.blocks)} blocks for {table.length} tokens"
        )
        num_full = table.length // self.block_size if self.enable_prefix_caching else 0
        assert len(table.digests) == num_full, f"{where}: {len(table.digests)} names of {num_full}"
        for index, digest in enumerate(table.digests):
            assert digest == self._digest(table, index), f"{where}: block {index} misnamed"
            name = self._cache.digest_of(table.blocks[index])
            assert name in (None, digest), f"{where}: block {index} holds another text"
