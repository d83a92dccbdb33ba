"""The batched sampler against the pure reference, row by row."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.engine.keyed_noise import gumbel, make_keys, token_words
from paceline.engine.sampler import BatchedSampler, SampleRow, coupled_tokens, greedy_tokens
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import MIN_TEMPERATURE, SamplingParams

NEG_INF = float("-inf")


def row(output_index: int = 0, **fields: object) -> SampleRow:
    return SampleRow(SamplingParams(**fields), output_index)  # type: ignore[arg-type]


def reference(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [
        coupled_token(values, row.sampling, row.output_index)
        for values, row in zip(logits.double().tolist(), rows, strict=True)
    ]


def random_rows(rng: random.Random, count: int, vocab_size: int) -> list[SampleRow]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": rng.choice((1, 2, 7, vocab_size - 1, vocab_size, 10**6))},
        {"temperature": 0.7, "top_p": rng.choice((0.05, 0.5, 0.9, 0.999))},
        {"temperature": 1.0, "top_p": 0.8, "top_k": 5},
        {"temperature": 0.01},
        {"temperature": 100.0},
    ]
    return [
        row(rng.getrandbits(16), seed=rng.getrandbits(64), choice=rng.getrandbits(8), **kind)
        for kind in rng.choices(kinds, k=count)
    ]


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 97, 128, 1001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 40.0])
def test_mixed_batches_equal_the_reference(vocab_size: int, spread: float) -> None:
    rng = random.Random(vocab_size * 1000 + int(spread))
    torch.manual_seed(vocab_size)
    logits = torch.randn(30, vocab_size) * spread
    rows = random_rows(rng, 30, vocab_size)
    assert BatchedSampler().sample(logits, rows) == reference(logits, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_coarse_logits_with_many_ties_equal_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(40, 203) * 3).round().to(dtype)
    rows = random_rows(random.Random(4), 40, 203)
    assert BatchedSampler().sample(logits, rows) == reference(logits, rows)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.full((3, 5000), -1.0)
    logits[0, [77, 4000, 4999]] = 3.0
    logits[1, 4999] = 2.0
    assert greedy_tokens(logits) == {0: 77, 1: 4999, 2: 0}


def test_top_k_keeps_ties_with_the_kth() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    rows = [row(i, temperature=1.0, top_k=2, seed=3) for i in range(400)]
    chosen = BatchedSampler().sample(logits.expand(400, -1), rows)
    assert set(chosen) == {0, 1, 2, 3}
    assert chosen == reference(logits.expand(400, -1), rows)


def test_top_p_takes_the_lowest_ids_of_a_tie() -> None:
    logits = torch.zeros(300, 8)
    rows = [row(i, temperature=1.0, top_p=0.5, seed=5) for i in range(300)]
    chosen = BatchedSampler().sample(logits, rows)
    assert set(chosen) == {0, 1, 2, 3}
    assert chosen == reference(logits, rows)


def test_a_nucleus_wider_than_the_first_try() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 6000) * 0.1
    rows = [row(i, temperature=1.0, top_p=0.7, seed=i) for i in range(3)]
    assert BatchedSampler().sample(logits, rows) == reference(logits, rows)


def full_noise_tokens(
    logits: torch.Tensor, temperature: float, keys: list[tuple[int, int, int]]
) -> dict[int, int]:
    """No pruning at all: every id's exact score, lowest id on ties."""
    every_id = torch.arange(logits.shape[1]).expand(logits.shape)
    noise = gumbel(token_words(every_id, make_keys(keys, logits.device)))
    exact = logits.double()
    return greedy_tokens((exact - exact.amax(dim=1, keepdim=True)) / temperature + noise)


@pytest.mark.parametrize("temperature", [0.05, 0.5, 0.8, 1.0, 1.5, 20.0])
@pytest.mark.parametrize("shape", ["flat", "normal", "peaked", "heavy"])
def test_pruning_never_changes_the_result(temperature: float, shape: str) -> None:
    torch.manual_seed(int(temperature * 100))
    scale = {"flat": 0.01, "normal": 1.0, "peaked": 6.0, "heavy": 1.0}[shape]
    logits = torch.randn(150, 2048) * scale
    if shape == "heavy":
        logits = logits.sign() * logits.abs() ** 4
    keys = [(seed * 7919, seed % 3, seed) for seed in range(150)]
    temperatures = torch.full((150, 1), temperature, dtype=torch.float64)
    pruned = coupled_tokens(logits, temperatures, make_keys(keys, logits.device))
    assert pruned == full_noise_tokens(logits, temperature, keys)


def test_a_winner_from_the_far_tail_is_found() -> None:
    """Word 0 gives the largest Gumbel: the least likely id that can win at all does win."""
    torch.manual_seed(3)
    seed, vocab_size = 12, 1 << 16
    keys = [(seed, 0, index) for index in range(16)]
    noise = gumbel(
        token_words(torch.arange(vocab_size).expand(16, -1), make_keys(keys, torch.device("cpu")))
    )
    best = noise.argmax(dim=1)
    logits = torch.full((16, vocab_size), -60.0)
    logits[:, 0] = 0.0
    margin = noise.gather(1, best[:, None])[:, 0] - noise[:, 0]
    logits[torch.arange(16), best] = (1e-3 - margin).float()
    temperatures = torch.ones(16, 1, dtype=torch.float64)
    chosen = coupled_tokens(logits, temperatures, make_keys(keys, logits.device))
    assert [chosen[i] for i in range(16)] == best.tolist()


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    torch.manual_seed(5)
    logits = torch.randn(50, 1500) * 4
    rows = random_rows(random.Random(6), 50, 1500)
    together = BatchedSampler().sample(logits, rows)
    alone = [BatchedSampler().sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(50)]
    assert together == alone


def test_no_rows_no_tokens() -> None:
    assert BatchedSampler().sample(torch.empty(0, 10), []) == []


def test_masked_logits_are_never_chosen() -> None:
    logits = torch.full((200, 12), NEG_INF)
    logits[:, [3, 9]] = torch.tensor([0.0, -8.0])
    rows = [row(i, temperature=2.0, seed=1) for i in range(200)]
    chosen = BatchedSampler().sample(logits, rows)
    assert set(chosen) == {3, 9}
    assert chosen == reference(logits, rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_rows_are_counted_and_hurt_no_other_row(temperature: float) -> None:
    torch.manual_seed(6)
    logits = torch.randn(5, 40)
    rows = [row(i, temperature=temperature, seed=2) for i in range(5)]
    expected = reference(logits, rows)
    logits[1, 7] = float("nan")
    logits[3] = NEG_INF
    sampler = BatchedSampler()
    chosen = sampler.sample(logits, rows)
    assert [chosen[i] for i in (0, 2, 4)] == [expected[i] for i in (0, 2, 4)]
    assert all(0 <= token_id < 40 for token_id in chosen)
    assert chosen[1] != 7
    assert sampler.num_bad_rows >= 1


FILTERS = [{}, {"top_p": 0.5}, {"top_k": 2}, {"top_k": 3, "top_p": 0.9}]
FLOAT32_MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize("draft_top_n", [None, 2])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.0, MIN_TEMPERATURE, 0.8, 100.0])
def test_no_row_whatever_it_holds_raises(
    temperature: float, filters: dict[str, float], draft_top_n: int | None
) -> None:
    """One bad row must not fail the pass of the others."""
    inf, nan = float("inf"), float("nan")
    odd = [
        [1.0, inf, 2.0, -inf],
        [inf, inf, inf, inf],
        [-inf, inf, nan, 0.0],
        [nan, nan, nan, nan],
        [-inf, -inf, -inf, -inf],
        [nan, -inf, 1.0, 2.0],
        [FLOAT32_MAX, -FLOAT32_MAX, FLOAT32_MAX, 0.0],
        [-FLOAT32_MAX, -FLOAT32_MAX, -inf, -FLOAT32_MAX],
    ]
    good = [0.5, 3.0, 2.0, 1.0]
    logits = torch.tensor([*odd, good])
    rows = [row(i, temperature=temperature, seed=4, **filters) for i in range(len(logits))]
    chosen = BatchedSampler(draft_top_n=draft_top_n).sample(logits, rows)
    assert all(0 <= token_id < 4 for token_id in chosen)
    assert chosen[0] == 1
    alone = BatchedSampler(draft_top_n=draft_top_n).sample(logits[-1:], rows[-1:])
    assert chosen[-1:] == alone


@pytest.mark.parametrize("spread", [1.0, 1e30, FLOAT32_MAX])
@pytest.mark.parametrize("filters", FILTERS)
def test_the_coldest_temperature_and_huge_logits_equal_the_reference(
    spread: float, filters: dict[str, float]
) -> None:
    torch.manual_seed(10)
    logits = (torch.rand(20, 70) * 2 - 1) * spread
    sampler = BatchedSampler()
    for temperature in (MIN_TEMPERATURE, 0.8, 100.0):
        rows = [row(i, temperature=temperature, seed=i, **filters) for i in range(20)]
        assert sampler.sample(logits, rows) == reference(logits, rows)
    assert sampler.num_bad_rows == 0


def test_logits_far_from_zero_sample_like_the_same_ones_near_it() -> None:
    """The bounds hold around the peak, wherever it is."""
    torch.manual_seed(11)
    logits = (torch.randn(40, 900) * 4 * 64).round() / 64
    rows = [row(i, temperature=0.8, seed=i) for i in range(40)]
    near = BatchedSampler().sample(logits, rows)
    for offset in (-30000.0, 30000.0):
        assert BatchedSampler().sample(logits + offset, rows) == near


def test_draft_shortcut_is_exact_among_the_top_logits() -> None:
    torch.manual_seed(7)
    logits = torch.randn(60, 3000) * 3
    rows = [row(i, temperature=0.8, seed=i) for i in range(60)]
    drafted = BatchedSampler(draft_top_n=64).sample(logits, rows)
    masked = logits.masked_fill(logits < logits.topk(64).values[:, -1:], NEG_INF)
    assert drafted == reference(masked, rows)
    exact = BatchedSampler().sample(logits, rows)
    assert sum(a == b for a, b in zip(drafted, exact, strict=True)) >= 40


def test_draft_shortcut_wider_than_the_vocabulary_is_exact() -> None:
    torch.manual_seed(8)
    logits = torch.randn(20, 30)
    rows = random_rows(random.Random(9), 20, 30)
    assert BatchedSampler(draft_top_n=64).sample(logits, rows) == reference(logits, rows)


def test_an_empty_shortcut_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_top_n"):
        BatchedSampler(draft_top_n=0)
