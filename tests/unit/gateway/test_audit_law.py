"""Statistics of tokens have the mean that is claimed, under the law that is really sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from paceline.engine.toy_rules import logprobs
from paceline.gateway.audit_law import (
    NUM_TOP,
    PairValues,
    Place,
    known_law,
    pair_values,
    token_values,
)
from paceline.generation import TokenLogprobs
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import process_logits, softmax

VOCAB_SIZE = 100
PROMPT, OUTPUT = (1, 2, 3, 1), (7, 8, 7, 9)
TOLERANCE = 0.01
BIAS = ((2, 1.5), (7, -2.0), (50, -100.0))

# What a request may ask for, and whether filters leave the law known.
KNOWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.6},
    "cold": {"temperature": 0.4},
    "bias": {"logit_bias": BIAS},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "temperature": 0.8},
    "rewards": {"presence_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.4},
    "top_k": {"top_k": 5},
    "top_k beyond the list": {"top_k": 60},
    "top_p": {"top_p": 0.6},
    "top_p cold": {"top_p": 0.9, "temperature": 0.6},
    "top_p warm": {"top_p": 0.5, "temperature": 1.5},
    "min_p": {"min_p": 0.05},
    "all filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.9},
    "filters and penalties": {"top_k": 8, "top_p": 0.95, "frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 10, "stop_token_ids": (4, 5)},
}
# Ways to a row: flat, peaked, and one of which few ids are possible at all.
ROWS = {"flat": 1.0, "peaked": 4.0, "few": 2.0}


def row(kind: str, seed: int) -> list[float]:
    random = Random(f"{kind}{seed}")
    logits = [random.gauss(0.0, ROWS[kind]) for _ in range(VOCAB_SIZE)]
    if kind == "few":
        for token_id in range(12, VOCAB_SIZE):
            logits[token_id] = -math.inf
    return logits


def place(params: SamplingParams) -> Place:
    return Place(params, PROMPT, OUTPUT, VOCAB_SIZE, lambda i: i in (4, 5))


def means(logits: Sequence[float], params: SamplingParams) -> tuple[list[float | None], float]:
    """Of the statistics, exactly, under the reference's law; and how much of it they look at."""
    law = softmax(process_logits(logits, params, PROMPT, OUTPUT))
    where = place(params)
    sums: list[float | None] = [None] * 4
    looked_at = 0.0
    for token_id, prob in enumerate(law):
        if prob == 0.0:
            continue
        values = token_values(logprobs(logits, token_id, NUM_TOP), where, TOLERANCE)
        looked_at += prob * (values[1] is not None)
        for index, value in enumerate(values):
            if value is not None:
                assert -1.0 <= value <= 1.0
                sums[index] = (sums[index] or 0.0) + prob * value
    return sums, looked_at


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("name", KNOWN)
def test_means_are_what_is_claimed(name: str, kind: str) -> None:
    """Mean 0 of three, at most 0 of the last, over every token that can be drawn."""
    params = SamplingParams(**KNOWN[name])
    looked_at = 0.0
    for seed in range(8):
        (mode, position, surprise, outside), share = means(row(kind, seed), params)
        looked_at += share
        for mean in (mode, position, surprise):
            assert mean is None or mean == pytest.approx(0.0, abs=1e-6)
        assert outside is None or outside <= 1e-9
    assert looked_at > 0.0, "it must say something about such requests"


@pytest.mark.parametrize(
    "name", ["plain", "cold", "bias", "penalties", "top_k", "top_p", "min_p", "all filters"]
)
def test_most_of_the_law_is_looked_at(name: str) -> None:
    share = sum(means(row("peaked", seed), SamplingParams(**KNOWN[name]))[1] for seed in range(8))
    assert share / 8 > 0.7


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"grammar": "x"},
        {"temperature": 1.9 * TOLERANCE},
        {"repetition_penalty": 1.2, "top_p": 0.9},
        {"logit_bias": ((98, 5.0), (99, 5.0)), "top_k": 3},
        {"frequency_penalty": -1.0, "min_p": 0.1},
        {"min_tokens": 10, "stop_token_ids": (4, 5), "top_k": 4},
    ],
    ids=["greedy", "grammar", "too cold", "repetition", "bias", "reward", "min_tokens"],
)
def test_nothing_is_said_of_a_law_that_is_not_known(given: dict[str, Any]) -> None:
    logits = row("flat", 1)
    logits[4] = 9.0
    logits[98] = logits[99] = -3.0
    scored = logprobs(logits, 10, NUM_TOP)
    values = token_values(scored, place(SamplingParams(**given)), TOLERANCE)
    assert values == (None, None, None, None)


def test_ids_at_a_filters_edge_are_left_out() -> None:
    """Rounding may have put them on the other side; far from the edge it cannot."""
    logits = [-math.inf] * VOCAB_SIZE
    logits[:4] = [3.0, 2.0, 1.0, 0.999]
    law = known_law(logprobs(logits, 0, NUM_TOP).top, place(SamplingParams(top_k=3)), 0.05)
    assert law is not None
    assert set(law.probs) == {0, 1}
    law = known_law(logprobs(logits, 0, NUM_TOP).top, place(SamplingParams(top_k=2)), 0.05)
    assert law is not None
    assert (set(law.probs), law.probs[2], law.probs[3]) == ({0, 1, 2, 3}, 0.0, 0.0)


def test_what_cannot_be_drawn_is_strong_evidence() -> None:
    logits = row("few", 3)
    order = sorted(range(12), key=lambda i: -logits[i])
    filtered = place(SamplingParams(top_k=3))
    mode, position, surprise, _ = token_values(
        logprobs(logits, order[-1], NUM_TOP), filtered, TOLERANCE
    )
    assert (position, mode) == (-1.0, pytest.approx(-softmax(logits)[order[0]], abs=0.3))
    assert surprise is not None
    assert surprise > 0.5
    dead = token_values(logprobs(logits, 90, NUM_TOP), place(SamplingParams()), TOLERANCE)
    assert dead[:3] == (None, None, None)
    assert dead[3] == pytest.approx(1.0)


def test_a_token_outside_the_list_is_expected_now_and_then() -> None:
    logits = row("flat", 5)
    order = sorted(range(VOCAB_SIZE), key=lambda i: -logits[i])
    scored = logprobs(logits, order[NUM_TOP], NUM_TOP)
    rest = sum(softmax(logits)[i] for i in order[NUM_TOP:])
    *_, outside = token_values(scored, place(SamplingParams()), TOLERANCE)
    assert outside == pytest.approx(1.0 - rest, abs=1e-4)


# ---------------------------------------------------------------------------------------- pairs


def swapped(values: PairValues) -> list[float | None]:
    return [None if value is None else -value for value in values]


def test_pairs_change_their_sign_with_their_places() -> None:
    random = Random(3)
    for _ in range(200):
        sent, plain = ([random.randrange(3) for _ in range(random.randint(1, 4))] for _ in range(2))
        first, second = ([-random.random() for _ in text] for text in (sent, plain))
        one = pair_values(first, second, sent, plain)
        other = pair_values(second, first, plain, sent)
        assert list(other) == swapped(one)
        assert all(value is None or -1.0 <= value <= 1.0 for value in one)


def test_equal_texts_say_nothing() -> None:
    """Whatever rounding made of their log-probabilities."""
    assert pair_values([-1.0], [-1.1], [5], [5]) == (None, None, None)


def test_what_a_pair_says() -> None:
    parting, better, advantage = pair_values([-1.0, -2.0], [-1.0, -3.0], [5, 6], [5, 7])
    assert (parting, better) == (1.0, 1.0)
    assert advantage == pytest.approx(math.tanh(2.0))
    assert pair_values([-1.0], [-1.0, -3.0], [5], [5, 7])[:2] == (None, 1.0)


def test_floors_are_no_infinity() -> None:
    scored = TokenLogprobs(1, -9999.0, 9, ((0, 0.0), (1, -9999.0)))
    values = token_values(scored, place(SamplingParams()), TOLERANCE)
    assert values[3] == pytest.approx(1.0)
