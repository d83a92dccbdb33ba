"""The blocks of one sequence, and what a pass asks of the pool and gets. Plain data.

Knows no other sequence's tokens, no tensor and no model; `engine/blocks.py` keeps the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.engine.token_counts import TokenCounts


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence and `token_ids`, exactly the tokens whose KV is in them.

    `digests` are the names of its full blocks (none without prefix caching). `counts` are those
    of `token_ids`, or of fewer, and during a pass also of rows being written; None if nobody asked.
    `cache_salt` is that of the text in the blocks: it changes only while there is none.
    The first `num_borrowed` blocks are used on account of `lender`, whose first ones they are too;
    those who do so with this one's are its `borrowers`.
    Invariant, between passes: len(blocks) == ceil(length / block_size). During a pass the blocks
    already cover the rows being written while `token_ids` still has only finished ones.
    """

    blocks: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    counts: TokenCounts | None = None
    cache_salt: int = 0
    lender: BlockTable | None = None
    num_borrowed: int = 0
    borrowers: list[BlockTable] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def borrow(self, lender: BlockTable, num_blocks: int, length: int) -> None:
        """Begin as the first `length` tokens of another, in its first `num_blocks` blocks."""
        self.blocks = lender.blocks[:num_blocks]
        self.token_ids = lender.token_ids[:length]
        self.digests = lender.digests[:num_blocks]
        self.cache_salt = lender.cache_salt
        if num_blocks:
            self.lender, self.num_borrowed = lender, num_blocks
            lender.borrowers.append(self)

    def give_back(self) -> None:
        """The blocks are its own, or not its any more."""
        if self.lender is not None:
            self.lender.borrowers.remove(self)
        self.lender, self.num_borrowed = None, 0

    def counted(self, new_token_ids: Sequence[int], prompt_len: int) -> TokenCounts:
        """`counts`, made to hold `token_ids` and then rows being written; good for one pass.

        Only tokens that no earlier call has counted are read.
        """
        if self.counts is None or self.counts.prompt_len != prompt_len:
            self.counts = TokenCounts(prompt_len)
        # a second call in one pass may want fewer rows
        self.counts.rewind(self.length)
        self.counts.extend(self.token_ids[self.counts.length :])
        self.counts.extend(new_token_ids)
        return self.counts

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens, those being written included."""
        del self.token_ids[length:]
        if self.counts is not None and length < self.counts.prompt_len:
            self.counts = None  # preempted: a later use may be for another request
        elif self.counts is not None:
            self.counts.rewind(length)


@dataclass(slots=True)  # one per row: see StepItem
class WantedRows:
    """A sequence is to be truncated to `start` and to go on with `token_ids`.

    The last `num_needed` rows have to be computed; those before may come from the prefix cache
    if `is_cacheable`, and if they were written under the same `cache_salt`. At most `max_rows` of
    them are computed (None: all). With `fork_of` the sequence is empty, the rows are not cacheable
    and it begins with what that one holds before the pass, up to `start`.
    """

    sequence_id: int
    start: int
    token_ids: Sequence[int]
    num_needed: int = 0
    max_rows: int | None = None
    is_cacheable: bool = True
    cache_salt: int = 0
    fork_of: int | None = None


@dataclass(slots=True)  # one per row: see StepItem
class Reservation:
    """Rows `first .. end - 1` of a sequence are to be written in this pass, to `blocks`.

    `num_prefix_tokens` from `start` on were found in the prefix cache, so that `first` is behind
    them. `first` lies before `start` when the block there is shared (`shared_block`): it may not
    be overwritten, so its first rows are written again to another one. `computed_ids` are the
    tokens of the rows to write, `token_ids` those from `start` to `end`. Of a fork, the block in
    which `first` lies begins as a copy of `copied_block`, made before any row is written.

    Of a tree, `accept` says which nodes stay: `moves` are the positions (from, to) whose KV has
    to be copied before `commit`, all of it read before any is written.
    """

    sequence_id: int
    start: int
    first: int
    end: int
    token_ids: Sequence[int]
    computed_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    num_prefix_tokens: int = 0
    shared_block: int | None = None
    copied_block: int | None = None
    is_fork: bool = False
    moves: tuple[tuple[int, int], ...] = ()

    def accept(self, num_nodes: int, accepted: Sequence[int]) -> None:
        """Of the last `num_nodes` tokens only some, ascending, stay, one behind the other."""
        first = self.end - num_nodes
        tail = self.token_ids[len(self.token_ids) - num_nodes :]
        committed = self.token_ids[: len(self.token_ids) - num_nodes]
        self.token_ids = (*committed, *(tail[node] for node in accepted))
        self.end = first + len(accepted)
        self.moves = tuple(
            (first + node, first + place) for place, node in enumerate(accepted) if node != place
        )

    def moved_slots(self, block_size: int) -> list[tuple[int, int]]:
        """`moves` as slots of the KV pool."""

        def slot(position: int) -> int:
            return self.blocks[position // block_size] * block_size + position % block_size

        return [(slot(source), slot(destination)) for source, destination in self.moves]
