"""Rejection modes through scheduler, sessions and drafts: what is written has the target's law.

A draft that is wrong more often than right, and a cache so small that proposals are cut short
and sequences give way in between. The sampler has a test of its own, with far more samples; this
one is about rounds, windows and laws that must stay with their tokens.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest

from paceline.config import SpeculationConfig, TargetConfig
from paceline.engine.base import EngineInfo
from paceline.engine.toy import ToyEngine
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.processors import process_logits, softmax
from paceline.sampling.sparse_probs import SparseProbs
from paceline.target.scheduler import Scheduler
from paceline.testing.loopback import Loopback

INFO = EngineInfo("toy", 6, 16, block_size=2, num_blocks=80)
PROMPT = (1, 2)
SAMPLING = SamplingParams(temperature=1.2)
NUM_TOKENS = 3
NUM_SAMPLES = 3_000
MAX_DEVIATIONS = 4.0  # of a chi-square, in its own standard deviations: p = 1e-4 or less


def exact_law(engine, length):
    law = {}
    for text in itertools.product(range(INFO.vocab_size), repeat=length):
        prob = 1.0
        for end, token_id in enumerate(text):
            row = softmax(process_logits(engine.logits((*PROMPT, *text[:end])), SAMPLING))
            prob *= row[token_id]
        law[text] = prob
    return law


def deviation(counts, law):
    """How far the chi-square of the counts is off its mean; rare cells are one cell."""
    total = sum(counts.values())
    cells = [(counts[text], prob * total) for text, prob in law.items()]
    common = [cell for cell in cells if cell[1] >= 5.0]
    rare = [cell for cell in cells if cell[1] < 5.0]
    rest = (sum(count for count, _ in rare), sum(expected for _, expected in rare))
    common += [rest] if rest[1] >= 5.0 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in common)
    degrees = len(common) - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


def sample(mode, seeds, *, scheduler=None):
    """Texts of as many requests, from one crowded target with a bad draft."""
    draft = ToyEngine(replace(INFO, num_blocks=512), error_rate=0.7)
    speculation = SpeculationConfig(num_speculative_tokens=2)
    config = TargetConfig(max_num_seqs=32, max_queued_seqs=10_000)
    loopback = Loopback(ToyEngine(INFO), draft, speculation, config)
    if scheduler is not None:
        loopback.scheduler.__class__ = scheduler
    requests = [
        GenerateRequest(
            f"r{seed}",
            PROMPT,
            NUM_TOKENS + 3,
            replace(SAMPLING, seed=seed),
            speculation=SpeculationRequest(mode=mode),
        )
        for seed in seeds
    ]
    runs = loopback.run(requests)
    return [tuple(run.token_ids[:NUM_TOKENS]) for run in runs], loopback.scheduler.stats


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
def test_the_law_is_the_targets(mode):
    texts, stats = sample(mode, range(NUM_SAMPLES))
    engine = ToyEngine(INFO)
    for length in range(1, NUM_TOKENS + 1):
        counts = Counter(text[:length] for text in texts)
        assert deviation(counts, exact_law(engine, length)) < MAX_DEVIATIONS
    assert stats.num_preemptions > 50
    assert stats.num_plain_rounds < 0.7 * stats.num_rounds
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9


class DropsUnlikelyProposals(Scheduler):
    """Looks at what was drawn before it decides what to verify (math.md C2)."""

    def _entry(self, sequence, start, max_rows, draft):
        session = sequence.session
        pairs = zip(session.verifying_probs, draft, strict=True)
        if any(law.weight(token_id) < 0.35 * 65536 for law, token_id in pairs):
            session.cancel_verify()
            draft = session.begin_verify(0)
        return super()._entry(sequence, start, max_rows, draft)


class TakesOneLawForAnother(Scheduler):
    """The target divides by a flatter law than the token came from."""

    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        flat = tuple(flattened(law) for law in entry.item.rule.draft_probs)
        rule = replace(entry.item.rule, draft_probs=flat)
        return replace(entry, item=replace(entry.item, rule=rule))


def flattened(law):
    weights = [65536 // len(law.token_ids)] * len(law.token_ids)
    weights[0] += 65536 - sum(weights)
    return SparseProbs(law.token_ids, tuple(weights))


@pytest.mark.parametrize("scheduler", [DropsUnlikelyProposals, TakesOneLawForAnother])
def test_planted_bug_is_seen(scheduler):
    texts, _ = sample(VerificationMode.REJECTION, range(NUM_SAMPLES), scheduler=scheduler)
    counts = Counter(text[:2] for text in texts)
    assert deviation(counts, exact_law(ToyEngine(INFO), 2)) > 2 * MAX_DEVIATIONS
