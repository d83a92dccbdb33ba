"""Loads a local safetensors folder into a `TorchEngine`, or says why it cannot be served.

Knows the Hugging Face folder format; downloads nothing, trusts no code and no pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from paceline.config import ModelConfig
from paceline.engine.base import EngineInfo
from paceline.engine.draft_head import cut_head
from paceline.engine.packed_linear import pack_linears
from paceline.engine.paged_attention import ATTENTION_NAME, ShapeProbe
from paceline.engine.runner import ModelRunner
from paceline.engine.torch_engine import TorchEngine
from paceline.errors import ConfigError
from paceline.models import tokenizer_hash


def load_torch_engine(
    model: ModelConfig, folder: Path, *, draft_top_n: int | None = None
) -> TorchEngine:
    """An engine with the weights of `folder`; `ConfigError` if they cannot be served.

    Sets torch's intra-op threads for the whole process, as `model.num_threads` says.
    """
    torch.set_num_threads(model.num_threads)
    hf_config = load_hf_config(folder)
    check_servable(hf_config, model)
    hf_model = load_hf_model(folder, getattr(torch, model.dtype), pick_device(model.device))
    cut_head(hf_model, folder)
    pack_linears(hf_model)
    probe, vocab_size = probe_model(hf_model)
    info = EngineInfo(
        model_id=model.source,
        vocab_size=vocab_size,
        max_model_len=model.max_model_len,
        block_size=model.block_size,
        num_blocks=model.num_kv_blocks,
        tokenizer_hash=tokenizer_hash(folder),
        eos_token_ids=eos_token_ids(folder, hf_config),
    )
    runner = ModelRunner(hf_model, probe, info.num_blocks, info.block_size)
    return TorchEngine(runner, info, draft_top_n=draft_top_n)


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device if there is one; anything else is torch's own name."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device {name!r} is not a torch device: {error}") from error


def load_hf_config(folder: Path) -> Any:
    """The folder's model config; `ConfigError` if there is none that we can read."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: not a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} has no .safetensors file; other weight formats are not read")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot read {folder}/config.json: {error}") from error


def check_servable(hf_config: Any, model: ModelConfig) -> None:
    """Refuse what would be computed wrongly: windowed layers, positions beyond the model's."""
    text = hf_config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        raise ConfigError(f"{hf_config.model_type}: {', '.join(sorted(kinds))} is not supported")
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise ConfigError(f"{hf_config.model_type}: attention soft-capping is not supported")
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        # Beyond this length these change the rotation of *all* positions, cached ones included.
        limit = rope.get("original_max_position_embeddings") or limit
    if limit is not None and model.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {model.max_model_len} exceeds the model's {limit} positions; "
            f"set max_model_len to at most {limit}"
        )


def load_hf_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on its device, in eval mode, attending through our function."""
    transformers_logging.disable_progress_bar()
    try:
        hf_model, loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load {folder}: {error}") from error
    # transformers fills absent weights with random numbers and only logs it.
    if loading["missing_keys"] or loading["mismatched_keys"]:
        wrong = sorted(str(key) for key in [*loading["missing_keys"], *loading["mismatched_keys"]])
        raise ConfigError(f"{folder} lacks weights that its config.json asks for: {wrong[0]}, ...")
    if not hf_model._supports_attention_backend:
        raise ConfigError(
            f"{type(hf_model).__name__} does not route attention through the attention interface"
        )
    return hf_model.to(device).eval()


def probe_model(hf_model: Any) -> tuple[ShapeProbe, int]:
    """One row through the model: how its layers call attention, and how wide its logits are.

    Every layer has to call our function exactly once, else it keeps state that we cannot rewind
    (a recurrent or hybrid model) or shares another layer's cache.
    """
    probe = ShapeProbe()
    row = torch.zeros(1, 1, dtype=torch.int64, device=hf_model.device)
    try:
        with torch.inference_mode():
            output = hf_model(
                input_ids=row,
                position_ids=row,
                use_cache=False,
                logits_to_keep=row[0],
                paged=probe,
            )
    except TypeError as error:
        raise ConfigError(f"{type(hf_model).__name__} cannot be served: {error}") from error
    num_layers = hf_model.config.get_text_config(decoder=True).num_hidden_layers
    if probe.num_calls != num_layers or set(probe.shapes) != set(range(num_layers)):
        raise ConfigError(
            f"{type(hf_model).__name__}: only {len(probe.shapes)} of {num_layers} layers "
            "are plain attention layers"
        )
    return probe, output.logits.shape[-1]


def eos_token_ids(folder: Path, hf_config: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's if it has any, else the model config's."""
    eos = None
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if eos is None:
        eos = getattr(hf_config.get_text_config(decoder=True), "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
