"""Prompt lookup: what it finds, and that neither time nor memory depends on the text."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.proposers.ngram import MAX_RUN_BYTES, NgramProposer
from tests.unit.proposers.texts import HARD, bytes_at_most, bytes_kept, lines_run


def told(*token_ids: int, min_n: int = 2, max_n: int = 4) -> NgramProposer:
    proposer = NgramProposer(min_n, max_n)
    proposer.extend(token_ids)
    return proposer


def test_what_followed_before() -> None:
    assert told(1, 2, 3, 4, 5, 1, 2).propose(3) == (3, 4, 5)


def test_the_longest_run_before_the_most_recent() -> None:
    assert told(1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3).propose(1) == (4,)


def test_of_equal_runs_the_most_recent() -> None:
    assert told(1, 2, 3, 1, 2, 4, 1, 2).propose(1) == (4,)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_runs_of_the_two_lengths_and_those_between(size: int) -> None:
    """Shorter ones count for nothing; of longer ones the end is found, but no more."""
    run = tuple(range(10, 10 + size))
    proposer = told(*run, 1, 9, *run[1:], 2, 9, *run, min_n=2, max_n=4)
    expected = {1: (), 2: (1,), 3: (1,), 4: (1,)}
    assert proposer.propose(1) == expected.get(size, (2,))


def test_a_period_goes_on_behind_the_end() -> None:
    assert told(7, 1, 2, 3, 1, 2, 3).propose(8) == (1, 2, 3, 1, 2, 3, 1, 2)
    assert told(4, 4, 4).propose(5) == (4,) * 5


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 1), (1, 2, 3, 4, 2)])
def test_without_a_run_there_is_no_guess(token_ids: tuple[int, ...]) -> None:
    assert told(*token_ids).propose(4) == ()


def test_none_are_wanted() -> None:
    assert told(1, 1, 1, 1).propose(0) == ()


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2)])
def test_lengths_that_make_no_sense(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match="n-gram"):
        NgramProposer(min_n, max_n)


@pytest.mark.parametrize("make", HARD)
def test_work_of_a_token_and_of_a_proposal(make: Callable[[], list[int]]) -> None:
    text = make()
    proposer = NgramProposer(2, 4)
    proposer.extend(text[:-100])  # a long text: what grows with it would show

    def one_by_one() -> None:
        for token in text[-100:]:
            proposer.extend((token,))

    assert lines_run(one_by_one) <= 100 * (7 + 3 * 6)
    assert lines_run(lambda: proposer.propose(16)) <= 3 * 5 + 16 + 5
    some = text[:2_000]
    assert lines_run(lambda: NgramProposer(2, 4).extend(some)) <= len(some) * 3 * 3 + 50


@pytest.mark.parametrize("make", HARD)
def test_memory_of_a_token(make: Callable[[], list[int]]) -> None:
    text = make()[:6_000]

    def build() -> NgramProposer:
        proposer = NgramProposer(2, 4)
        proposer.extend(text)
        return proposer

    assert bytes_kept(build) <= len(text) * 3 * MAX_RUN_BYTES


@pytest.mark.parametrize("size", [4, 16])
def test_memory_while_the_table_grows(size: int) -> None:
    """A table of 2^14 places is grown when two thirds of them are taken: both are there."""
    draw = random.Random(1)
    text = [draw.randrange(1 << 17) for _ in range((1 << 15) // 3 + 32)]

    def build() -> NgramProposer:
        proposer = NgramProposer(size, size)
        for start in range(0, len(text), 16):
            proposer.extend(text[start : start + 16])
        return proposer

    most = bytes_at_most(build)
    assert 0.6 * len(text) * MAX_RUN_BYTES < most <= len(text) * MAX_RUN_BYTES
