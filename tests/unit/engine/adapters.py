"""LoRA folders as PEFT writes them, for models made in tests."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "v_proj")


@contextmanager
def peft_quiet() -> Iterator[None]:
    """PEFT uses what this transformers will drop, and warns about tied layers and empty matches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@peft_quiet()
def save_adapter(base: Path, folder: Path, *, seed: int, **fields: Any) -> Path:
    """An adapter of `base` with random weights that change what the model says."""
    given = {"target_modules": list(ATTENTION), "r": 4, "lora_alpha": 8, **fields}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **given))
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_" in name:
                weight.normal_(0.0, 0.3)
    tuned.save_pretrained(folder, save_embedding_layers=False)
    return folder


@peft_quiet()
def peft_logits(base: Path, folder: Path, text: tuple[int, ...]) -> torch.Tensor:
    """[len(text), vocab_size], by PEFT itself."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0]
    return logits


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**data, **changes}), encoding="utf-8")


def edit_weights(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Keys with another tensor; None takes a key away."""
    path = folder / "adapter_model.safetensors"
    tensors = {**(load_file(path) if path.is_file() else {}), **changes}
    save_file({k: t.contiguous() for k, t in tensors.items() if t is not None}, path)
