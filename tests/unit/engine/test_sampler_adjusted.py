"""Penalties, logit bias, min tokens and min-p in the batched sampler."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from paceline.engine import sampler
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import MIN_TEMPERATURE, SamplingParams

FLOAT32_MAX = torch.finfo(torch.float32).max


def reference(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [
        coupled_token(
            values, row.sampling, row.output_index, row.prompt_token_ids, row.output_token_ids
        )
        for values, row in zip(logits.double().tolist(), rows, strict=True)
    ]


def random_rows(rng: random.Random, count: int, vocab_size: int) -> list[SampleRow]:
    """Half of them plain; prompts are shared by rows of one sequence, as in a verify pass."""
    prompt = tuple(rng.choices(range(vocab_size), k=200))
    rows = []
    for index in range(count):
        fields: dict[str, Any] = {"temperature": rng.choice((0.0, 0.8, 1.2)), "seed": index}
        if index % 2:
            fields |= {
                "repetition_penalty": rng.choice((1.0, 1.2, 0.8)),
                "presence_penalty": rng.choice((0.0, 0.5)),
                "frequency_penalty": rng.choice((0.0, 0.1)),
                "logit_bias": tuple((i, rng.uniform(-9, 9)) for i in range(3)),
                "min_p": rng.choice((0.0, 0.02)),
                "top_k": rng.choice((0, 50)),
                "min_tokens": rng.choice((0, 1000)),
                "stop_token_ids": (5, vocab_size - 1),
            }
        output = tuple(rng.choices(range(vocab_size // 2), k=rng.randrange(300)))
        rows.append(SampleRow(SamplingParams(**fields), len(output), prompt, output))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_batches_equal_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(40, 1003) * 3).to(dtype)
    rows = random_rows(random.Random(2), 40, 1003)
    assert BatchedSampler().sample(logits, rows) == reference(logits, rows)


def test_parts_of_a_batch_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    logits = torch.randn(30, 101) * 3
    rows = random_rows(random.Random(4), 30, 101)
    whole = BatchedSampler().sample(logits, rows)
    monkeypatch.setattr(sampler, "_MAX_EXACT_LOGITS", 350)
    assert BatchedSampler().sample(logits, rows) == whole


@pytest.mark.parametrize("repetition_penalty", [0.01, 10.0])
@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 0.8, 100.0])
def test_adjusted_logits_beyond_float32_equal_the_reference(
    repetition_penalty: float, temperature: float
) -> None:
    torch.manual_seed(5)
    logits = (torch.rand(20, 70) * 2 - 1) * FLOAT32_MAX
    laws = [
        SamplingParams(temperature, seed=i, repetition_penalty=repetition_penalty)
        for i in range(20)
    ]
    rows = [SampleRow(law, i, range(40)) for i, law in enumerate(laws)]
    sampler = BatchedSampler()
    assert sampler.sample(logits, rows) == reference(logits, rows)
    assert sampler.num_bad_rows == 0


def test_differences_that_float32_cannot_hold_still_decide() -> None:
    """The row becomes float64, so that a penalty far below one ulp of a logit is no tie."""
    logits = torch.full((1, 4), 1e6)
    params = SamplingParams(temperature=0.0, frequency_penalty=1e-6)
    rows = [SampleRow(params, 3, (), (0, 1, 0))]
    assert BatchedSampler().sample(logits, rows) == [2] == reference(logits, rows)


def test_noise_is_added_to_the_unrounded_logits() -> None:
    """At a million float32 steps by 1/16; divided by the temperature that would be six units."""
    rng = random.Random(8)
    logits = torch.full((60, 12), 1e6)
    rows = [
        SampleRow(
            SamplingParams(
                temperature=0.01,
                seed=i,
                logit_bias=tuple((j, rng.uniform(-0.03, 0.03)) for j in range(12)),
            ),
            i,
        )
        for i in range(60)
    ]
    assert BatchedSampler().sample(logits, rows) == reference(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_min_tokens_gives_way_where_only_an_end_is_left(temperature: float) -> None:
    logits = torch.tensor([[float("-inf"), 1.0, 3.0, float("-inf")]]).expand(30, 4)
    fields: dict[str, Any] = {"min_tokens": 9, "stop_token_ids": (1, 2), "presence_penalty": 0.5}
    rows = [
        SampleRow(SamplingParams(temperature=temperature, seed=i, **fields), i, (), (2,))
        for i in range(30)
    ]
    chosen = BatchedSampler().sample(logits, rows)
    assert set(chosen) <= {1, 2}
    assert chosen == reference(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_a_banned_token_never_appears(temperature: float) -> None:
    """Peers no. 12: bias -100 on the favourite."""
    logits = torch.tensor([[5.0, 3.0, 2.0]]).expand(200, 3)
    banned = ((0, -100.0),)
    rows = [
        SampleRow(SamplingParams(temperature, seed=i, logit_bias=banned), i) for i in range(200)
    ]
    assert 0 not in BatchedSampler().sample(logits, rows)


def test_min_p_has_the_references_support() -> None:
    logits = torch.tensor([[2.0, 1.5, 0.5, -1.0]]).expand(300, 4)
    rows = [SampleRow(SamplingParams(seed=i, min_p=0.3), i) for i in range(300)]
    chosen = BatchedSampler().sample(logits, rows)
    assert set(chosen) == {0, 1}
    assert chosen == reference(logits, rows)


def test_min_p_keeps_what_is_exactly_at_the_bound() -> None:
    values = [math.log(0.25), 0.0, math.nextafter(math.log(0.25), -2.0)]
    logits = torch.tensor([values], dtype=torch.float64).expand(200, 3)
    rows = [SampleRow(SamplingParams(seed=i, min_p=0.25), i) for i in range(200)]
    chosen = BatchedSampler().sample(logits, rows)
    assert set(chosen) == {0, 1}
    assert chosen == reference(logits, rows)


def test_frequency_penalty_breaks_a_loop() -> None:
    """Peers no. 14: every row of a block counts the drafts before it."""
    logits = torch.tensor([[3.0, 2.5, 0.0]]).expand(4, 3)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    rows = [SampleRow(params, i, (), (0, 1, 0)[:i]) for i in range(4)]
    assert BatchedSampler().sample(logits, rows) == [0, 1, 0, 1]


@pytest.mark.parametrize("draft_top_n", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_adjusted_row_whatever_it_holds_raises(
    temperature: float, draft_top_n: int | None
) -> None:
    inf, nan = float("inf"), float("nan")
    odd = [[-inf] * 4, [inf, 1.0, -inf, 2.0], [nan] * 4, [nan, 1.0, -inf, 0.0], [inf] * 4]
    good = [0.5, 3.0, 2.0, 1.0]
    logits = torch.tensor([*odd, good])
    params = SamplingParams(
        temperature=temperature,
        presence_penalty=1.0,
        repetition_penalty=1.5,
        min_p=0.1,
        min_tokens=9,
        stop_token_ids=(0,),
        seed=4,
    )
    rows = [SampleRow(params, i, (1, 2), (3, 3)) for i in range(len(logits))]
    sampler = BatchedSampler(draft_top_n=draft_top_n)
    chosen = sampler.sample(logits, rows)
    assert 0 <= chosen[0] < 4
    # no stop id, where there is anything else to choose
    assert all(0 < token_id < 4 for token_id in chosen[1:])
    assert chosen[-1:] == BatchedSampler(draft_top_n=draft_top_n).sample(logits[-1:], rows[-1:])


def test_draft_shortcut_draws_among_the_top_of_what_the_filters_leave() -> None:
    """Adjusted first, then filtered, then noise on the top n of the rest."""
    torch.manual_seed(7)
    logits = torch.randn(60, 400)
    fields: dict[str, Any] = {"top_p": 0.9137, "presence_penalty": 2.0, "logit_bias": ((8, 6.0),)}
    top = logits.topk(40).indices.tolist()
    rows = [SampleRow(SamplingParams(seed=i, **fields), i, (), top[i]) for i in range(60)]
    drafted = BatchedSampler(draft_top_n=64).sample(logits, rows)
    exact = BatchedSampler().sample(logits, rows)
    assert exact == reference(logits, rows)
    assert sum(a == b for a, b in zip(drafted, exact, strict=True)) >= 30
    narrow = [
        SampleRow(SamplingParams(seed=i, top_k=20, **fields), i, (), top[i]) for i in range(60)
    ]
    assert BatchedSampler(draft_top_n=64).sample(logits, narrow) == reference(logits, narrow)
