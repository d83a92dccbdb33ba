"""Passes of a known text, and those of the demo target's texts that repeat their prompts.

`repeat_texts.jsonl`: its greedy answers (bfloat16, at most 96 tokens) to the `repeat` prompts of
`paceline bench methods`, as ids. `tests/e2e/lookup.py` writes such texts anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.bench.prompt_sets import SETS
from paceline.config import SpeculationConfig
from paceline.proposers.base import Proposer
from paceline.proposers.ngram import NgramProposer
from paceline.proposers.recent_outputs import RecentOutputs
from paceline.proposers.suffix import SuffixProposer
from paceline.testing.replay import Replay, replay

LINES = (Path(__file__).parent / "repeat_texts.jsonl").read_text().splitlines()
TEXTS = [(text["prompt"], text["output"]) for text in map(json.loads, LINES)]
DEFAULTS = SpeculationConfig()


def ngram() -> Proposer:
    return NgramProposer(DEFAULTS.prompt_lookup_min, DEFAULTS.prompt_lookup_max)


def suffix(recent: RecentOutputs | None = None) -> Proposer:
    return SuffixProposer(
        DEFAULTS.suffix_decoding_max_tree_depth,
        DEFAULTS.suffix_decoding_max_spec_factor,
        DEFAULTS.suffix_decoding_min_token_prob,
        recent,
    )


class Scripted:
    """Proposes as told, pass by pass."""

    def __init__(self, *proposals: tuple[int, ...]) -> None:
        self.proposals = list(proposals)
        self.text: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self.text += token_ids

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        return self.proposals.pop(0)[:max_tokens]


def test_counts_of_a_text() -> None:
    proposer = Scripted((3, 9), (), (6, 7, 8))
    found = replay(proposer, (1, 2), (3, 4, 5, 6, 7), 4)
    assert found == Replay(num_tokens=5, num_passes=3, num_proposed=3, num_accepted=2)
    assert proposer.text == [1, 2, 3, 4, 5, 6, 7]
    assert (found.mean_acceptance_length, found.acceptance_rate) == (5 / 3, 2 / 3)
    assert (found + found).num_passes == 6
    assert (Replay().mean_acceptance_length, Replay().acceptance_rate) == (0.0, 0.0)


@pytest.mark.parametrize("make", [ngram, suffix])
@pytest.mark.parametrize("most", [4, 8])
def test_two_tokens_a_pass_where_the_context_is_repeated(
    make: Callable[[], Proposer], most: int
) -> None:
    assert len(TEXTS) == len(SETS["repeat"]) >= 8
    total = sum((replay(make(), *text, most) for text in TEXTS), Replay())
    assert total.num_tokens == sum(len(output) for _, output in TEXTS)
    assert total.mean_acceptance_length >= 2.5
    assert total.acceptance_rate >= 0.6


def test_recent_outputs_know_an_answer_that_was_given_before() -> None:
    """The second time it is nearly all known, though the request's own text says nothing new."""
    recent = RecentOutputs(DEFAULTS.suffix_decoding_max_cached_tokens, 24)
    first = second = Replay()
    for prompt, output in TEXTS:
        first += replay(suffix(recent), prompt, output, 8)
        recent.add(output)
    for prompt, output in TEXTS:
        second += replay(suffix(recent), prompt, output, 8)
    assert second.num_passes < 0.75 * first.num_passes
