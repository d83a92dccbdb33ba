"""The block pool against memory itself: every slot a sequence reads holds that sequence's text.

Each slot is modelled by the prefix whose KV it holds. Passes write, fail, rewind, share, evict
and free in any order; whatever a sequence reads afterwards must be a prefix of its own text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.base import OutOfBlocks
from paceline.engine.blocks import BlockPool, Reservation, WantedRows

BLOCK_SIZE = 2
NUM_BLOCKS = 9


@dataclass(frozen=True)
class Rows:
    """What one sequence does in a pass; two token ids only, so that texts meet often."""

    sequence_id: int
    back: int
    token_ids: tuple[int, ...]
    num_needed: int
    max_rows: int | None
    is_cacheable: bool


ROWS = st.builds(
    Rows,
    sequence_id=st.integers(0, 3),
    back=st.sampled_from([0, 0, 0, 1, 2, 3, 5, 99]),
    token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple),
    num_needed=st.integers(0, 2),
    max_rows=st.sampled_from([None, None, 1, 2, 3]),
    is_cacheable=st.booleans() | st.just(True),
)
PASS = st.tuples(
    st.lists(ROWS, min_size=1, max_size=3, unique_by=lambda rows: rows.sequence_id),
    st.sampled_from([True, True, True, False]),  # whether the pass succeeds
)
ACTION = PASS | st.integers(0, 3)  # a pass, or free that sequence


@dataclass
class Model:
    """Texts by sequence, and what each slot holds: a prefix, or None once it is garbage."""

    pool: BlockPool
    texts: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    num_hits: int = 0
    num_splits: int = 0

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
        start = max(0, len(self.texts[rows.sequence_id]) - rows.back)
        num_needed = min(rows.num_needed, len(rows.token_ids))
        return WantedRows(
            rows.sequence_id,
            start,
            rows.token_ids,
            num_needed,
            rows.max_rows,
            rows.is_cacheable,
        )

    def finish(
        self, wanted: list[WantedRows], reservations: list[Reservation], is_done: bool
    ) -> None:
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
                self.texts[got.sequence_id] = text[: got.start]

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
