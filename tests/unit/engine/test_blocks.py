from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.engine.base import OutOfBlocks
from paceline.engine.blocks import BlockPool, Reservation, WantedRows
from paceline.errors import LocalProtocolError


def grown(pool: BlockPool, sequence_id: int, token_ids: Sequence[int], start: int = 0) -> None:
    """Rows that a pass wrote, all of them computed."""
    for reservation in pool.reserve(
        [WantedRows(sequence_id, start, token_ids, num_needed=len(token_ids))]
    ):
        pool.commit(reservation)


def filled(pool: BlockPool, sequence_id: int, length: int) -> None:
    """A sequence of its own tokens: no two of them begin alike."""
    pool.add(sequence_id)
    grown(pool, sequence_id, [100 * sequence_id + i for i in range(length)])


def begun(pool: BlockPool, sequence_id: int, token_ids: Sequence[int]) -> Reservation:
    """A new sequence with a prompt whose last row is sampled."""
    pool.add(sequence_id)
    [reservation] = pool.reserve([WantedRows(sequence_id, 0, token_ids, num_needed=1)])
    pool.commit(reservation)
    return reservation


def test_growth_takes_a_block_only_when_the_last_one_is_full() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 4)
    assert pool.table(1).blocks == [0]
    grown(pool, 1, [7], start=4)
    assert pool.table(1).blocks == [0, 1]
    grown(pool, 1, [8, 9, 10], start=5)
    assert pool.table(1).blocks == [0, 1]
    assert pool.table(1).token_ids == [100, 101, 102, 103, 7, 8, 9, 10]
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
    reservations = pool.reserve([WantedRows(2, 0, range(12), 12), WantedRows(1, 2, [5], 1)])
    for reservation in reservations:
        pool.commit(reservation)
    assert (pool.table(2).length, pool.table(1).token_ids) == (12, [100, 101, 5])
    assert pool.num_free_blocks == 0
    pool.check_integrity()


def test_out_of_blocks_changes_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 7)
    filled(pool, 2, 4)
    with pytest.raises(OutOfBlocks, match="needs 3 blocks, 2 are free"):
        pool.reserve([WantedRows(1, 2, [5], 1), WantedRows(2, 4, range(9), 1)])
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


def test_a_shared_block_is_not_given_back_by_one_of_its_users() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    begun(pool, 1, range(9))
    begun(pool, 2, range(9))
    assert (pool.table(1).blocks, pool.table(2).blocks) == ([0, 1, 2], [0, 1, 3])
    # sequence 1 would give back the block of its last token alone, both together all of them
    assert not pool.can_fit([(1, 0), (9, 8)])
    assert pool.can_fit([(1, 0), (9, 4)])
    assert pool.can_fit([(1, 0), (2, 0), (9, 16)])


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


# -- the prefix cache -----------------------------------------------------------------------


def test_a_prompt_finds_the_full_blocks_of_a_living_and_of_a_freed_sequence() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, range(11))
    living = begun(pool, 2, [*range(8), 50, 51])
    assert (living.num_prefix_tokens, living.first, living.computed_ids) == (8, 8, (50, 51))
    assert pool.table(2).blocks[:2] == pool.table(1).blocks[:2]
    pool.free(1)
    pool.free(2)
    assert pool.num_free_blocks == 8
    freed = begun(pool, 3, [*range(4), 60, 61, 62, 63, 64])
    assert (freed.num_prefix_tokens, freed.blocks[0]) == (4, 0)
    assert (pool.num_prefix_tokens, pool.num_prefix_queries) == (12, 11 + 10 + 9)
    pool.check_integrity()


def test_the_same_tokens_after_another_beginning_are_not_found() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert begun(pool, 2, [0, 2, 3, 4, 5, 6, 7, 8, 9]).num_prefix_tokens == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_needed", "num_found"),
    [(9, 1, 8), (8, 1, 4), (8, 0, 8), (9, 5, 4), (8, 8, 0)],
)
def test_rows_whose_logits_are_needed_are_computed(
    num_tokens: int, num_needed: int, num_found: int
) -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, range(12))
    pool.add(2)
    [reservation] = pool.reserve([WantedRows(2, 0, range(num_tokens), num_needed)])
    assert reservation.num_prefix_tokens == num_found
    assert len(reservation.computed_ids) == num_tokens - num_found
    pool.commit(reservation)
    pool.check_integrity()


def test_rows_are_limited_after_what_was_found() -> None:
    pool = BlockPool(num_blocks=16, block_size=4)
    begun(pool, 1, range(8))
    pool.add(2)
    [first] = pool.reserve([WantedRows(2, 0, range(20), 1, max_rows=5)])
    assert (first.num_prefix_tokens, first.first, first.end) == (8, 8, 13)
    assert len(first.blocks) == 4  # no block for rows of a later pass
    pool.commit(first)
    [last] = pool.reserve([WantedRows(2, 13, range(13, 20), 1, max_rows=7)])
    assert (last.first, last.end) == (13, 20)
    pool.commit(last)
    # each token of the prompt was looked up once
    assert (pool.num_prefix_tokens, pool.num_prefix_queries) == (8, 8 + 13 + 7)
    pool.check_integrity()


def test_later_chunks_of_a_prompt_find_what_another_sequence_has_written_meanwhile() -> None:
    pool = BlockPool(num_blocks=16, block_size=4)
    for sequence_id in (1, 2):
        pool.add(sequence_id)
        [chunk] = pool.reserve([WantedRows(sequence_id, 0, range(4), 0, max_rows=4)])
        pool.commit(chunk)
    grown(pool, 1, range(4, 16), start=4)
    [chunk] = pool.reserve([WantedRows(2, 4, range(4, 16), 1, max_rows=4)])
    assert (chunk.num_prefix_tokens, chunk.first, chunk.end) == (8, 12, 16)


def test_two_sequences_of_one_pass_both_compute() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    pool.add(1)
    pool.add(2)
    both = pool.reserve([WantedRows(1, 0, range(5), 1), WantedRows(2, 0, range(5), 1)])
    assert [reservation.num_prefix_tokens for reservation in both] == [0, 0]
    for reservation in both:
        pool.commit(reservation)
    pool.check_integrity()
    assert begun(pool, 3, range(5)).blocks[0] == pool.table(1).blocks[0]


def test_a_rewind_into_a_block_of_ones_own_overwrites_it() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, range(10))
    [reservation] = pool.reserve([WantedRows(1, 6, [70, 71, 72], 3)])
    assert (reservation.first, reservation.shared_block) == (6, None)
    pool.commit(reservation)
    assert begun(pool, 2, range(10)).num_prefix_tokens == 4  # the old text is gone
    assert begun(pool, 3, [*range(6), 70, 71, 72]).num_prefix_tokens == 8
    pool.check_integrity()


def test_a_rewind_into_a_shared_block_writes_its_rows_again_elsewhere() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, range(10))
    begun(pool, 2, range(10))
    [reservation] = pool.reserve([WantedRows(1, 6, [70], 1)])
    assert (reservation.first, reservation.end) == (4, 7)
    assert reservation.computed_ids == (4, 5, 70)
    pool.commit(reservation)
    assert pool.table(1).blocks[1] != pool.table(2).blocks[1] == 1
    assert pool.table(1).token_ids == [0, 1, 2, 3, 4, 5, 70]
    assert begun(pool, 3, range(10)).num_prefix_tokens == 8
    pool.check_integrity()


def test_a_failed_pass_leaves_a_shared_block_where_it_was() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, range(10))
    begun(pool, 2, range(10))
    num_free = pool.num_free_blocks
    [reservation] = pool.reserve([WantedRows(1, 6, [70], 1)])
    pool.abort(reservation)
    assert pool.table(1).blocks == pool.table(2).blocks[:2] == [0, 1]
    assert pool.table(1).token_ids == [0, 1, 2, 3, 4, 5]
    assert pool.num_free_blocks == num_free + 1  # that of the rewound tail
    pool.check_integrity()


def test_a_failed_pass_names_no_block() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, range(5))
    pool.add(2)
    [reservation] = pool.reserve([WantedRows(2, 0, range(12), 1)])
    assert reservation.num_prefix_tokens == 4
    pool.abort(reservation)
    assert (pool.table(2).length, pool.table(2).blocks) == (0, [])
    pool.check_integrity()
    pool.free(1)
    assert begun(pool, 3, range(12)).num_prefix_tokens == 4


def test_no_block_is_found_by_one_item_and_overwritten_by_another_in_one_pass() -> None:
    for is_finder_first in (True, False):
        pool = BlockPool(num_blocks=8, block_size=4)
        begun(pool, 1, range(8))
        pool.add(2)
        items = [WantedRows(2, 0, range(9), 1), WantedRows(1, 6, [70], 1)]
        reservations = pool.reserve(items if is_finder_first else items[::-1])
        found, rewound = reservations if is_finder_first else reservations[::-1]
        assert found.num_prefix_tokens == (8 if is_finder_first else 4)
        assert rewound.first == (4 if is_finder_first else 6)
        assert rewound.blocks[1] not in found.blocks
        for reservation in reservations:
            pool.commit(reservation)
        pool.check_integrity()


def test_plain_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    begun(pool, 1, range(8))
    pool.free(1)
    filled(pool, 2, 16)
    assert begun(pool, 3, range(8)).num_prefix_tokens == 4
    pool.check_integrity()


def test_the_least_recently_used_text_is_evicted_first_and_its_end_before_its_beginning() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    begun(pool, 1, range(12))
    begun(pool, 2, range(50, 62))
    pool.free(1)
    pool.free(2)
    begun(pool, 1, range(9))  # used again: found, and freed after the other
    pool.free(1)
    assert pool.num_free_blocks == 6
    filled(pool, 3, 8)  # takes the one plain block and the end of text 2
    pool.free(3)
    assert begun(pool, 4, range(50, 62)).num_prefix_tokens == 8  # its third block: the end of 1
    pool.free(4)
    assert begun(pool, 5, range(9)).num_prefix_tokens == 4
    pool.check_integrity()


def test_everything_is_evicted_when_it_has_to_be() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    begun(pool, 1, range(24))
    pool.free(1)
    filled(pool, 2, 24)
    assert pool.num_free_blocks == 0
    pool.check_integrity()
    pool.free(2)
    assert begun(pool, 3, range(24)).num_prefix_tokens == 0


def test_what_is_found_is_never_evicted_for_the_rest_of_the_same_prompt() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    begun(pool, 1, range(16))
    pool.free(1)
    reservation = begun(pool, 2, [*range(8), *range(60, 68)])
    assert reservation.num_prefix_tokens == 8
    assert reservation.blocks[:2] == (0, 1)
    assert set(reservation.blocks) == {0, 1, 2, 3}
    pool.check_integrity()
    with pytest.raises(OutOfBlocks):
        begun(pool, 3, range(4))


def test_found_blocks_count_against_the_free_ones_they_were_among() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    begun(pool, 1, range(9))
    pool.free(1)
    filled(pool, 2, 4)
    pool.add(3)
    # two of the three free blocks are found, but four more are needed
    with pytest.raises(OutOfBlocks):
        pool.reserve([WantedRows(3, 0, range(24), 1)])
    assert (pool.num_free_blocks, pool.table(3).blocks) == (3, [])
    pool.check_integrity()


def test_without_caching_nothing_is_kept() -> None:
    pool = BlockPool(num_blocks=4, block_size=4, enable_prefix_caching=False)
    begun(pool, 1, range(9))
    assert begun(pool, 2, range(3)).num_prefix_tokens == 0
    pool.free(1)
    assert begun(pool, 3, range(9)).num_prefix_tokens == 0
    assert (pool.num_prefix_tokens, pool.num_prefix_queries) == (0, 0)
    pool.check_integrity()


def test_rows_that_must_all_be_computed_do_not_read_the_cache() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    begun(pool, 1, range(9))
    pool.add(2)
    [reservation] = pool.reserve([WantedRows(2, 0, range(9), 1, is_cacheable=False)])
    assert (reservation.num_prefix_tokens, reservation.first) == (0, 0)


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


def test_integrity_sees_another_text_under_a_name() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 5)
    pool.table(1).token_ids[2] += 1
    with pytest.raises(AssertionError, match="block 0 misnamed"):
        pool.check_integrity()


def test_integrity_sees_a_sharing_that_nobody_counted() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    filled(pool, 1, 4)
    filled(pool, 2, 4)
    pool.table(2).blocks[0] = pool.table(1).blocks[0]
    with pytest.raises(AssertionError, match="users miscounted"):
        pool.check_integrity()
