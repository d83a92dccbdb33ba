"""The paged engine against transformers' own dense forward."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import ModelConfig
from paceline.engine.base import Engine, OutOfBlocks, StepItem
from paceline.engine.loader import load_engine
from paceline.engine.pass_plan import MAX_TILE_ROWS
from paceline.engine.torch_engine import TorchEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.8, seed=11)
VOCAB_SIZE = 101
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def load(folder: Path, **overrides: Any) -> TorchEngine:
    fields = {"max_model_len": 512, "block_size": 4, "num_kv_blocks": 256, "device": "cpu"}
    engine = load_engine(ModelConfig(source=str(folder), **{**fields, **overrides}), folder)
    assert isinstance(engine, TorchEngine)
    return engine


def dense_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size], by the library's own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def fill(engine: Engine, sequence_id: int, token_ids: list[int]) -> None:
    engine.add(sequence_id)
    engine.step([StepItem(sequence_id, 0, tuple(token_ids), 0, GREEDY)])


def test_ragged_pass_equals_separate_dense_forwards(model_folder: Path) -> None:
    engine, lengths = load(model_folder), [7, 1, 150, 7, 30, 9]
    prompts = [tokens(seed, length) for seed, length in enumerate(lengths)]
    items = []
    for sequence_id, prompt in enumerate(prompts):
        engine.add(sequence_id)
        items.append(StepItem(sequence_id, 0, tuple(prompt), len(prompt), GREEDY))
    paged = engine.logits(items)
    dense = torch.cat([dense_logits(model_folder, prompt) for prompt in prompts])
    torch.testing.assert_close(paged, dense, **TOLERANCE)
    engine.check_integrity()


def test_rewind_then_other_tokens_equals_fresh(model_folder: Path) -> None:
    engine, prompt = load(model_folder), tokens(1, 21)
    fill(engine, 1, prompt)
    engine.step([StepItem(1, 21, tuple(tokens(2, 6)), 6, GREEDY)])
    other = tokens(3, 4)
    paged = engine.logits([StepItem(1, 23 - 4, tuple(other), 4, GREEDY)])
    dense = dense_logits(model_folder, prompt[:19] + other)
    torch.testing.assert_close(paged, dense[-4:], **TOLERANCE)
    assert engine.cached_len(1) == 23
    engine.check_integrity()


def test_mixed_pass_equals_separate_passes(model_folder: Path) -> None:
    """Decode, verify, first and second prefill chunks in one pass, on interleaved blocks."""
    prompts = {1: tokens(1, 33), 2: tokens(2, 18), 3: tokens(3, 40), 4: tokens(4, 12)}
    mixed, separate = load(model_folder), load(model_folder)
    for engine in (mixed, separate):
        # token by token in turn, so that no sequence's blocks are consecutive
        for sequence_id in prompts:
            engine.add(sequence_id)
        for step in range(12):
            engine.step([StepItem(i, step, (prompts[i][step],), 0, GREEDY) for i in (1, 2, 3)])
    items = [
        StepItem(1, 12, tuple(prompts[1][12:13]), 1, COUPLED, output_index=5),
        StepItem(2, 9, tuple(prompts[2][9:14]), 5, COUPLED, output_index=3),
        StepItem(3, 12, tuple(prompts[3][12:]), 1, COUPLED),
        StepItem(4, 0, tuple(prompts[4]), 0, COUPLED),
    ]
    together = mixed.step(items)
    assert together == [separate.step([item])[0] for item in items]
    assert [len(result.token_ids) for result in together] == [1, 5, 1, 0]
    for item in items:
        dense = dense_logits(model_folder, prompts[item.sequence_id])
        last = mixed.cached_len(item.sequence_id)
        again = mixed.logits(
            [
                StepItem(
                    item.sequence_id, last - 1, (prompts[item.sequence_id][last - 1],), 1, GREEDY
                )
            ]
        )
        torch.testing.assert_close(again[0], dense[last - 1], **TOLERANCE)
    mixed.check_integrity()


@pytest.mark.parametrize("num_rows", [MAX_TILE_ROWS, MAX_TILE_ROWS + 1, 3 * MAX_TILE_ROWS - 5])
def test_prefill_chunks_longer_than_a_tile(llama_folder: Path, num_rows: int) -> None:
    engine, prompt = load(llama_folder), tokens(5, num_rows + 10)
    fill(engine, 1, prompt[:10])
    num_samples = num_rows - 3
    paged = engine.logits([StepItem(1, 10, tuple(prompt[10:]), num_samples, GREEDY)])
    dense = dense_logits(llama_folder, prompt)
    torch.testing.assert_close(paged, dense[-num_samples:], **TOLERANCE)


def test_a_stranger_with_nan_poisons_nobody(llama_folder: Path) -> None:
    """Padding of a shorter sequence must not read slots that somebody else owned."""
    engine, prompts = load(llama_folder), {1: tokens(1, 20), 2: tokens(2, 9)}
    for layer in engine._runner._kv.values:
        layer.fill_(float("nan"))
    for sequence_id, prompt in prompts.items():
        fill(engine, sequence_id, prompt)
    paged = engine.logits([StepItem(i, len(p), (3,), 1, GREEDY) for i, p in prompts.items()])
    for row, prompt in zip(paged, prompts.values(), strict=True):
        torch.testing.assert_close(row, dense_logits(llama_folder, [*prompt, 3])[-1], **TOLERANCE)


def test_greedy_generation_equals_the_library(model_folder: Path) -> None:
    engine, text = load(model_folder), tokens(9, 8)
    engine.add(1)
    start = 0
    for _ in range(20):
        [result] = engine.step([StepItem(1, start, tuple(text[start:]), 1, GREEDY)])
        start = len(text)
        text.append(result.token_ids[0])
    dense = dense_logits(model_folder, text)
    assert text[8:] == dense.argmax(dim=1).tolist()[7:-1]


def test_a_seeded_sequence_does_not_depend_on_its_batch_mates(llama_folder: Path) -> None:
    def generate(num_mates: int) -> list[int]:
        engine, text = load(llama_folder), tokens(1, 5)
        for mate in range(num_mates):
            fill(engine, 100 + mate, tokens(50 + mate, 3 + mate))
        engine.add(1)
        start = 0
        for index in range(24):
            mates = [StepItem(100 + m, 3 + m, (index,), 1, GREEDY) for m in range(num_mates)]
            item = StepItem(1, start, tuple(text[start:]), 1, COUPLED, output_index=index)
            start = len(text)
            text.append(engine.step([*mates, item])[-1].token_ids[0])
        return text

    assert generate(0) == generate(3)


def test_out_of_blocks_leaves_everything_unchanged(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder, num_kv_blocks=8), tokens(1, 20)
    fill(engine, 1, prompt)
    engine.add(2)
    before = engine.stats()
    with pytest.raises(OutOfBlocks):
        engine.step(
            [StepItem(1, 3, (5,), 1, GREEDY), StepItem(2, 0, tuple(tokens(2, 29)), 1, GREEDY)]
        )
    assert engine.stats() == before
    assert (engine.cached_len(1), engine.cached_len(2)) == (20, 0)
    paged = engine.logits([StepItem(1, 20, (5,), 1, GREEDY)])
    torch.testing.assert_close(paged[0], dense_logits(llama_folder, [*prompt, 5])[-1], **TOLERANCE)


def test_ids_are_checked_before_the_model_sees_them(llama_folder: Path) -> None:
    engine = load(llama_folder)
    engine.add(1)
    with pytest.raises(LocalProtocolError, match=r"outside \[0, 101\)"):
        engine.step([StepItem(1, 0, (1, VOCAB_SIZE), 1, GREEDY)])
    assert engine.step([]) == []
    assert engine.stats().num_passes == 0


def test_a_failed_forward_gives_the_rows_back(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder), tokens(1, 10)
    fill(engine, 1, prompt)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for this pass")

    hook = engine._runner._model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        engine.step([StepItem(1, 8, (1, 2, 3, 4, 5), 1, GREEDY)])
    hook.remove()
    assert engine.cached_len(1) == 8
    engine.check_integrity()
    paged = engine.logits([StepItem(1, 8, tuple(prompt[8:]), 1, GREEDY)])
    torch.testing.assert_close(paged[0], dense_logits(llama_folder, prompt)[-1], **TOLERANCE)


def test_stats_name_time_and_bad_rows(llama_folder: Path) -> None:
    engine = load(llama_folder)
    fill(engine, 1, tokens(1, 4))
    stats = engine.stats()
    assert (stats.num_passes, stats.num_rows, stats.num_sequences) == (1, 4, 1)
    assert set(stats.extra) == {"forward_s", "sample_s", "num_bad_rows"}
    assert stats.extra["num_bad_rows"] == 0
