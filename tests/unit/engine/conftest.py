"""Tiny random models, saved as safetensors folders once per session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)

VOCAB_SIZE = 101

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    # head_dim is not hidden_size / heads here
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 12, "num_key_value_heads": 1}),
}


def write_tokenizer(folder: Path, num_ids: int, num_added: int = 0) -> None:
    """Only what a loader reads of it: token -> id, the last `num_added` as added tokens."""
    ids = {f"t{token_id}": token_id for token_id in range(num_ids - num_added)}
    added = [{"content": f"<{i}>", "id": i} for i in range(num_ids - num_added, num_ids)]
    data = {"model": {"vocab": ids}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")


def save_tiny(family: str, folder: Path, **overrides: Any) -> Path:
    """A random model of a family, with the tokenizer file that a served folder must have."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(7)
    model_class(config_class(**{**SHAPE, **own, **overrides})).save_pretrained(folder)
    write_tokenizer(folder, overrides.get("vocab_size", VOCAB_SIZE))
    return folder


@pytest.fixture(scope="session", params=list(FAMILIES))
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))
