"""The torch engine with a prefix cache gives what it gives without: logits, tokens, errors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig
from paceline.engine.base import OutOfBlocks, StepItem
from paceline.engine.loader import load_engine
from paceline.engine.torch_engine import TorchEngine
from paceline.sampling.params import SamplingParams
from tests.unit.engine.conftest import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.8, seed=11)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def load(folder: Path, **overrides: Any) -> TorchEngine:
    fields = {"max_model_len": 512, "block_size": 4, "num_kv_blocks": 256, "device": "cpu"}
    engine = load_engine(ModelConfig(source=str(folder), **{**fields, **overrides}), folder)
    assert isinstance(engine, TorchEngine)
    return engine


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=length))


def begin(engine: TorchEngine, sequence_id: int, token_ids: tuple[int, ...]) -> int:
    """A prompt whose last row is sampled; how much of it the prefix cache held."""
    engine.add(sequence_id)
    [result] = engine.step([StepItem(sequence_id, 0, token_ids, 1, GREEDY)])
    assert result.cached_len == engine.cached_len(sequence_id) == len(token_ids)
    return result.num_prefix_tokens


def fresh_logits(folder: Path, token_ids: tuple[int, ...], num_rows: int = 1) -> torch.Tensor:
    """The last rows' logits, computed from the first token on."""
    engine = load(folder, enable_prefix_caching=False)
    engine.add(1)
    return engine.logits([StepItem(1, 0, token_ids, num_rows, GREEDY)])


def generate(
    engine: TorchEngine, sequence_id: int, prompt: tuple[int, ...], sampling: SamplingParams
) -> tuple[list[int], int]:
    """(12 tokens, how many of the prompt were found)"""
    engine.add(sequence_id)
    text, start, num_found = list(prompt), 0, 0
    for index in range(12):
        item = StepItem(sequence_id, start, tuple(text[start:]), 1, sampling, index)
        [result] = engine.step([item])
        num_found += result.num_prefix_tokens
        start = len(text)
        text += result.token_ids
    return text[len(prompt) :], num_found


def test_a_hit_gives_the_logits_of_a_miss(model_folder: Path) -> None:
    engine, prompt = load(model_folder), tokens(1, 39)
    assert begin(engine, 1, prompt) == 0
    engine.add(2)
    other = (*prompt[:30], *tokens(2, 6))
    hit = engine.logits([StepItem(2, 0, other, 6, GREEDY)])
    assert engine.stats().num_prefix_tokens == 28
    torch.testing.assert_close(hit, fresh_logits(model_folder, other, 6), **CLOSE)
    engine.check_integrity()


def test_sampled_rows_are_computed_however_well_the_text_is_known(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder), tokens(1, 24)
    begin(engine, 1, (*prompt, 5))
    engine.add(2)
    [result] = engine.step([StepItem(2, 0, prompt, 6, COUPLED)])
    assert (result.num_prefix_tokens, len(result.token_ids)) == (16, 6)
    [expected] = load_and_step(llama_folder, StepItem(2, 0, prompt, 6, COUPLED))
    assert result.token_ids == expected


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_hit_gives_the_tokens_of_a_miss(llama_folder: Path, sampling: SamplingParams) -> None:
    engine, plain = load(llama_folder), load(llama_folder, enable_prefix_caching=False)
    prompt = tokens(3, 25)
    expected, num_found = generate(plain, 1, prompt, sampling)
    assert num_found == 0
    assert generate(engine, 1, prompt, sampling) == (expected, 0)
    assert generate(engine, 2, prompt, sampling) == (expected, 24)
    engine.free(1)
    engine.free(2)
    # the text of a conversation goes on: its answer is found as well
    longer = (*prompt, *expected[:11], 5, 6)
    later, num_found = generate(engine, 3, longer, sampling)
    assert num_found == 36
    assert later == generate(plain, 3, longer, sampling)[0]
    engine.check_integrity()


def test_only_rows_that_are_not_found_are_computed(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder), tokens(4, 24)
    begin(engine, 1, prompt)
    assert begin(engine, 2, prompt) == 20
    stats = engine.stats()
    assert (stats.num_rows, stats.num_prefix_tokens, stats.num_prefix_queries) == (28, 20, 48)
    # without a sample the whole prompt is found, and there is nothing to run
    engine.add(3)
    [result] = engine.step([StepItem(3, 0, prompt, 0, GREEDY)])
    assert (result.cached_len, result.num_prefix_tokens) == (24, 24)
    assert engine.stats().num_rows == 28
    hit = engine.logits([StepItem(3, 24, (9,), 1, GREEDY)])
    torch.testing.assert_close(hit, fresh_logits(llama_folder, (*prompt, 9)), **CLOSE)


def test_found_whole_and_computed_sequences_share_a_pass(llama_folder: Path) -> None:
    engine, prompt, other = load(llama_folder), tokens(4, 24), tokens(5, 7)
    begin(engine, 1, prompt)
    for sequence_id in (2, 3, 4):
        engine.add(sequence_id)
    found, new, both = engine.step(
        [
            StepItem(2, 0, prompt, 0, GREEDY),
            StepItem(3, 0, other, 1, GREEDY),
            StepItem(4, 0, (*prompt[:20], *other), 2, COUPLED),
        ]
    )
    assert (found.token_ids, found.num_prefix_tokens) == ((), 24)
    assert new.token_ids == (int(fresh_logits(llama_folder, other).argmax()),)
    assert both.num_prefix_tokens == 20
    alone = load(llama_folder)
    alone.add(4)
    [expected] = alone.step([StepItem(4, 0, (*prompt[:20], *other), 2, COUPLED)])
    assert both.token_ids == expected.token_ids


def test_proposals_of_a_verify_block_are_found_and_their_rewind_is_safe(
    llama_folder: Path,
) -> None:
    """KV depends on tokens alone, so a rejected block is right for whoever has that text."""
    engine, prompt, drafts = load(llama_folder), tokens(6, 10), tokens(7, 7)
    begin(engine, 1, prompt)
    engine.step([StepItem(1, 10, drafts, 7, GREEDY)])
    rejected = (*prompt, *drafts)
    assert begin(engine, 2, (*rejected, 3)) == 16
    # Sequence 1 goes back into a block that sequence 2 now uses, and writes another text.
    engine.step([StepItem(1, 13, tokens(8, 4), 4, GREEDY)])
    engine.check_integrity()
    for sequence_id, text in ((1, (*rejected[:13], *tokens(8, 4))), (2, (*rejected, 3))):
        last = engine.logits([StepItem(sequence_id, len(text) - 1, text[-1:], 1, GREEDY)])
        torch.testing.assert_close(last, fresh_logits(llama_folder, text), **CLOSE)
    assert begin(engine, 3, (*rejected[:13], *tokens(8, 4))) == 16
    assert begin(engine, 4, rejected) == 16


def test_a_rewind_of_a_sole_owner_forgets_the_old_text(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder), tokens(9, 16)
    begin(engine, 1, prompt)
    engine.step([StepItem(1, 6, (90, 91, 92), 1, GREEDY)])
    # the second block is overwritten; those behind it are cached, but nothing leads to them
    assert begin(engine, 2, prompt) == 4
    text = (*prompt[:6], 90, 91, 92)
    assert begin(engine, 3, text) == 8
    last = engine.logits([StepItem(3, 8, text[-1:], 1, GREEDY)])
    torch.testing.assert_close(last, fresh_logits(llama_folder, text), **CLOSE)


def test_a_small_cache_evicts_and_every_text_stays_its_own(llama_folder: Path) -> None:
    engine = load(llama_folder, num_kv_blocks=14)
    plain = load(llama_folder, enable_prefix_caching=False)
    # three families of three prompts, the longer ones beginning with the shorter
    prompts = [tokens(20 + i // 3, 9 + i % 3 * 4) for i in range(9)]
    expected = [generate(plain, i, prompt, COUPLED)[0] for i, prompt in enumerate(prompts)]
    rng, seen = random.Random(5), set[int]()
    num_found = num_findable = 0
    for sequence_id in range(30):
        index = rng.randrange(9)
        text, found = generate(engine, sequence_id, prompts[index], COUPLED)
        assert text == expected[index]
        num_found += found
        num_findable += (len(prompts[index]) - 1) // 4 * 4 if index in seen else 0
        seen.add(index)
        engine.free(sequence_id)
        assert engine.stats().num_free_blocks == 14
    engine.check_integrity()
    assert 100 < num_found < num_findable  # some were evicted


def test_running_sequences_that_share_are_never_evicted(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder, num_kv_blocks=8), tokens(1, 24)
    begin(engine, 1, prompt)
    assert begin(engine, 2, prompt) == 20
    assert engine.stats().num_free_blocks == 1
    engine.add(3)
    with pytest.raises(OutOfBlocks):
        engine.step([StepItem(3, 0, tokens(2, 5), 1, GREEDY)])
    one = engine.logits([StepItem(1, 24, (7,), 1, GREEDY)])
    torch.testing.assert_close(one, fresh_logits(llama_folder, (*prompt, 7)), **CLOSE)
    two = engine.logits([StepItem(2, 23, prompt[-1:], 1, GREEDY)])
    torch.testing.assert_close(two, fresh_logits(llama_folder, prompt), **CLOSE)


def test_a_failed_forward_leaves_nothing_to_find(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder), tokens(1, 21)
    begin(engine, 1, prompt[:9])
    engine.add(2)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for this pass")

    hook = engine._runner._model.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        engine.step([StepItem(2, 0, prompt, 1, GREEDY), StepItem(1, 6, (1, 2, 3, 4), 1, GREEDY)])
    hook.remove()
    assert (engine.cached_len(1), engine.cached_len(2)) == (6, 0)
    engine.check_integrity()
    assert begin(engine, 3, prompt) == 8
    assert begin(engine, 4, (*prompt[:6], 1, 2, 3, 4)) == 4
    for sequence_id, text in ((3, prompt), (4, (*prompt[:6], 1, 2, 3, 4))):
        last = engine.logits([StepItem(sequence_id, len(text) - 1, text[-1:], 1, GREEDY)])
        torch.testing.assert_close(last, fresh_logits(llama_folder, text), **CLOSE)
    assert engine.step([StepItem(2, 0, prompt, 1, GREEDY)])[0].num_prefix_tokens == 20


def test_a_failed_rewind_into_a_shared_block_leaves_both_texts(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder), tokens(1, 14)
    begin(engine, 1, prompt)
    begin(engine, 2, prompt)

    def fail(*_: Any) -> None:
        raise MemoryError("no memory for this pass")

    hook = engine._runner._model.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        engine.step([StepItem(1, 10, (1, 2, 3), 1, GREEDY)])
    hook.remove()
    assert (engine.cached_len(1), engine.cached_len(2)) == (10, 14)
    engine.check_integrity()
    one = engine.logits([StepItem(1, 10, (5,), 1, GREEDY)])
    torch.testing.assert_close(one, fresh_logits(llama_folder, (*prompt[:10], 5)), **CLOSE)
    two = engine.logits([StepItem(2, 14, (5,), 1, GREEDY)])
    torch.testing.assert_close(two, fresh_logits(llama_folder, (*prompt, 5)), **CLOSE)


@pytest.mark.parametrize("max_rows", [1, 3, 4, 9, 100])
def test_a_prompt_in_chunks_of_max_rows_ends_alike(llama_folder: Path, max_rows: int) -> None:
    engine, prompt = load(llama_folder), tokens(1, 30)
    begin(engine, 1, prompt[:13])
    engine.add(2)
    start, num_passes, num_found = 0, 0, 0
    while True:
        item = StepItem(2, start, prompt[start:], 1, COUPLED, max_rows=max_rows)
        [result] = engine.step([item])
        assert result.cached_len is not None
        assert result.cached_len - start - result.num_prefix_tokens <= max_rows
        start, num_passes = result.cached_len, num_passes + 1
        num_found += result.num_prefix_tokens
        if start == len(prompt):
            break
        assert result.token_ids == ()
    assert (num_found, num_passes) == (12, -(-18 // max_rows))
    [expected] = load_and_step(llama_folder, StepItem(2, 0, prompt, 1, COUPLED))
    assert result.token_ids == expected


def load_and_step(folder: Path, item: StepItem) -> list[tuple[int, ...]]:
    engine = load(folder, enable_prefix_caching=False)
    engine.add(item.sequence_id)
    return [result.token_ids for result in engine.step([item])]


def test_caching_can_be_switched_off(llama_folder: Path) -> None:
    engine, prompt = load(llama_folder, enable_prefix_caching=False), tokens(1, 30)
    assert (begin(engine, 1, prompt), begin(engine, 2, prompt)) == (0, 0)
    assert engine.stats().num_rows == 60
