"""Medusa heads with known weights, as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from paceline.engine.medusa import MedusaHeads, read_heads

HIDDEN_SIZE = 32


def output_layer(base: Path) -> torch.Tensor:
    """[vocab_size, hidden_size] of the model in a folder."""
    model = AutoModelForCausalLM.from_pretrained(base)
    weight: torch.Tensor = model.get_output_embeddings().weight.detach()
    return weight


def rolled_heads(base: Path, num_heads: int = 3, num_layers: int = 1) -> dict[str, torch.Tensor]:
    """Published layout. Its ResBlocks change nothing, and head h's logit of id i + h + 1 is the
    target's own of id i: what it names can be said without computing anything."""
    weight = output_layer(base)
    size = weight.shape[1]
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.zeros(size, size)
            tensors[f"{head}.{layer}.linear.bias"] = torch.zeros(size)
        tensors[f"{head}.{num_layers}.weight"] = weight.roll(head + 1, 0)
    return tensors


def random_heads(num_heads: int, num_layers: int, vocab: list[int]) -> dict[str, torch.Tensor]:
    """Small form, with weights that matter."""
    generator = torch.Generator().manual_seed(5)
    tensors = {"draft_vocab": torch.tensor(vocab, dtype=torch.int32)}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            tensors[f"{name}.weight"] = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator)
            tensors[f"{name}.bias"] = torch.randn(HIDDEN_SIZE, generator=generator)
        tensors[f"{head}.map.weight"] = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator)
    return tensors


def load_medusa(hf_model: Any, folder: Path) -> MedusaHeads:
    """For a model that is whole in this process."""
    return MedusaHeads(read_heads(hf_model, folder), hf_model.get_output_embeddings())


def save_config(folder: Path, tensors: Any, **config: Any) -> Path:
    """`config.json` for these tensors; `config` replaces or, with None, takes out fields."""
    names = [name for name in tensors if isinstance(name, str)] if isinstance(tensors, dict) else []
    heads = {name.split(".")[0] for name in names} - {"draft_vocab", "medusa_head"}
    fields = {
        "medusa_num_heads": len(heads),
        "medusa_num_layers": 1,
        "base_model_name_or_path": "tiny",
        "transformers_version": "4.31.0",
        **config,
    }
    if "draft_vocab" in names:
        fields.setdefault("medusa_draft_vocab_size", len(tensors["draft_vocab"]))
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def save_heads(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """As `medusa_lm_head.safetensors`."""
    save_file(tensors, save_config(folder, tensors, **config) / "medusa_lm_head.safetensors")
    return folder


def save_pickled(folder: Path, tensors: Any, **config: Any) -> Path:
    """As `medusa_lm_head.pt` alone, whatever the tensors are."""
    (save_config(folder, tensors, **config) / "medusa_lm_head.safetensors").unlink(missing_ok=True)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder
