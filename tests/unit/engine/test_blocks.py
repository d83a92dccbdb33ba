from __future__ import annotations

import pytest

from paceline.engine.base import OutOfBlocks
from paceline.engine.blocks import BlockPool
from paceline.errors import LocalProtocolError


def filled(pool: BlockPool, sequence_id: int, length: int) -> None:
    pool.add(sequence_id)
    pool.reserve([(sequence_id, 0, length)])
    pool.commit(sequence_id, length)


def test_growth_takes_a_block_only_when_the_last_one_is_full() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 4)
    assert pool.table(1).blocks == [0]
    pool.reserve([(1, 4, 1)])
    pool.commit(1, 5)
    assert pool.table(1).blocks == [0, 1]
    pool.reserve([(1, 5, 3)])
    pool.commit(1, 8)
    assert pool.table(1).blocks == [0, 1]
    assert pool.num_free_blocks == 2
    pool.check_integrity()


@pytest.mark.parametrize(("length", "kept"), [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_truncate_returns_the_blocks_behind_the_last_token(length: int, kept: int) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 9)
    pool.truncate(1, length)
    assert len(pool.table(1).blocks) == kept
    assert pool.num_free_blocks == 4 - kept
    pool.check_integrity()


def test_reserve_rewinds_and_grows_in_one_move() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 16)
    pool.add(2)
    # Sequence 1 gives back three blocks, which sequence 2 needs in the same pass.
    pool.reserve([(2, 0, 12), (1, 2, 1)])
    pool.commit(2, 12)
    pool.commit(1, 3)
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_out_of_blocks_changes_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 7)
    filled(pool, 2, 4)
    with pytest.raises(OutOfBlocks):
        pool.reserve([(1, 2, 1), (2, 4, 13)])
    assert (pool.table(1).blocks, pool.table(1).length) == ([0, 1], 7)
    assert (pool.table(2).blocks, pool.table(2).length) == ([2], 4)
    assert pool.num_free_blocks == 1
    pool.check_integrity()


def test_can_fit_counts_what_is_owned_and_what_is_given_back() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 8)
    assert pool.can_fit([(1, 16)])
    assert not pool.can_fit([(1, 17)])
    assert not pool.can_fit([(1, 12), (99, 5)])
    assert pool.can_fit([(1, 4), (99, 12)])


def test_free_returns_everything_and_ignores_strangers() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 9)
    pool.free(1)
    pool.free(1)
    assert (pool.num_free_blocks, pool.num_sequences) == (4, 0)
    pool.check_integrity()


def test_slips_of_the_caller_are_named() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 5)
    with pytest.raises(LocalProtocolError, match="already exists"):
        pool.add(1)
    with pytest.raises(LocalProtocolError, match="unknown sequence 2"):
        pool.table(2)
    with pytest.raises(LocalProtocolError, match="cannot rewind to 6"):
        pool.truncate(1, 6)


def test_integrity_sees_lost_and_shared_and_idle_blocks() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 5)
    filled(pool, 2, 1)
    lost = pool.table(1).blocks.pop()
    with pytest.raises(AssertionError, match="lost or shared"):
        pool.check_integrity()
    pool.table(2).blocks.append(lost)
    with pytest.raises(AssertionError, match="sequence"):
        pool.check_integrity()
