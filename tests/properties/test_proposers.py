"""Local proposers against naive readings of the same texts: quadratic, without any index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proposers.base import LocalProposal
from paceline.proposers.ngram import NgramProposer
from paceline.proposers.recent_outputs import RecentOutputs
from paceline.proposers.suffix import SuffixProposer
from paceline.proposers.suffix_tree import SEPARATOR, SuffixTree
from paceline.proposers.tree import Prior, candidate_tree, chain, cut

Ids = Sequence[int]

# Few ids, so that runs come back; sometimes a text is repeated as a whole.
IDS = st.one_of(st.integers(0, 1), st.integers(0, 3), st.integers(0, 9))
PIECES = st.lists(st.lists(IDS, max_size=24), max_size=6)
TEXTS = st.lists(IDS, max_size=40).flatmap(
    lambda ids: st.sampled_from((ids, ids + ids, ids + ids[::2] + ids))
)


def ngram(text: Ids, min_n: int, max_n: int, max_tokens: int) -> tuple[int, ...]:
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(text) - 1, n - 1, -1):
            if text[start - n : start] == text[-n:]:
                virtual = list(text)
                for index in range(start, start + max_tokens):
                    virtual.append(virtual[index])
                return tuple(virtual[len(text) :])
    return ()


@given(TEXTS, st.integers(1, 4), st.integers(0, 3), st.integers(0, 12), st.data())
def test_ngram_is_the_naive_reading(
    text: list[int], min_n: int, more: int, max_tokens: int, data: st.DataObject
) -> None:
    proposer = NgramProposer(min_n, min_n + more)
    told = 0
    while told < len(text):
        size = data.draw(st.integers(1, len(text) - told))
        proposer.extend(text[told : told + size])
        told += size
        expected = ngram(text[:told], min_n, min_n + more, max_tokens)
        assert proposer.propose(max_tokens) == expected


def occurrences(text: Ids, run: Ids) -> list[int]:
    """Where the run ends in the text."""
    size = len(run)
    return [end for end in range(size, len(text) + 1) if list(text[end - size : end]) == list(run)]


def continuation(
    text: Ids, run: Ids, depth: int, max_tokens: int, min_prob: float
) -> tuple[tuple[int, ...], float]:
    found: list[int] = []
    prob, expected = 1.0, 0.0
    place: int | None = None  # known once the run is unique or as long as the tree is deep
    while len(found) < max_tokens:
        path = [*run, *found]
        ends = occurrences(text, path) if place is None else []
        followed = [text[end] for end in ends if end < len(text)]
        if place is None and (len(path) >= depth or not followed):
            place = ends[-1]
        if place is None:
            counts = Counter(followed)
            most = max(counts.values())
            token = next(token for token in reversed(followed) if counts[token] == most)
            prob *= most / len(followed)
            if prob < min_prob:
                break
        else:
            token = text[place] if place < len(text) else found[place - len(text)]
            place += 1
        if token == SEPARATOR:
            break
        found.append(token)
        expected += prob
    return tuple(found), expected


def matches(text: Ids, suffix: Ids, depth: int, is_own: bool) -> list[Ids]:
    """Ends of `suffix` that stand in `text`, the longest first; its own end is no occurrence."""
    runs = [suffix[-size:] for size in range(min(depth - 1, len(suffix)), 0, -1)]
    return [run for run in runs if len(occurrences(text, run)) > is_own]


@given(TEXTS, st.integers(2, 9), st.integers(1, 12), st.sampled_from((0.0, 0.3, 0.6)))
def test_suffix_tree_is_the_naive_count(
    text: list[int], depth: int, max_tokens: int, min_prob: float
) -> None:
    tree = SuffixTree(depth)
    for told in range(1, len(text) + 1):
        tree.extend(text[told - 1 : told])
        known = text[:told]
        places = list(tree.matches())
        runs = matches(known, known, depth, True)
        assert [place.length for place in places] == [len(run) for run in runs]
        for place, run in zip(places, runs, strict=True):
            token_ids, expected = continuation(known, run, depth, max_tokens, min_prob)
            found = tree.continuation(place, max_tokens, min_prob)
            assert found.token_ids == token_ids
            assert found.expected == pytest.approx(expected)
    assert tree.num_nodes <= 2 * len(tree) + 1


@given(PIECES, st.lists(IDS, max_size=16), st.integers(2, 9), st.sampled_from((0.0, 0.4)))
def test_other_texts_are_found_in_the_tree(
    texts: list[list[int]], suffix: list[int], depth: int, min_prob: float
) -> None:
    tree = SuffixTree(depth)
    joined: list[int] = []
    for text in texts:
        tree.extend(text)
        tree.separate()
        joined += [*text, SEPARATOR]
    assert len(tree) == len(joined)
    assert tree.num_nodes <= 2 * len(tree) + 1
    runs = matches(joined, suffix, depth, False)
    place = tree.find(suffix)
    assert (place.length if place else 0) == (len(runs[0]) if runs else 0)
    if place is not None:
        found = tree.continuation(place, 12, min_prob)
        assert found.token_ids == continuation(joined, runs[0], depth, 12, min_prob)[0]


@given(
    st.lists(st.tuples(st.lists(IDS, max_size=12), st.sampled_from("ab")), max_size=12),
    st.lists(IDS, min_size=1, max_size=12),
    st.integers(0, 40),
    st.sampled_from((0.5, 1.0, 2.0)),
)
def test_suffix_proposer_with_recent_outputs(
    outputs: list[tuple[list[int], str]], text: list[int], max_recent: int, factor: float
) -> None:
    """Its own longest match, unless the recent outputs of its own salt promise more."""
    depth, most = 6, 8
    recent = RecentOutputs(max_recent, depth)
    proposer = SuffixProposer(depth, factor, 0.2, recent, "a")
    proposer.extend(text)
    for output, salt in outputs:
        recent.add(output, salt)
    trees: list[list[int]] = []
    half = max_recent // 2
    for output, salt in outputs:
        kept = output[max(0, len(output) - half + 1) :]
        if salt != "a" or not kept or half < 2:
            continue
        if not trees or len(trees[-1]) + len(kept) + 1 > half:
            trees = [*trees[-1:], []]
        trees[-1] += [*kept, SEPARATOR]
    assert recent.num_tokens <= 2 * max_recent
    best: tuple[tuple[int, ...], float] = ((), 0.0)
    for known, is_own in ((text, True), *((tree, False) for tree in reversed(trees))):
        for run in matches(known, text, depth, is_own)[:1]:
            limit = min(most, max(1, int(factor * len(run))))
            found = continuation(known, run, depth, limit, 0.2)
            best = found if found[1] > best[1] + 1e-12 else best
    assert proposer.propose(most) == best[0]


HEADS = st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4)
PRIORS = st.lists(
    st.lists(st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0)), max_size=4).map(tuple), max_size=4
).map(tuple)


@given(HEADS, st.integers(0, 30), st.integers(0, 5), PRIORS)
def test_a_tree_has_the_likeliest_paths(
    heads: list[list[int]], max_nodes: int, max_depth: int, prior: Prior
) -> None:
    proposal = candidate_tree(heads, max_nodes, max_depth, prior)
    candidates = [list(dict.fromkeys(ids)) for ids in heads]
    likely: dict[tuple[int, ...], float] = {}
    for depth in range(1, min(len(heads), len(prior), max_depth) + 1):
        for ranks in product(*(range(len(ids)) for ids in candidates[:depth])):
            prob = 1.0
            for head, rank in enumerate(ranks):
                prob *= prior[head][rank] if rank < len(prior[head]) else 0.0
            if prob > 0.0:
                likely[tuple(candidates[head][rank] for head, rank in enumerate(ranks))] = prob
    found = paths(proposal)
    assert len(set(found)) == len(found) == min(max_nodes, len(likely))
    probs = [likely[path] for path in found]
    assert probs == sorted(likely.values(), reverse=True)[: len(found)]
    for size in range(len(found) + 1):
        assert paths(cut(proposal, size)) == found[:size]


def paths(proposal: LocalProposal) -> list[tuple[int, ...]]:
    """Of each node, from the text on; fails where a parent comes after its child."""
    nodes = len(proposal.token_ids)
    parents = proposal.parents or tuple(range(-1, nodes - 1))
    assert len(parents) == nodes
    found: list[tuple[int, ...]] = []
    for token_id, parent in zip(proposal.token_ids, parents, strict=True):
        found.append((*found[parent], token_id) if parent >= 0 else (token_id,))
    assert proposal.depth == max(map(len, found), default=0)
    return found


@given(HEADS, st.integers(-1, 5))
def test_a_chain_has_every_heads_best(heads: list[list[int]], max_tokens: int) -> None:
    proposal = chain(heads, max_tokens)
    assert proposal.parents == ()
    expected: list[int] = []
    for candidates in heads[: max(0, max_tokens)]:
        if not candidates:
            break
        expected.append(candidates[0])
    assert list(proposal.token_ids) == expected
