"""The block pool against memory itself: every slot a sequence reads holds that sequence's text.

Each slot is modelled by the prefix whose KV it holds. Passes write, fail, rewind, fork, share,
evict and free in any order; what a sequence reads afterwards must be a prefix of its own text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.base import OutOfBlocks
from paceline.engine.blocks import BlockPool, Reservation, WantedRows

BLOCK_SIZE = 2
NUM_BLOCKS = 9


@dataclass(frozen=True)
class Rows:
    """What one sequence does in a pass; two token ids only, so that texts meet often.

    An empty one begins as a fork of `fork_of`, if there is that one; `back` is from its end then.
    """

    sequence_id: int
    back: int
    token_ids: tuple[int, ...]
    num_needed: int
    max_rows: int | None
    is_cacheable: bool
    fork_of: int | None = None


ROWS = st.builds(
    Rows,
    sequence_id=st.integers(0, 3),
    back=st.sampled_from([0, 0, 0, 1, 2, 3, 5, 99]),
    token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple),
    num_needed=st.integers(0, 2),
    max_rows=st.sampled_from([None, None, 1, 2, 3]),
    is_cacheable=st.booleans() | st.just(True),
)
FORKS = st.builds(
    Rows,
    sequence_id=st.integers(0, 3),
    back=st.sampled_from([0, 0, 1, 2, 3, 5, 99]),
    token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple),
    num_needed=st.integers(0, 2),
    max_rows=st.sampled_from([None, None, 1, 2]),
    is_cacheable=st.just(True),
    fork_of=st.none() | st.integers(0, 3),
)


def actions_of(rows: st.SearchStrategy[Rows]) -> st.SearchStrategy[tuple[list[Rows], bool] | int]:
    """A pass and whether it succeeds, or a sequence to free."""
    items = st.lists(rows, min_size=1, max_size=3, unique_by=lambda rows: rows.sequence_id)
    return st.tuples(items, st.sampled_from([True, True, True, False])) | st.integers(0, 3)


ACTION = actions_of(ROWS)


@dataclass
class Model:
    """Texts by sequence, and what each slot holds: a prefix, or None once it is garbage."""

    pool: BlockPool
    texts: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    num_hits: int = 0
    num_splits: int = 0
    num_forks: int = 0
    num_copies: int = 0

    def run(self, passes: list[Rows], is_done: bool) -> None:
        wanted = [self.wanted(rows) for rows in passes]
        fits = self.pool.can_fit([(w.sequence_id, w.start + len(w.token_ids)) for w in wanted])
        before = {i: (list(t.blocks), list(t.token_ids)) for i, t in self.pool.tables.items()}
        try:
            reservations = self.pool.reserve(wanted)
        except OutOfBlocks:
            # only a rewind over shared blocks may take more than was said
            rewinds = [w for w in wanted if w.start < len(self.texts[w.sequence_id])]
            assert not fits or rewinds
            after = {i: (list(t.blocks), list(t.token_ids)) for i, t in self.pool.tables.items()}
            assert after == before
            return
        self.finish(wanted, reservations, is_done)

    def wanted(self, rows: Rows) -> WantedRows:
        if rows.sequence_id not in self.texts:
            self.texts[rows.sequence_id] = []
            self.pool.add(rows.sequence_id)
        is_fork = rows.fork_of in self.texts and not self.texts[rows.sequence_id]
        fork_of = rows.fork_of if is_fork else None
        before = self.texts[rows.sequence_id if fork_of is None else fork_of]
        start = max(0, len(before) - rows.back)
        num_needed = min(rows.num_needed, len(rows.token_ids))
        return WantedRows(
            rows.sequence_id,
            start,
            rows.token_ids,
            num_needed,
            rows.max_rows,
            rows.is_cacheable and not is_fork,
            fork_of=fork_of,
        )

    def finish(
        self, wanted: list[WantedRows], reservations: list[Reservation], is_done: bool
    ) -> None:
        old = {want.sequence_id: want.fork_of for want in wanted if want.fork_of is not None}
        begun = {child: list(self.texts[parent]) for child, parent in old.items()}
        self.texts.update(begun)
        self.copy(reservations)
        for want, got in zip(wanted, reservations, strict=True):
            self.check_rows(want, got)
            self.write(got, is_garbage=not is_done)
        if is_done:  # all rows of a layer are written before any are read
            for got in reservations:
                self.check_read(got.blocks, self.text(got))
        for got in reservations:
            text = self.text(got)
            if is_done:
                self.pool.commit(got)
                self.texts[got.sequence_id] = text
            else:
                self.pool.abort(got)
                self.texts[got.sequence_id] = [] if got.is_fork else text[: got.start]

    def copy(self, reservations: list[Reservation]) -> None:
        """The last blocks of forks, before anything is written; some may have other owners now."""
        copies: dict[int, tuple[int, ...] | None] = {}
        for got in reservations:
            self.num_forks += got.is_fork
            if got.copied_block is not None:
                self.num_copies += 1
                block = got.blocks[got.start // BLOCK_SIZE]
                for offset in range(BLOCK_SIZE):
                    source = got.copied_block * BLOCK_SIZE + offset
                    copies[block * BLOCK_SIZE + offset] = self.slots.get(source)
        self.slots.update(copies)

    def text(self, got: Reservation) -> list[int]:
        return [*self.texts[got.sequence_id][: got.start], *got.token_ids]

    def check_rows(self, want: WantedRows, got: Reservation) -> None:
        length = len(self.texts[want.sequence_id])
        limit = len(want.token_ids) if want.max_rows is None else want.max_rows
        end = want.start + min(len(want.token_ids), got.num_prefix_tokens + limit)
        assert (got.start, got.end) == (want.start, end)
        assert tuple(got.token_ids) == tuple(want.token_ids)[: end - want.start]
        assert got.num_prefix_tokens <= len(want.token_ids) - want.num_needed
        if got.num_prefix_tokens:
            assert want.is_cacheable
            assert want.start == length
            assert want.fork_of is None
            assert want.start % BLOCK_SIZE == got.num_prefix_tokens % BLOCK_SIZE == 0
        redone = 0 if got.shared_block is None else want.start % BLOCK_SIZE
        assert got.first == want.start + got.num_prefix_tokens - redone
        assert list(got.computed_ids) == self.text(got)[got.first :]
        self.num_hits += got.num_prefix_tokens > 0
        self.num_splits += got.shared_block is not None

    def write(self, got: Reservation, *, is_garbage: bool) -> None:
        text = self.text(got)
        for position in range(got.first, got.end):
            slot = self.slot(got.blocks, position)
            self.slots[slot] = None if is_garbage else tuple(text[: position + 1])

    def check_read(self, blocks: list[int] | tuple[int, ...], text: list[int]) -> None:
        for position in range(len(text)):
            assert self.slots[self.slot(blocks, position)] == tuple(text[: position + 1])

    @staticmethod
    def slot(blocks: list[int] | tuple[int, ...], position: int) -> int:
        return blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def free(self, sequence_id: int) -> None:
        self.pool.free(sequence_id)
        self.texts.pop(sequence_id, None)

    def check(self) -> None:
        self.pool.check_integrity()
        used: set[int] = set()
        assert self.pool.tables.keys() == self.texts.keys()
        for sequence_id, text in self.texts.items():
            table = self.pool.table(sequence_id)
            assert table.token_ids == text
            self.check_read(table.blocks, text)
            used.update(table.blocks)
        assert self.pool.num_free_blocks == NUM_BLOCKS - len(used)


def play(actions: list[tuple[list[Rows], bool] | int], *, enable_prefix_caching: bool) -> Model:
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)
    model = Model(pool)
    for action in actions:
        if isinstance(action, int):
            model.free(action)
        else:
            model.run(*action)
        model.check()
    for sequence_id in list(model.texts):
        model.free(sequence_id)
    model.check()
    assert model.pool.num_free_blocks == NUM_BLOCKS
    return model


@given(st.lists(ACTION, max_size=30))
def test_a_sequence_reads_only_its_own_text(actions: list[tuple[list[Rows], bool] | int]) -> None:
    play(actions, enable_prefix_caching=True)


@given(st.lists(ACTION, max_size=15))
def test_without_caching_nothing_is_ever_shared(
    actions: list[tuple[list[Rows], bool] | int],
) -> None:
    model = play(actions, enable_prefix_caching=False)
    assert (model.num_hits, model.num_splits) == (0, 0)
    assert (model.pool.num_prefix_tokens, model.pool.num_prefix_queries) == (0, 0)


@given(st.lists(actions_of(FORKS), max_size=30), st.booleans())
def test_so_does_a_fork(
    actions: list[tuple[list[Rows], bool] | int], enable_prefix_caching: bool
) -> None:
    play(actions, enable_prefix_caching=enable_prefix_caching)


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_long_random_run_meets_forks_and_copies(enable_prefix_caching: bool) -> None:
    """Lenders and borrowers rewind, end and fork again, often in one pass."""
    rng = random.Random(20260302)
    actions: list[tuple[list[Rows], bool] | int] = []
    for _ in range(6000):
        if rng.random() < 0.3:
            actions.append(rng.randrange(4))
            continue
        passes = [
            Rows(
                sequence_id,
                rng.choice([0, 0, 0, 1, 2, 3, 99]),
                tuple(rng.choices((0, 1), k=rng.randint(1, 3))),
                1,
                rng.choice([None, None, 1]),
                True,
                rng.choice([None, 0, 1, 2, 3]),
            )
            for sequence_id in rng.sample(range(4), rng.randint(1, 3))
        ]
        actions.append((passes, rng.random() < 0.8))
    model = play(actions, enable_prefix_caching=enable_prefix_caching)
    assert model.num_forks > 200
    assert model.num_copies > 100
    assert model.num_splits > 40


def test_a_long_random_run_meets_hits_and_splits() -> None:
    """The property above is worth nothing if its schedules never share a block."""
    rng = random.Random(20260301)
    actions: list[tuple[list[Rows], bool] | int] = []
    for _ in range(8000):
        if rng.random() < 0.15:
            actions.append(rng.randrange(4))
            continue
        passes = [
            Rows(
                sequence_id,
                rng.choice([0, 0, 0, 1, 2, 3, 5, 99]),
                tuple(rng.choices((0, 1), k=rng.randint(1, 8))),
                rng.randint(0, 2),
                rng.choice([None, None, 1, 2, 3]),
                rng.random() < 0.9,
            )
            for sequence_id in rng.sample(range(4), rng.randint(1, 3))
        ]
        actions.append((passes, rng.random() < 0.8))
    model = play(actions, enable_prefix_caching=True)
    assert model.num_hits > 500
    assert model.num_splits > 40
