"""Real weights on prompts that repeat their context: our lookups beside transformers' own."""

from __future__ import annotations

import pytest

from paceline.bench.prompt_sets import prompt_set
from tests.e2e.lookup import PROPOSERS, THEIRS, compare, say

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(1800)]


def test_two_tokens_a_pass_and_transformers_beside_them() -> None:
    totals, texts = compare(prompt_set("repeat"), max_tokens=96, k=8, say=say)
    assert len(texts) >= 8
    assert all(text.is_same for text in texts)
    for name in PROPOSERS:
        assert totals[name].num_tokens == totals[THEIRS].num_tokens
        assert totals[name].mean_acceptance_length >= 2.0
    # By default ours propose less, and more of that is right; asked for as much, they gain as much.
    theirs = totals[THEIRS]
    for name in ("ngram", "suffix"):
        assert totals[name].acceptance_rate > theirs.acceptance_rate
    for name in ("ngram from 1", "suffix x 4"):
        assert totals[name].mean_acceptance_length >= 0.95 * theirs.mean_acceptance_length
