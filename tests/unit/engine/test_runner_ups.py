"""The tokens that come next after a row's own: every engine and the batched sampler name those of
the plain reference, whatever else is in the pass."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine import toy_rules
from paceline.engine.base import Propose, StepItem, Verify
from paceline.engine.best_tokens import MAX_RANKED, coupled_ranks
from paceline.engine.checks import MAX_RUNNER_UPS
from paceline.engine.keyed_noise import make_keys
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.engine.toy_rules import ToyRow
from paceline.errors import LocalProtocolError
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams, VerificationMode
from tests.properties.test_engine_sampler import EVERY_ROW, Batch, batches
from tests.unit.engine.conftest import VOCAB_SIZE
from tests.unit.engine.subjects import (
    COUPLED,
    EVERYTHING,
    GREEDY,
    Subject,
    filled,
    make_subject,
    tokens,
)

PROMPT_LEN = 14
LIVE_IDS_OF_TOP_K = 3
FEW = replace(COUPLED, top_k=LIVE_IDS_OF_TOP_K)


@pytest.fixture(params=["toy", "torch"])
def subject(request: pytest.FixtureRequest, llama_folder: Path) -> Subject:
    return make_subject(request.param, llama_folder)


def reference(values: list[float], row: SampleRow, num_best: int) -> tuple[int, ...]:
    """The token of the reference, then what it gives when those before are masked, one by one.

    Only where nothing but the plain argmax and noise decides: filters would let others in.
    """
    left = list(values)
    named: list[int] = []
    for _ in range(num_best):
        if named and max(left) == -math.inf:
            break
        named.append(coupled_token(left, row.sampling, row.output_index))
        left[named[-1]] = -math.inf
    return tuple(named)


def toy_row(values: list[float], row: SampleRow) -> ToyRow:
    histories = (tuple(row.prompt_token_ids), tuple(row.output_token_ids))
    return ToyRow(values, row.sampling, row.output_index, *histories)


# -- the sampler ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(batches(EVERY_ROW), st.integers(1, 9))
def test_the_batched_sampler_is_its_twin(batch: Batch, num_best: int) -> None:
    """Ties, masks, filters, penalties and biases included; alone or with others."""
    values, rows = batch
    logits = torch.tensor(values)
    exact = logits.double().tolist()
    expected = [
        toy_rules.best_tokens(toy_row(v, row), num_best) for v, row in zip(exact, rows, strict=True)
    ]
    sampler = BatchedSampler()
    assert sampler.rank(logits, rows, num_best) == expected
    assert BatchedSampler(draft_top_n=24).rank(logits, rows, num_best) == expected
    alone = [sampler.rank(logits[i : i + 1], [row], num_best)[0] for i, row in enumerate(rows)]
    assert alone == expected
    assert [best[0] for best in expected] == sampler.sample(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 7.0])
@pytest.mark.parametrize("num_best", [2, 5])
def test_each_is_the_token_once_those_before_it_are_masked(
    temperature: float, num_best: int
) -> None:
    """Rows as wide and as peaked as a model's, where most ids are pruned."""
    torch.manual_seed(3)
    logits = 4.0 * torch.randn(3, 2003)
    sampling = SamplingParams(temperature=temperature, seed=9)
    rows = [SampleRow(sampling, index) for index in range(3)]
    expected = [
        reference(values, row, num_best)
        for values, row in zip(logits.double().tolist(), rows, strict=True)
    ]
    assert BatchedSampler().rank(logits, rows, num_best) == expected
    assert all(len(set(best)) == num_best for best in expected)


def test_a_runner_up_is_found_that_only_noise_lifts() -> None:
    """Of 20,000 equal small logits the noise lifts some above the second and third largest."""
    logits = torch.full((1, 20_000), -7.0)
    logits[0, [11, 500, 14_000]] = torch.tensor([9.0, 0.0, -1.0])
    row = SampleRow(SamplingParams(temperature=1.0, seed=4), 7)
    [best] = BatchedSampler().rank(logits, [row], 4)
    assert best == reference(logits[0].double().tolist(), row, 4)
    assert best[0] == 11
    assert logits[0, list(best[1:])].min() == -7.0, "the case is what it should be"


def test_equal_logits_rank_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0]])
    assert BatchedSampler().rank(logits, [SampleRow(GREEDY, 0)], 5) == [(1, 3, 6, 2, 4)]


def test_only_the_top_n_take_part() -> None:
    logits = torch.arange(40.0)[None]
    hot = SampleRow(SamplingParams(temperature=100.0, seed=1), 3)
    [best] = BatchedSampler(draft_top_n=4).rank(logits, [hot], 9)
    assert sorted(best) == [36, 37, 38, 39]
    [full] = BatchedSampler().rank(logits, [hot], 9)
    assert not set(full) <= {36, 37, 38, 39}


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_a_sick_row_has_its_token_alone(sampling: SamplingParams) -> None:
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, 1.0, 2.0], [-inf, -inf, -inf], [3.0, 1.0, 2.0]])
    rows = [SampleRow(sampling, index) for index in range(3)]
    ranks = BatchedSampler().rank(logits, rows, 3)
    assert [len(best) for best in ranks] == [1, 1, 3]
    assert [best[0] for best in ranks] == BatchedSampler().sample(logits, rows)


def test_more_than_the_bound_allows_is_refused() -> None:
    keys = make_keys([(1, 0, 0)], torch.device("cpu"))
    with pytest.raises(AssertionError):
        coupled_ranks(torch.zeros(1, 64), torch.ones(1, 1).double(), keys, MAX_RANKED + 1)
    assert MAX_RUNNER_UPS + 1 <= MAX_RANKED


# -- the engines ----------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, EVERYTHING, FEW])
def test_of_each_sampled_row(subject: Subject, sampling: SamplingParams) -> None:
    text, drafts = tokens(1, PROMPT_LEN + 3), tokens(2, 3)
    filled(subject.engine, 1, text[:-1])
    item = StepItem(1, len(text) - 1, (text[-1], *drafts), 4, sampling, 3, num_runner_ups=4)
    [result] = subject.engine.step([item])
    for offset in range(4):
        row = subject.row((*text, *drafts[:offset]), sampling, 3 + offset)
        best = toy_rules.best_tokens(row, 5)
        assert (result.token_ids[offset], *result.runner_ups[offset]) == best
    if sampling is FEW:
        assert [len(named) for named in result.runner_ups] == [LIVE_IDS_OF_TOP_K - 1] * 4


def test_everybody_gets_what_they_asked_for(subject: Subject) -> None:
    """0, 1 and 3 in one pass beside a draw from a law: tokens and runner-ups are as if alone."""
    text = tokens(3, PROMPT_LEN)
    asked = {1: (COUPLED, 0), 2: (GREEDY, 1), 3: (COUPLED, 3)}
    for sequence_id in (*asked, 4, 5):
        filled(subject.engine, sequence_id, text[:-1])
    items = [
        StepItem(i, PROMPT_LEN - 1, text[-1:], 1, sampling, 5, num_runner_ups=num)
        for i, (sampling, num) in asked.items()
    ]
    law = StepItem(4, PROMPT_LEN - 1, text[-1:], 1, COUPLED, 5, Propose(77))
    results = subject.engine.step([items[0], law, *items[1:]])
    results.pop(1)
    row = subject.row(text, COUPLED, 5)
    cold = subject.row(text, GREEDY, 5)
    assert [result.token_ids[0] for result in results] == [
        toy_rules.best_tokens(row, 1)[0],
        toy_rules.best_tokens(cold, 1)[0],
        toy_rules.best_tokens(row, 1)[0],
    ]
    assert [result.runner_ups for result in results] == [
        (),
        (toy_rules.best_tokens(cold, 2)[1:],),
        (toy_rules.best_tokens(row, 4)[1:],),
    ]


def test_an_unfinished_prefill_has_none(subject: Subject) -> None:
    subject.engine.add(1)
    item = StepItem(1, 0, tokens(4, PROMPT_LEN), 1, GREEDY, max_rows=5, num_runner_ups=2)
    [result] = subject.engine.step([item])
    assert (result.token_ids, result.runner_ups) == ((), ())


@pytest.mark.parametrize(
    ("num_runner_ups", "rule"),
    [
        (-1, None),
        (MAX_RUNNER_UPS + 1, None),
        (1, Propose(3)),
        (1, Verify(VerificationMode.REJECTION, (), 3)),
    ],
)
def test_refused(subject: Subject, num_runner_ups: int, rule: Propose | Verify | None) -> None:
    filled(subject.engine, 1, tokens(1, PROMPT_LEN - 1))
    item = StepItem(1, PROMPT_LEN - 1, (5,), 1, COUPLED, 3, rule, num_runner_ups=num_runner_ups)
    with pytest.raises(LocalProtocolError):
        subject.engine.step([item])
    assert subject.engine.cached_len(1) == PROMPT_LEN - 1


def test_what_a_target_commits_instead_is_often_the_first_runner_up() -> None:
    """What all of this is for: a law near the draft's, the same noise, and the token differs."""
    rng = random.Random(5)
    num_corrections = num_foreseen = 0
    for index in range(400):
        draft = [rng.gauss(0.0, 2.0) for _ in range(VOCAB_SIZE)]
        target = [logit + rng.gauss(0.0, 0.4) for logit in draft]
        own, runner_up = toy_rules.best_tokens(ToyRow(draft, COUPLED, index), 2)
        committed = coupled_token(target, COUPLED, index)
        num_corrections += committed != own
        num_foreseen += committed == runner_up
    assert num_corrections > 50
    assert num_foreseen > 0.5 * num_corrections
