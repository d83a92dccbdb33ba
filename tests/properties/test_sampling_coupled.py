"""Coupled mode: the target's own law, and the acceptance that its closed form predicts."""

import math
import random

import pytest

from paceline.sampling.acceptance import accept_matching, coupled_token
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import process_logits, softmax

NUM_IDS = 8
NUM_DRAWS = 8000
CHI_SQUARE_LIMIT = 29.9  # 7 degrees of freedom, one in ten thousand


def gaussian_logits(rng, spread):
    return [rng.gauss(0, spread) for _ in range(NUM_IDS)]


def acceptance_formula(target_probs, draft_probs):
    both = [(p, q) for p, q in zip(target_probs, draft_probs, strict=True) if p > 0 and q > 0]
    return sum(
        1 / sum(max(p / p_i, q / q_i) for p, q in zip(target_probs, draft_probs, strict=True))
        for p_i, q_i in both
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_law_is_the_processed_softmax(temperature):
    logits = gaussian_logits(random.Random(3), 1.0)
    params = SamplingParams(temperature=temperature, seed=2026)
    counts = [0] * NUM_IDS
    for output_index in range(NUM_DRAWS):
        counts[coupled_token(logits, params, output_index)] += 1
    expected = [prob * NUM_DRAWS for prob in softmax(process_logits(logits, params))]
    chi_square = sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))
    assert chi_square < CHI_SQUARE_LIMIT


def test_law_over_seeds_at_one_index():
    """A user who changes only the seed must also see the law."""
    logits = gaussian_logits(random.Random(4), 1.0)
    counts = [0] * NUM_IDS
    for seed in range(NUM_DRAWS):
        counts[coupled_token(logits, SamplingParams(seed=seed), 5)] += 1
    expected = [prob * NUM_DRAWS for prob in softmax(logits)]
    assert sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True)) < CHI_SQUARE_LIMIT


@pytest.mark.parametrize(
    ("spread", "mismatch", "params"),
    [
        (1.0, 0.3, SamplingParams(seed=5)),
        (2.0, 0.8, SamplingParams(seed=6)),
        (2.0, 0.8, SamplingParams(seed=7, temperature=0.7, top_k=6, top_p=0.95)),
    ],
)
def test_acceptance_equals_the_closed_form(spread, mismatch, params):
    rng = random.Random(8)
    target = gaussian_logits(rng, spread)
    draft = [logit + rng.gauss(0, mismatch) for logit in target]
    num_accepted = sum(
        coupled_token(target, params, t) == coupled_token(draft, params, t)
        for t in range(NUM_DRAWS)
    )
    target_probs = softmax(process_logits(target, params))
    draft_probs = softmax(process_logits(draft, params))
    expected = acceptance_formula(target_probs, draft_probs)
    distance = sum(abs(p - q) for p, q in zip(target_probs, draft_probs, strict=True)) / 2
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance + 1e-12
    sigma = math.sqrt(expected * (1 - expected) / NUM_DRAWS)
    assert abs(num_accepted / NUM_DRAWS - expected) < 4 * sigma


def test_text_does_not_depend_on_the_draft():
    """Pathwise: any proposals, at any block length, reveal the same tokens (2e.2)."""
    params = SamplingParams(seed=77)

    def target_token(prefix):
        return coupled_token(gaussian_logits(random.Random(f"t{prefix}"), 1.5), params, len(prefix))

    plain = ()
    while len(plain) < 24:
        plain = (*plain, target_token(plain))
    for seed in range(5):
        rng = random.Random(seed)
        text = ()
        while len(text) < 24:
            draft = []
            for _ in range(rng.randrange(5)):
                here = (*text, *draft)
                draft.append(target_token(here) if rng.random() < 0.7 else rng.randrange(NUM_IDS))
            sampled = [target_token((*text, *draft[:i])) for i in range(len(draft) + 1)]
            acceptance = accept_matching(draft, sampled)
            text = (*text, *draft[: acceptance.num_accepted_tokens], acceptance.next_token_id)
        assert text[:24] == plain
