"""Tiny random models of the families that are served, and the library's own answers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.engine.conftest import VOCAB_SIZE, write_tokenizer

WINDOW = 8  # smaller than the texts of the tests

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "num_key_value_heads": 1},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "phi3": {"model_type": "phi3"},
    "phi3-window": {"model_type": "phi3", "sliding_window": WINDOW},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_experts": 4, "head_dim": 8, **_MOE},
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "granite": {"model_type": "granite", "attention_multiplier": 0.2, "logits_scaling": 2.0},
}
_NOT_GPT2 = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
_NOT_GPT2 |= {"num_key_value_heads", "max_position_embeddings"}


def save_family(name: str, folder: Path, *, seed: int = 7, **overrides: Any) -> Path:
    """A random model of a family as a served folder; other seeds give other weights."""
    own = {**_LLAMA_LIKE, **FAMILIES[name], **overrides}
    if own["model_type"] == "gpt2":  # other names for the same
        own = {key: value for key, value in own.items() if key not in _NOT_GPT2}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**own))
    model.save_pretrained(folder)
    write_tokenizer(folder, own["vocab_size"])
    return folder


def dense_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """[len(token_ids), vocab_size], by the library's own attention and masks."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
