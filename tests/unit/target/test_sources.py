"""Which sources a method means, and which of them a pass takes."""

from itertools import pairwise

import pytest

from paceline.config import SpeculationConfig
from paceline.proposers.base import LocalProposal
from paceline.protocol.lookahead import AcceptanceClass, SequenceLookahead
from paceline.sampling.params import VerificationMode
from paceline.target.sources import (
    FIRST_TRIAL,
    MAX_TRIAL,
    Source,
    choose,
    first_with_any,
    match,
    sources_of,
)

KEY = AcceptanceClass.of("", VerificationMode.GREEDY, 0.0)


def source(name, have):
    return Source(name, SequenceLookahead(KEY), have)


@pytest.mark.parametrize(
    ("asked", "deployment", "num_heads", "expected"),
    [
        (None, "model", 3, ("model",)),
        (None, "hybrid", 0, ("model", "ngram")),
        (None, "auto", 0, ("model", "suffix", "ngram")),
        (None, "auto", 3, ("model", "suffix", "ngram", "medusa")),
        ("ngram", "model", 0, ("ngram",)),
        ("suffix", "auto", 3, ("suffix",)),
        ("medusa", "model", 3, ("medusa",)),
        ("medusa", "model", 0, ()),
        ("model", "ngram", 0, ("model",)),
        ("off", "auto", 3, ()),
        *((method, "off", 3, ()) for method in ("model", "ngram", "auto", None)),
    ],
)
def test_sources_of_a_method(asked, deployment, num_heads, expected):
    config = SpeculationConfig(method=deployment, hybrid_lookup="ngram")
    assert sources_of(asked, config, num_heads) == expected


def test_hybrid_takes_the_first_that_has_something():
    draft, lookup = source("model", 0), source("suffix", 3)
    assert first_with_any([draft, lookup]) is lookup
    draft.have = 1
    assert first_with_any([draft, lookup]) is draft
    assert first_with_any([source("model", 0), source("suffix", 0)]).name == "model"


def gains(**by_name):
    return lambda each: (by_name[each.name], 0.0)


def test_the_best_is_chosen_and_the_first_of_equals():
    draft, lookup = source("model", 2), source("suffix", 3)
    assert choose([draft, lookup], gains(model=1.0, suffix=2.0)) == (lookup, False)
    assert choose([draft, lookup], gains(model=1.0, suffix=1.0)) == (draft, False)
    lookup.have = 0
    assert choose([draft, lookup], gains(model=0.0, suffix=2.0)) == (draft, False)


def trials(num_rounds, *, learns=False):
    """Rounds in which the loser of two was tried."""
    draft, lookup = source("model", 2), source("suffix", 3)
    tried = []
    for number in range(num_rounds):
        chosen, is_trying = choose([draft, lookup], gains(model=0.5, suffix=2.0))
        if is_trying:
            assert chosen is draft
            tried.append(number)
        if learns:
            draft.num_unlearnt = 0
    return tried


def test_a_loser_of_which_nothing_is_learnt_is_tried_less_and_less_often():
    tried = trials(2000)
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert tried[0] == FIRST_TRIAL - 1
    assert gaps[:4] == [32, 64, 128, 256]
    assert set(gaps[3:]) == {MAX_TRIAL}


def test_who_is_learnt_of_anyway_is_not_tried():
    assert trials(500, learns=True) == []


def test_a_win_makes_trials_frequent_again():
    draft, lookup = source("model", 2), source("suffix", 3)
    for _ in range(100):
        choose([draft, lookup], gains(model=0.5, suffix=2.0))
    choose([draft, lookup], gains(model=3.0, suffix=2.0))
    tried = [choose([draft, lookup], gains(model=0.5, suffix=2.0))[1] for _ in range(FIRST_TRIAL)]
    assert tried == [False] * (FIRST_TRIAL - 1) + [True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((9,), (1, 0)),
        ((1,), (1, 1)),
        ((1, 9), (2, 1)),
        ((1, 2, 3), (3, 3)),
        ((1, 2, 3, 4), (3, 3)),
    ],
)
def test_a_chain_is_compared_as_far_as_both_go(text, expected):
    assert match(LocalProposal((1, 2, 3)), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [((2, 9), (1, 1)), ((1, 4, 9), (2, 2)), ((1, 9), (2, 1)), ((9, 1), (1, 0)), ((1,), (1, 1))],
)
def test_a_tree_along_the_path_that_the_text_takes(text, expected):
    assert match(LocalProposal((1, 2, 3, 4), (-1, -1, 0, 0)), text) == expected
