"""A group of rows under a sliding window: exactly the positions that the library would show."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from paceline.engine.attention_group import AttentionGroup
from paceline.engine.pass_plan import SequenceRows, plan_pass

BLOCK_SIZE = 4


def groups_of(spans: list[tuple[int, int]], *, interleaved: bool) -> list[AttentionGroup]:
    """The groups of sequences given as (start, rows); consecutive or interleaved blocks."""
    rows = []
    for index, (start, num_rows) in enumerate(spans):
        num_blocks = -(-(start + num_rows) // BLOCK_SIZE)
        first, step = (index, len(spans)) if interleaved else (64 * index, 1)
        blocks = tuple(range(first, first + num_blocks * step, step))
        rows.append(SequenceRows(start, (7,) * num_rows, 0, blocks))
    return plan_pass(rows, BLOCK_SIZE, torch.float32, torch.device("cpu")).groups


def seen_slots(group: AttentionGroup) -> list[set[int]]:
    """Per row of the group, the KV slots that it attends to."""
    read = group.read
    slots = torch.arange(read.start, read.stop) if isinstance(read, slice) else read
    slots = slots.view(group.num_tiles, 1, group.length).expand(-1, group.num_rows, -1)
    if group.mask is None:
        return [set(row) for row in slots.reshape(-1, group.length).tolist()]
    seen = group.mask[:, 0] == 0
    return [
        set(slots[tile, row][seen[tile, row]].tolist())
        for tile in range(group.num_tiles)
        for row in range(group.num_rows)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_a_row_sees_what_the_librarys_mask_shows(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.randint(1, 30)
    num_rows = rng.choice([0, 1, 3, 9])
    spans = [(rng.randint(0, 50), num_rows or rng.randint(1, 6)) for _ in range(rng.randint(1, 4))]
    is_seen = sliding_window_causal_mask_function(window)
    for group in groups_of(spans, interleaved=rng.random() < 0.5):
        full, cut = seen_slots(group), seen_slots(group.within(window))
        position = [
            length - group.num_rows + row
            for length in group.lengths
            for row in range(group.num_rows)
        ]
        for slots, kept, query in zip(full, cut, position, strict=True):
            # slots of one sequence ascend with its positions here
            expected = {
                slot
                for key, slot in enumerate(sorted(slots))
                if is_seen(0, 0, torch.tensor(query), torch.tensor(key))
            }
            assert kept == expected
            assert len(kept) == min(window, query + 1)


def test_a_window_wider_than_the_text_changes_nothing() -> None:
    [group] = groups_of([(20, 3)], interleaved=False)
    assert group.within(23) is group
    assert group.within(22) is not group


def test_a_decode_row_reads_only_its_window_and_needs_no_mask() -> None:
    [group] = groups_of([(40, 1)], interleaved=False)
    cut = group.within(8)
    assert (cut.read, cut.length, cut.mask) == (slice(33, 41), 8, None)
    assert group.within(8) is cut
    assert (group.read, group.length) == (slice(0, 41), 41)
