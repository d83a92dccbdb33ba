"""Counts kept from pass to pass, and how little of a long text a pass reads for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.engine.base import StepItem
from paceline.engine.blocks import BlockPool, BlockTable
from paceline.engine.pass_results import PassPart, pass_parts, pass_results
from paceline.engine.sampler import BatchedSampler
from paceline.engine.step_rows import wanted_rows
from paceline.engine.token_counts import TextSlice, TokenCounts
from paceline.sampling.params import SamplingParams

VOCAB_SIZE = 60
PENALTIES = SamplingParams(
    temperature=0.8, seed=4, frequency_penalty=0.5, repetition_penalty=1.2, min_tokens=5
)


def counted(text: list[int], prompt_len: int) -> TokenCounts:
    counts = TokenCounts(prompt_len)
    counts.extend(text)
    return counts


def columns(counts: TokenCounts) -> tuple[int, list[int], list[float]]:
    return counts.length, list(counts.token_ids), list(counts.num_in_output)


@pytest.mark.parametrize("prompt_len", [0, 1, 20])
def test_counts_after_rewinds_are_those_of_the_text_that_is_left(prompt_len: int) -> None:
    rng = random.Random(prompt_len)
    counts, text = TokenCounts(prompt_len), list[int]()
    for _ in range(300):
        added = rng.choices(range(12), k=rng.randrange(9))
        counts.extend(added)
        text += added
        kept = max(0, len(text) - rng.randrange(7))
        counts.rewind(kept)
        del text[kept:]
        assert columns(counts) == columns(counted(text, prompt_len))
        assert list(counts.token_ids) == list(dict.fromkeys(text))
        output = Counter(text[prompt_len:])
        assert [counts.count(i) for i in range(13)] == [output[i] for i in range(13)]
    assert len(text) > 100
    counts.rewind(0)
    assert columns(counts) == (0, [], [])


def test_a_slice_of_a_text_in_two_parts_is_that_slice() -> None:
    head, tail = [5, 6, 7, 8], (1, 2, 3)
    text = (*head[:3], *tail)  # the head's last token is not part of the text
    for first in range(7):
        for end in range(first, 7):
            part = TextSlice(head, 3, tail, first, end)
            expected = text[first:end]
            assert tuple(part) == expected
            assert [part[i] for i in range(-len(part), len(part))] == [*expected, *expected]
            assert part[1:] == expected[1:]
            assert part[::-1] == expected[::-1]
            with pytest.raises(IndexError):
                part[len(part)]


def test_another_prompt_length_is_another_count() -> None:
    table = BlockTable(token_ids=[1, 2, 1])
    assert table.counted((2,), 2).count(1) == 1
    assert columns(table.counted((2,), 4)) == (4, [1, 2], [0.0, 0.0])


def test_rows_that_an_earlier_call_counted_and_nobody_wrote_do_not_count() -> None:
    table = BlockTable(token_ids=[1, 2])
    table.counted((7, 8), 1)
    assert columns(table.counted((9,), 1)) == (3, [1, 2, 9], [0.0, 1.0, 1.0])


def test_a_rewind_into_the_prompt_forgets_the_counts() -> None:
    table = BlockTable(token_ids=[1, 2, 1, 3])
    table.counted((), 2)
    table.cut(2)
    assert table.counts is not None
    table.cut(1)
    assert table.counts is None


class ReadList(list[int]):
    """Knows how many of its tokens were read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        self.num_read += len(value) if isinstance(index, slice) else 1
        return value

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


def decided(pool: BlockPool, item: StepItem) -> PassPart:
    """One pass of one item on random logits; greedy and noisy rows alike."""
    reservations = pool.reserve([wanted_rows(item)])
    parts = pass_parts([item], reservations, [pool.table(item.sequence_id)])
    torch.manual_seed(item.start)
    pass_results(parts, torch.randn(item.num_samples, VOCAB_SIZE), BatchedSampler())
    pool.commit(reservations[0])
    return parts[0]


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_pass_reads_the_new_tokens_of_a_long_text_and_no_others(num_rows: int) -> None:
    rng, prompt_len, length = random.Random(1), 700, 3000
    pool = BlockPool(1000, 4, enable_prefix_caching=False)
    pool.add(1)
    table = pool.table(1)
    table.token_ids = text = ReadList()
    prompt = tuple(rng.choices(range(VOCAB_SIZE), k=length))
    pool.commit(pool.reserve([wanted_rows(StepItem(1, 0, prompt, 0, PENALTIES))])[0])
    assert text.num_read == 0
    for index in range(50):
        # every other pass takes a few tokens of the last one back, as a rejected block does
        start = table.length - (num_rows // 2 if index % 2 else 0)
        rows = tuple(rng.choices(range(VOCAB_SIZE), k=num_rows))
        first_output = start + 1 - prompt_len
        decided(pool, StepItem(1, start, rows, num_rows, PENALTIES, first_output))
        if index == 0:
            assert text.num_read == length  # the first pass counts all of it, once
    assert text.num_read <= length + 50 * num_rows


def test_without_penalties_nothing_is_counted() -> None:
    pool = BlockPool(100, 4)
    pool.add(1)
    held_back = SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(3,))
    part = decided(pool, StepItem(1, 0, (5, 6, 7, 8), 2, held_back, 1))
    assert pool.table(1).counts is None
    assert [row.counts for row in part.rows] == [None, None]
    assert [len(row.output_token_ids) for row in part.rows] == [1, 2]
