"""Trees of head candidates. Which nodes are best in general: tests/properties."""

from __future__ import annotations

import pytest

from paceline.proposers.base import NOTHING, LocalProposal
from paceline.proposers.tree import PRIOR, candidate_tree, chain, cut, geometric_prior

HEADS = ((10, 11, 12), (20, 21), (30,))
CERTAIN = ((0.6, 0.3, 0.05), (0.5, 0.2), (0.5,))


def test_the_likeliest_paths_in_order() -> None:
    proposal = candidate_tree(HEADS, 6, 8, CERTAIN)
    # 10: .6, then 11 and 10-20: .3, then 10-20-30 and 11-20: .15, then 10-21: .12.
    assert proposal == LocalProposal((10, 11, 20, 20, 30, 21), (-1, -1, 0, 1, 2, 0))
    assert proposal.depth == 3


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 8, 64])
def test_no_more_nodes_than_allowed(max_nodes: int) -> None:
    proposal = candidate_tree(HEADS, max_nodes, 8)
    assert len(proposal.token_ids) == min(max_nodes, 3 + 3 * 2 + 3 * 2 * 1)
    assert cut(candidate_tree(HEADS, 64, 8), max_nodes) == proposal


@pytest.mark.parametrize("max_depth", [0, 1, 2, 3])
def test_no_deeper_than_allowed(max_depth: int) -> None:
    assert candidate_tree(HEADS, 64, max_depth).depth == max_depth


def test_a_repeated_candidate_counts_once() -> None:
    proposal = candidate_tree(((7, 7, 8), (9,)), 8, 8)
    assert sorted(proposal.token_ids) == [7, 8, 9, 9]


def test_without_branches_it_is_a_chain() -> None:
    assert candidate_tree(((1,), (2,), (3,)), 8, 8) == LocalProposal((1, 2, 3))
    assert cut(candidate_tree(HEADS, 6, 8, CERTAIN), 1) == LocalProposal((10,))


@pytest.mark.parametrize("heads", [(), ((),), ((), (1,))])
def test_without_a_first_candidate_there_is_nothing(heads: tuple[tuple[int, ...], ...]) -> None:
    assert candidate_tree(heads, 8, 8) == NOTHING == chain(heads, 8)


def test_heads_and_ranks_outside_the_prior_are_not_taken() -> None:
    assert candidate_tree(HEADS, 64, 8, ((0.5, 0.0),)) == LocalProposal((10,))


def test_chain() -> None:
    assert chain(HEADS, 2) == LocalProposal((10, 20))
    assert chain(HEADS, 9) == LocalProposal((10, 20, 30))
    assert chain(HEADS, 0) == chain(HEADS, -1) == NOTHING


def test_cut_of_a_chain_and_of_nothing() -> None:
    assert cut(LocalProposal((1, 2, 3)), 2) == LocalProposal((1, 2))
    assert cut(LocalProposal((1, 2, 3)), 0) == cut(NOTHING, 4) == NOTHING


def test_the_default_prior_has_laws_that_add_up() -> None:
    assert geometric_prior() == PRIOR
    assert all(sum(law) < 1.0 and list(law) == sorted(law, reverse=True) for law in PRIOR)
    assert [law[0] for law in PRIOR] == sorted((law[0] for law in PRIOR), reverse=True)
