"""Suffix decoding: frequencies, matches, and bounds of work. Texts at large: tests/properties."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest

from paceline.proposers.suffix import SuffixProposer
from paceline.proposers.suffix_tree import SuffixTree
from tests.unit.proposers.texts import HARD, lines_run


def told(*token_ids: int, depth: int = 8, factor: float = 1.0, prob: float = 0.1) -> SuffixProposer:
    proposer = SuffixProposer(depth, factor, prob)
    proposer.extend(token_ids)
    return proposer


def test_the_most_frequent_goes_first() -> None:
    assert told(1, 2, 1, 3, 1, 2, 1, 2, 1, 3, 9, 1).propose(1) == (2,)


def test_of_equally_frequent_ones_the_most_recent() -> None:
    assert told(1, 2, 1, 3, 9, 1).propose(1) == (3,)
    assert told(1, 3, 1, 2, 9, 1).propose(1) == (2,)


def test_the_longest_match_decides() -> None:
    assert told(8, 1, 2, 7, 1, 3, 7, 1, 3, 8, 1).propose(1) == (2,)


@pytest.mark.parametrize(
    ("factor", "expected"), [(0.2, 1), (1.0, 3), (2.0, 6), (1.5, 4), (8.0, 10)]
)
def test_as_many_as_the_match_allows(factor: float, expected: int) -> None:
    """A match of 3 tokens; never fewer than one proposal, never more than asked for."""
    text = (*range(1, 21), 30, 1, 2, 3)
    assert told(*text, factor=factor).propose(10) == tuple(range(4, 4 + expected))


@pytest.mark.parametrize(("prob", "expected"), [(0.5, (2, 5)), (0.51, (2,)), (0.8, ())])
def test_what_is_too_rare_ends_a_proposal(prob: float, expected: tuple[int, ...]) -> None:
    """2 follows 1 in three of four places, and 5 follows that in two of the three."""
    text = (1, 2, 5, 8, 1, 2, 5, 7, 1, 2, 6, 1, 9, 1)
    assert told(*text, factor=2.0, prob=prob).propose(2) == expected


def test_a_match_is_shorter_than_the_tree_is_deep() -> None:
    """Both runs of five end alike: a tree of depth 4 sees the same three tokens in both."""
    text = (9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4)
    assert told(*text, depth=6).propose(1) == (5,)
    assert told(*text, depth=5).propose(1) == (6,)
    assert next(_tree(5, text).matches()).length == 4


def test_what_is_unique_goes_on_behind_the_depth_and_the_end() -> None:
    assert told(*range(20), 50, 0, 1, 2, depth=4, factor=4.0).propose(9) == tuple(range(3, 12))
    assert told(9, 1, 2, 3, 1, 2, 3, factor=3.0).propose(8) == (1, 2, 3, 1, 2, 3, 1, 2)


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 2, 3)])
def test_without_a_match_there_is_no_guess(token_ids: tuple[int, ...]) -> None:
    assert told(*token_ids).propose(4) == ()


def test_none_are_wanted() -> None:
    assert told(1, 1, 1, 1).propose(0) == ()


def test_a_tree_has_some_depth() -> None:
    with pytest.raises(ValueError, match="max_depth"):
        SuffixTree(1)


def _tree(depth: int, text: tuple[int, ...] | list[int]) -> SuffixTree:
    tree = SuffixTree(depth)
    tree.extend(text)
    return tree


@pytest.mark.parametrize("depth", [4, 24])
@pytest.mark.parametrize("make", HARD)
def test_work_and_nodes(make: Callable[[], list[int]], depth: int) -> None:
    """A token costs at most a constant for each level of the tree and two nodes, amortized."""
    text = make()[:3_000]
    tree = SuffixTree(depth)
    assert lines_run(lambda: tree.extend(text)) <= len(text) * (40 + 6 * depth)
    assert tree.num_nodes <= 2 * len(text) + 1
    assert len(list(islice(tree.matches(), depth))) < depth
    proposer = SuffixProposer(depth, 8.0, 0.0)
    proposer.extend(text)
    assert lines_run(lambda: proposer.propose(16)) <= 30 + 16 * 9
    found = lines_run(lambda: tree.find(text[1_500 : 1_500 + depth]))
    assert found <= (depth.bit_length() + 1) * (14 + 6 * depth)
