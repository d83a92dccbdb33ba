"""Every family that is served, against the library's own dense forward; and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import StepItem
from paceline.engine.loader import load_engine
from paceline.engine.torch_engine import TorchEngine
from paceline.errors import ConfigError
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.unit.engine.conftest import VOCAB_SIZE, write_tokenizer
from tests.unit.engine.families import FAMILIES, dense_logits, save_family

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.8, seed=11, top_p=0.95)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, folder of the target, folder of a draft with other weights)."""
    root = tmp_path_factory.mktemp(request.param)
    target = save_family(request.param, root / "target")
    return request.param, target, save_family(request.param, root / "draft", seed=8)


def load(folder: Path, **overrides: Any) -> TorchEngine:
    fields = {"max_model_len": 256, "block_size": 4, "num_kv_blocks": 128, "device": "cpu"}
    engine = load_engine(ModelConfig(source=str(folder), **{**fields, **overrides}), folder)
    assert isinstance(engine, TorchEngine)
    return engine


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def rows(sequence_id: int, text: list[int], start: int, stop: int) -> StepItem:
    """Rows `start .. stop` of a text, the logits of all of them wanted."""
    return StepItem(sequence_id, start, tuple(text[start:stop]), stop - start, GREEDY)


def test_the_logits_are_the_librarys_own(family: Any) -> None:
    """Prefill in chunks, decode, verify and rewind, ragged, on interleaved blocks."""
    _, folder, _ = family
    engine = load(folder, enable_prefix_caching=False)
    texts = {1: tokens(1, 60), 2: tokens(2, 33), 3: tokens(3, 9), 4: tokens(4, 1)}
    dense = {i: dense_logits(folder, text) for i, text in texts.items()}
    cuts = {1: (0, 13, 37, 38, 43, 60), 2: (0, 5, 6, 20, 21, 33), 3: (0, 1, 2, 3, 4, 9)}
    cuts[4] = (0, 1)
    for sequence_id in texts:
        engine.add(sequence_id)
    for step in range(5):
        items = [
            rows(i, texts[i], ends[step], ends[step + 1])
            for i, ends in cuts.items()
            if step + 1 < len(ends)
        ]
        expected = [dense[i.sequence_id][i.start : i.start + i.num_samples] for i in items]
        torch.testing.assert_close(engine.logits(items), torch.cat(expected), **TOLERANCE)
    # a rejected block of five: rewind to its second token, go on with others
    other = texts[1][:57] + tokens(9, 4)
    engine.logits([StepItem(1, 57, tuple(tokens(8, 5)), 5, GREEDY), rows(2, texts[2], 30, 33)])
    paged = engine.logits([rows(1, other, 57, 61), rows(3, texts[3], 8, 9)])
    expected = [dense_logits(folder, other)[57:], dense[3][8:]]
    torch.testing.assert_close(paged, torch.cat(expected), **TOLERANCE)
    engine.check_integrity()


def test_a_prefix_found_in_the_cache_gives_the_same_logits(family: Any) -> None:
    _, folder, _ = family
    engine, text = load(folder), tokens(1, 41)
    other = text[:26] + tokens(2, 5)
    engine.add(1)
    engine.step([StepItem(1, 0, tuple(text), 1, GREEDY)])
    engine.add(2)
    [result] = engine.step([StepItem(2, 0, tuple(other), 1, GREEDY)])
    assert result.num_prefix_tokens == 24
    paged = engine.logits([rows(2, other, 29, 31)])
    torch.testing.assert_close(paged, dense_logits(folder, other)[29:], **TOLERANCE)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_a_draft_changes_no_token(family: Any, sampling: SamplingParams) -> None:
    _, folder, other = family
    speculation = SpeculationConfig(num_speculative_tokens=4)
    requests = [
        GenerateRequest(f"r{i}", tuple(tokens(i, 5 + 17 * i)), 11, sampling, ignore_eos=True)
        for i in range(2)
    ]

    def run(draft: Path | None) -> Any:
        engine = None if draft is None else load(draft)
        return Loopback(load(folder), engine, speculation).run(requests)

    alone, perfect, wrong = run(None), run(folder), run(other)
    texts = [run.token_ids for run in alone]
    assert [run.token_ids for run in perfect] == texts
    assert [run.token_ids for run in wrong] == texts
    accepted = sum(run.num_accepted_tokens for run in perfect)
    assert accepted >= 0.9 * sum(run.num_draft_tokens for run in perfect) > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"layer_types": ["full_attention"] * 3}, "attention soft-capping is not supported"),
    "gpt_oss": ({"num_local_experts": 2, "sliding_window": 8}, "attention sinks"),
    "mamba": ({"state_size": 4}, "mamba: linear_attention is not supported"),
    "recurrent_gemma": ({"lru_width": 32}, "recurrent_gemma: linear_attention is not supported"),
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
        "jamba: linear_attention is not supported",
    ),
    "gemma3n_text": (
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 32,
            "hidden_size_per_layer_input": 8,
        },
        "layers that share a cache",
    ),
    "llama4_text": ({"num_local_experts": 2}, "chunked_attention is not supported"),
}


@pytest.mark.parametrize("model_type", list(REFUSED))
def test_what_would_be_computed_wrongly_is_refused(model_type: str, tmp_path: Path) -> None:
    own, sentence = REFUSED[model_type]
    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(model_type, **{**shape, **own})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 32)
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path)


def test_absolute_positions_end_where_the_table_ends(tmp_path: Path) -> None:
    folder = save_family("gpt2", tmp_path, n_positions=64)
    with pytest.raises(ConfigError, match="set max_model_len to at most 64"):
        load(folder, max_model_len=65)
    text = tokens(1, 64)
    engine = load(folder, max_model_len=64)
    engine.add(1)
    paged = engine.logits([rows(1, text, 0, 64)])
    torch.testing.assert_close(paged, dense_logits(folder, text), **TOLERANCE)
