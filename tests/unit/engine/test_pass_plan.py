from __future__ import annotations

import pytest
import torch

from paceline.engine.base import StepItem
from paceline.engine.blocks import BlockPool
from paceline.engine.pass_plan import (
    CALL_COST_POSITIONS,
    MAX_TILE_ROWS,
    PassPlan,
    SequenceRows,
    Tile,
    cut_tiles,
    group_tiles,
    plan_pass,
)
from paceline.engine.step_rows import wanted_rows
from paceline.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def item(sequence_id: int, start: int, num_rows: int, num_samples: int = 0) -> StepItem:
    token_ids = tuple(range(100 * sequence_id, 100 * sequence_id + num_rows))
    return StepItem(sequence_id, start, token_ids, num_samples, GREEDY)


def plan(pool: BlockPool, items: list[StepItem]) -> PassPlan:
    pool.reserve(map(wanted_rows, items))
    rows = [
        SequenceRows(
            item.start,
            item.token_ids,
            item.num_samples,
            tuple(pool.table(item.sequence_id).blocks),
        )
        for item in items
    ]
    return plan_pass(rows, pool.block_size, torch.float32, torch.device("cpu"))


def pool_with(lengths: dict[int, int]) -> BlockPool:
    """Sequences grown one block at a time in turn, so their blocks interleave."""
    pool = BlockPool(num_blocks=64, block_size=4)
    for sequence_id in lengths:
        pool.add(sequence_id)
    for start in range(0, max(lengths.values()), 4):
        for sequence_id, length in lengths.items():
            if start < length:
                rows = item(sequence_id, start, min(4, length - start))
                [reservation] = pool.reserve([wanted_rows(rows)])
                pool.commit(reservation)
    return pool


def test_long_items_are_cut_into_causal_tiles() -> None:
    assert cut_tiles([item(1, 10, MAX_TILE_ROWS + 2), item(2, 0, 1)]) == [
        Tile(0, 0, MAX_TILE_ROWS, 10 + MAX_TILE_ROWS),
        Tile(0, MAX_TILE_ROWS, 2, 12 + MAX_TILE_ROWS),
        Tile(1, 0, 1, 1),
    ]


@pytest.mark.parametrize(
    ("first", "second", "num_groups"),
    [
        (Tile(0, 0, 1, 400), Tile(1, 0, 1, 400 - CALL_COST_POSITIONS), 1),
        (Tile(0, 0, 1, 400), Tile(1, 0, 1, 399 - CALL_COST_POSITIONS), 2),
        (Tile(0, 0, 4, 400), Tile(1, 0, 4, 400 - CALL_COST_POSITIONS // 4), 1),
        (Tile(0, 0, 4, 400), Tile(1, 0, 4, 399 - CALL_COST_POSITIONS // 4), 2),
        (Tile(0, 0, 1, 9), Tile(1, 0, 2, 9), 2),
    ],
)
def test_tiles_share_a_call_while_padding_is_cheaper(
    first: Tile, second: Tile, num_groups: int
) -> None:
    assert len(group_tiles([first, second])) == num_groups
    assert group_tiles([first, second]) == group_tiles([second, first])


def test_rows_carry_their_ids_positions_and_slots() -> None:
    pool = pool_with({1: 6, 2: 9})
    planned = plan(pool, [item(1, 5, 3, 2), item(2, 9, 1, 1)])
    # the decode row (fewer rows) lies first in the flat batch
    assert planned.input_ids.tolist() == [[200, 100, 101, 102]]
    assert planned.position_ids.tolist() == [[9, 5, 6, 7]]
    assert planned.sample_rows.tolist() == [2, 3, 0]
    blocks = {i: pool.table(i).blocks for i in (1, 2)}
    assert planned.write.tolist() == [
        blocks[2][2] * 4 + 1,
        blocks[1][1] * 4 + 1,
        blocks[1][1] * 4 + 2,
        blocks[1][1] * 4 + 3,
    ]


def test_one_sequence_on_consecutive_blocks_is_read_without_a_copy() -> None:
    pool = pool_with({1: 10})
    [group] = plan(pool, [item(1, 10, 1, 1)]).groups
    assert group.read == slice(0, 11)
    assert group.mask is None


def test_scattered_blocks_are_read_by_index() -> None:
    pool = pool_with({1: 6, 2: 6})
    [group] = plan(pool, [item(1, 6, 1, 1)]).groups
    assert isinstance(group.read, torch.Tensor)
    assert group.read.tolist() == [0, 1, 2, 3, 8, 9, 10]


def test_padding_repeats_a_sequences_own_last_slot() -> None:
    pool = pool_with({1: 7, 2: 4})
    [group] = plan(pool, [item(1, 7, 1, 1), item(2, 4, 1, 1)]).groups
    assert isinstance(group.read, torch.Tensor)
    assert group.mask is not None
    first, second = group.read.view(2, 8).tolist()
    assert first == [0, 1, 2, 3, 8, 9, 10, 11]
    assert second == [4, 5, 6, 7, 12, 12, 12, 12]
    assert (group.mask[:, 0, 0] == 0).sum(dim=1).tolist() == [8, 5]


def test_verify_rows_see_what_precedes_them_and_themselves() -> None:
    pool = pool_with({1: 3})
    [group] = plan(pool, [item(1, 3, 3, 3)]).groups
    assert group.mask is not None
    assert (group.mask[0, 0] == 0).tolist() == [
        [True, True, True, True, False, False],
        [True, True, True, True, True, False],
        [True, True, True, True, True, True],
    ]
