"""Rejection modes through the shipped torch sampler: the output law is the target's own.

A toy pair over 8 ids whose laws depend on the token before. Both ends run as they do in service:
the draft proposes blocks, the target verifies them, each round with keys of its own, until three
tokens are out. The joint law of the three is compared by chi-square; planted bugs must fail it.
Seeds are fixed, so a result is the same on every run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
import torch

from paceline.engine import keyed_noise, rejection
from paceline.engine.base import Verify
from paceline.engine.rejection import DraftBlock
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.sampling.noise import Purpose
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.processors import process_logits, softmax
from paceline.sampling.sparse_probs import SparseProbs

torch.set_num_threads(1)

NUM_IDS = 8
NUM_TOKENS = 3
START = NUM_IDS  # the row of the tables for the first token
NUM_SAMPLES = 100_000
NUM_TOOTH_SAMPLES = 8_000
NUM_AT_ONCE = 4_000  # no more than the cache of key schedules holds
MIN_P_VALUE = 1e-4
MAX_TOOTH_P_VALUE = 1e-6
MODES = [VerificationMode.REJECTION, VerificationMode.BLOCK]

_generator = torch.Generator().manual_seed(20)
TARGET_LOGITS = torch.randn(NUM_IDS + 1, NUM_IDS, generator=_generator) * 1.2
DRAFT_LOGITS = TARGET_LOGITS + torch.randn(NUM_IDS + 1, NUM_IDS, generator=_generator) * 0.9


PLAIN = SamplingParams()


@dataclass(frozen=True)
class Setup:
    """A pair of ends. The draft's parameters may differ from the target's (peers no. 8)."""

    mode: VerificationMode
    target: SamplingParams = PLAIN
    draft: SamplingParams = PLAIN
    num_draft_tokens: int = 2
    round_key: Callable[[int], int] = lambda round: round
    target_logits: torch.Tensor = TARGET_LOGITS
    draft_logits: torch.Tensor = DRAFT_LOGITS


Cell = TypeVar("Cell")
Proposal = tuple[list[int], list[SparseProbs]]
# What the draft hands over for many sequences: per sequence its tokens and their laws.
Corrupt = Callable[[list[Proposal]], list[Proposal]]


def play(
    setup: Setup, seeds: Sequence[int], corrupt: Corrupt = lambda sent: sent
) -> list[tuple[int, ...]]:
    """The first three tokens of one sequence per seed."""
    sampler = BatchedSampler()
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(seeds, ())
    targets = {seed: replace(setup.target, seed=seed) for seed in seeds}
    drafts = {seed: replace(setup.draft, seed=seed) for seed in seeds}
    for round in itertools.count():
        active = [seed for seed in seeds if len(texts[seed]) < NUM_TOKENS]
        if not active:
            return [texts[seed][:NUM_TOKENS] for seed in seeds]
        key = setup.round_key(round)
        sent = corrupt(propose(sampler, setup, texts, [drafts[seed] for seed in active], key))
        blocks, contexts = [], []
        for seed, (token_ids, laws) in zip(active, sent, strict=True):
            done = len(texts[seed])
            rows = [SampleRow(targets[seed], done + i) for i in range(len(token_ids) + 1)]
            blocks.append(DraftBlock(rows, token_ids, Verify(setup.mode, tuple(laws), key)))
            contexts += [last(texts[seed]), *token_ids]
        results = sampler.verify_blocks(setup.target_logits[contexts], blocks)
        for seed, (committed, _) in zip(active, results, strict=True):
            texts[seed] += committed
    raise AssertionError


def propose(
    sampler: BatchedSampler,
    setup: Setup,
    texts: dict[int, tuple[int, ...]],
    drafts: Sequence[SamplingParams],
    key: int,
) -> list[Proposal]:
    """Each sequence's block of a fixed length; every token from the law that is stated."""
    sent: list[Proposal] = [([], []) for _ in drafts]
    for i in range(setup.num_draft_tokens):
        contexts, rows = [], []
        for params, (token_ids, _) in zip(drafts, sent, strict=True):
            text = texts[params.seed]
            contexts.append(last((*text, *token_ids)))
            rows.append(SampleRow(params, len(text) + i))
        drawn = sampler.propose(setup.draft_logits[contexts], rows, [key] * len(rows))
        for (token_ids, laws), token_id, law in zip(sent, *drawn, strict=True):
            token_ids.append(token_id)
            laws.append(law)
    return sent


def last(text: tuple[int, ...]) -> int:
    return text[-1] if text else START


def joint_law(setup: Setup) -> dict[tuple[int, ...], float]:
    """What the target alone writes, from the reference's probabilities."""
    logits = setup.target_logits.double().tolist()
    rows = [softmax(process_logits(row, setup.target)) for row in logits]
    return {
        text: math.prod(
            rows[previous][token_id]
            for previous, token_id in zip((START, *text), text, strict=False)
        )
        for text in itertools.product(range(NUM_IDS), repeat=NUM_TOKENS)
    }


def p_values(setup: Setup, num_samples: int, corrupt: Corrupt = lambda sent: sent) -> list[float]:
    """Of the joint law of three tokens, and of each position's own law."""
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, num_samples, NUM_AT_ONCE):
        counts.update(play(setup, range(start, start + NUM_AT_ONCE), corrupt))
    law = joint_law(setup)
    values = [chi_square_p_value(counts, law, num_samples)]
    for position in range(NUM_TOKENS):
        one_law: dict[int, float] = {}
        one_counts: Counter[int] = Counter()
        for text, prob in law.items():
            one_law[text[position]] = one_law.get(text[position], 0.0) + prob
            one_counts[text[position]] += counts[text]
        values.append(chi_square_p_value(one_counts, one_law, num_samples))
    return values


def chi_square_p_value(
    counts: Mapping[Cell, int], law: Mapping[Cell, float], num_samples: int
) -> float:
    """Cells that expect fewer than 5 are one cell; one that expects none must stay empty."""
    statistic, num_cells = 0.0, 0
    rest_count, rest_expected = 0, 0.0
    for cell, prob in law.items():
        expected = prob * num_samples
        if expected < 5.0:
            rest_count, rest_expected = rest_count + counts[cell], rest_expected + expected
            continue
        statistic += (counts[cell] - expected) ** 2 / expected
        num_cells += 1
    if rest_expected >= 5.0:
        statistic += (rest_count - rest_expected) ** 2 / rest_expected
        num_cells += 1
    elif rest_expected == 0.0 and rest_count:
        return 0.0
    return upper_gamma((num_cells - 1) / 2, statistic / 2)


def upper_gamma(shape: float, x: float) -> float:
    """Regularised Q(shape, x): the series below shape + 1, Lentz's continued fraction above."""
    if x <= 0.0:
        return 1.0
    front = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1.0:
        term = total = 1.0 / shape
        for n in itertools.count(1):
            term *= x / (shape + n)
            total += term
            if term < total * 1e-15:
                return 1.0 - front * total
    b = x + 1.0 - shape
    c, d = 1e300, 1.0 / b
    fraction = d
    for n in itertools.count(1):
        a = -n * (n - shape)
        b += 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction


@pytest.mark.parametrize(
    ("degrees", "statistic", "p_value"),
    [(1, 3.841459, 0.05), (7, 29.8775, 1e-4), (2, 2.0, math.exp(-1)), (500, 500.0, 0.4916)],
)
def test_p_values_are_those_of_the_tables(degrees: int, statistic: float, p_value: float) -> None:
    assert upper_gamma(degrees / 2, statistic / 2) == pytest.approx(p_value, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_joint_law_of_three_tokens_is_the_targets(mode: VerificationMode) -> None:
    assert min(p_values(Setup(mode), NUM_SAMPLES)) > MIN_P_VALUE


@pytest.mark.parametrize("mode", MODES)
def test_the_draft_may_have_other_parameters(mode: VerificationMode) -> None:
    """Peers no. 7 and 8: the law is the target's, filters included, whatever the draft does."""
    target = SamplingParams(temperature=0.7, top_p=0.9137, min_p=0.03)
    setup = Setup(mode, target, SamplingParams(temperature=0.5, top_k=3), num_draft_tokens=3)
    assert min(p_values(setup, NUM_TOOTH_SAMPLES)) > MIN_P_VALUE


@pytest.mark.parametrize("mode", MODES)
def test_a_hot_law_gives_many_texts(mode: VerificationMode) -> None:
    """Peers no. 10: a verification that silently is greedy would give one."""
    hot = SamplingParams(temperature=1.5)
    assert len(set(play(Setup(mode, hot, hot), range(30)))) > 10


# -- teeth: planted bugs ----------------------------------------------------------------------


def state_a_flatter_law(sent: list[Proposal]) -> list[Proposal]:
    """C1 broken: the stated law is that of another temperature (transformers no. 47932)."""
    return [(token_ids, [flatter(law) for law in laws]) for token_ids, laws in sent]


def flatter(law: SparseProbs) -> SparseProbs:
    weights = [1 + weight // 2 for weight in law.weights]
    share, rest = divmod(sum(law.weights) - sum(weights), len(weights))
    spread = [weight + share + (j < rest) for j, weight in enumerate(weights)]
    return SparseProbs(law.token_ids, tuple(spread))


def drop_unlikely_tokens(sent: list[Proposal]) -> list[Proposal]:
    """C2 broken: whether a token is submitted depends on the token."""
    cut = []
    for token_ids, laws in sent:
        likely = [law.weight(t) > 16384 for t, law in zip(token_ids, laws, strict=True)]
        num = likely.index(False) if False in likely else len(likely)
        cut.append((token_ids[:num], laws[:num]))
    return cut


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("corrupt", [state_a_flatter_law, drop_unlikely_tokens])
def test_a_draft_that_breaks_the_conditions_is_caught(
    mode: VerificationMode, corrupt: Corrupt
) -> None:
    assert min(p_values(Setup(mode), NUM_TOOTH_SAMPLES, corrupt)) < MAX_TOOTH_P_VALUE


def test_block_noise_keyed_by_position_alone_is_caught() -> None:
    """B2 broken; the token rule never looked behind the rejection and so stays exact."""
    block, token = (
        p_values(Setup(mode, num_draft_tokens=3, round_key=lambda round: 0), NUM_TOOTH_SAMPLES)
        for mode in (VerificationMode.BLOCK, VerificationMode.REJECTION)
    )
    assert min(token) > MIN_P_VALUE
    assert min(block) < MAX_TOOTH_P_VALUE


@pytest.mark.parametrize("mode", MODES)
def test_noise_shared_by_draft_and_uniform_is_caught(
    mode: VerificationMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C3 broken: a planted key; the draft's own word decides about its token."""
    uniform = rejection._uniform
    monkeypatch.setattr(
        rejection, "_uniform", lambda block, i, purpose: uniform(block, i, Purpose.DRAFT_PROPOSAL)
    )
    assert min(p_values(Setup(mode), NUM_TOOTH_SAMPLES)) < MAX_TOOTH_P_VALUE


def test_noise_shared_by_draft_and_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3 broken as in vLLM no. 47386, where sharing one word does most harm.

    Only id 1 is ever refused. It was drawn because the word was low, and a low word is an early
    arrival of id 0, which so recovers more often than id 3.
    """
    target = torch.tensor([[0.15, 0.3, 0.4, 0.15, 0, 0, 0, 0]] * (NUM_IDS + 1)).log()
    draft = torch.tensor([[0, 0.6, 0.4, 0, 0, 0, 0, 0]] * (NUM_IDS + 1)).log()
    setup = Setup(VerificationMode.REJECTION, target_logits=target, draft_logits=draft)
    assert min(p_values(setup, NUM_TOOTH_SAMPLES)) > MIN_P_VALUE
    make_keys = keyed_noise.make_keys

    def shared(rows: Any, device: Any, purpose: Purpose, round: Any) -> keyed_noise.NoiseKeys:
        assert purpose is Purpose.RESIDUAL
        return make_keys(rows, device, Purpose.DRAFT_PROPOSAL, round)

    monkeypatch.setattr("paceline.engine.sampler.make_keys", shared)
    assert min(p_values(setup, NUM_TOOTH_SAMPLES)) < MAX_TOOTH_P_VALUE


def test_block_rule_that_stops_at_a_failure_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix of a block that ends where it fails: what earlier ports did."""
    accept_block = rejection._accept_block
    uniform = rejection._uniform

    def until_failure(block: DraftBlock, probs: Sequence[Sequence[float]]) -> tuple[int, float]:
        best = (0, 1.0)
        for num in range(len(block.draft_token_ids)):
            # only position `num` can pass, so the rule tells whether it does
            monkeypatch.setattr(
                rejection,
                "_uniform",
                lambda block, i, purpose, num=num: uniform(block, i, purpose) if i == num else 1.0,
            )
            found = accept_block(block, probs)
            if found[0] != num + 1:
                break
            best = found
        return best

    monkeypatch.setattr(rejection, "_accept_block", until_failure)
    setup = Setup(VerificationMode.BLOCK)
    assert min(p_values(setup, NUM_TOOTH_SAMPLES)) < MAX_TOOTH_P_VALUE
