"""A tiny Llama that mostly counts, and Medusa heads that count on: right often, but not always.

Id i is a point on 16 circles (its angle on circle k is k * i steps), so that "one id further" is a
rotation of the hidden state: a square map, which the small form of heads can hold exactly.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.engine.conftest import SHAPE, VOCAB_SIZE, write_tokenizer
from tests.unit.engine.medusa_heads import HIDDEN_SIZE

NUM_CIRCLES = HIDDEN_SIZE // 2
FORMS = ["published", "small", "bare"]


def circles(ids: torch.Tensor) -> torch.Tensor:
    """[len(ids), HIDDEN_SIZE]"""
    angles = torch.outer(ids.double(), torch.arange(1, NUM_CIRCLES + 1)) * math.tau / VOCAB_SIZE
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def rotation(steps: int) -> torch.Tensor:
    """[HIDDEN_SIZE, HIDDEN_SIZE]: the point of id i to that of id i + steps."""
    angles = torch.arange(1, NUM_CIRCLES + 1).double() * steps * math.tau / VOCAB_SIZE
    cos, sin = angles.cos().diag(), angles.sin().diag()
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)]).float()


def save_counting(folder: Path, noise: float = 0.15, **config: Any) -> Path:
    """After id i comes i + 1, unless what attention adds (`noise`) says otherwise."""
    torch.manual_seed(3)
    fields = {**SHAPE, "initializer_range": noise, "eos_token_id": None, **config}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    ids = torch.arange(VOCAB_SIZE)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(circles(ids))
        model.get_output_embeddings().weight.copy_(circles(ids - 1) / 3)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
    return folder


def counting_heads(form: str, num_heads: int = 3) -> dict[str, torch.Tensor]:
    """`published`: with output layers. `small`: with maps, and every fifth id left out. `bare`:
    they guess what the target's own output layer says, which is wrong in a text that counts."""
    tensors: dict[str, torch.Tensor] = {}
    ids = torch.arange(VOCAB_SIZE)
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN_SIZE)
        if form == "published":
            tensors[f"{head}.1.weight"] = circles(ids - 2 - head) / 3
        if form == "small":
            tensors[f"{head}.map.weight"] = rotation(head + 1)
    if form == "small":
        tensors["draft_vocab"] = ids[ids % 5 != 0].int()
    return tensors
