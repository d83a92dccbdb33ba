"""Makes model folders that the engine can load: from a GGUF file, by leaving layers out, or from
a target and the few tensors in which a distilled draft differs from it.

Knows file formats and tensor names; runs no model, and downloads nothing.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from paceline.engine.draft_head import DRAFT_VOCAB
from paceline.engine.packed import unpack
from paceline.errors import ConfigError
from paceline.models import ASSET_DESCRIPTION, MANIFEST

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_WEIGHTS = "model.safetensors"
DRAFT_LAYERS = "layers.safetensors"  # of an asset
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# llama.cpp's name for "every digit is a token of its own, then GPT-2's rules".
_DIGITS_PRE_TOKENIZER = "smollm"


def convert_gguf(gguf: Path, out: Path, *, dtype: Literal["float32", "bfloat16"]) -> Path:
    """Write the model, tokenizer and generation config of a GGUF file to the folder `out`.

    Weights are dequantized; float32 holds a 4-bit file's numbers exactly, bfloat16 rounds them.
    Returns `out`; `ConfigError` when the file holds something else than one whole causal LM.
    """
    if not gguf.is_file():
        raise ConfigError(f"{gguf} does not exist")
    transformers_logging.disable_progress_bar()
    hf_model = load_gguf_model(gguf, getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if _pre_tokenizer_name(gguf) == _DIGITS_PRE_TOKENIZER:
        # transformers drops this; it matters for spaces and signs in front of digits.
        tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizers(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = hf_model.config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    hf_model.save_pretrained(out)
    return out


def prune_layers(folder: Path, keep: Sequence[int], out: Path) -> Path:
    """Write to `out` the model of `folder` with only the layers `keep`, in that order.

    For Llama-like models (weights named `model.layers.N.*`). Everything else, tied embeddings
    and tokenizer included, is taken over as it is. Returns `out`.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    num_layers = config.get("num_hidden_layers", 0)
    if not keep or len(set(keep)) != len(keep) or not set(keep) <= set(range(num_layers)):
        raise ConfigError(f"layers to keep must be distinct and in [0, {num_layers}): {list(keep)}")
    new_index = {old: new for new, old in enumerate(keep)}
    kept: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            renamed = _renumber(name, new_index)
            if renamed is not None:
                kept[renamed] = tensor
    if sum(_LAYER.match(name) is not None for name in kept) < len(keep):
        raise ConfigError(f"{folder} has no weights named model.layers.N.*: cannot be pruned")
    out.mkdir(parents=True, exist_ok=True)
    save_file(kept, out / _WEIGHTS, metadata={"format": "pt"})
    config["num_hidden_layers"] = len(keep)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][old] for old in keep]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _copy_companions(folder, out)
    return out


def compose_draft(target_folder: Path, asset_folder: Path, out: Path) -> Path:
    """Write to `out` the draft whose asset `paceline distill` made for the model of the folder.

    The asset has layers, final norm and maps (`layers.safetensors`) and what else differs from
    the target's config (`draft.json`). Returns `out`.
    """
    description = json.loads((asset_folder / ASSET_DESCRIPTION).read_text(encoding="utf-8"))
    tensors = unpack(load_file(asset_folder / DRAFT_LAYERS))
    changes = description.get("config") or {"num_hidden_layers": description["num_hidden_layers"]}
    return write_draft(target_folder, tensors, changes, out)


def write_draft(
    target_folder: Path, tensors: Mapping[str, torch.Tensor], changes: dict[str, Any], out: Path
) -> Path:
    """Write to `out` a draft of the folder's model: an ordinary model folder. Returns `out`.

    `tensors`: layers, final norm, `head_map` [target's hidden, draft's hidden], and optionally
    `embed_map` [draft's, target's] and `draft_vocab` [ids]. The output layer is the target's times
    `head_map`, the embeddings are the target's (times `embed_map`), so that neither map costs
    anything at run time. `changes`: what the config has otherwise than the target's.
    """
    tensors = dict(tensors)
    target = load_tensors(target_folder, {_EMBEDDINGS, _HEAD})
    embeddings = target.get(_EMBEDDINGS)
    head_map, embed_map = tensors.pop("head_map"), tensors.pop("embed_map", None)
    token_ids = tensors.pop("draft_vocab", None)
    if embeddings is None or embeddings.shape[1] != head_map.shape[0]:
        raise ConfigError(f"the draft was not made for the model {target_folder}")
    composed = {name: tensor.to(embeddings.dtype) for name, tensor in tensors.items()}
    head = target.get(_HEAD, embeddings).float() @ head_map.float()
    composed[_HEAD] = head.to(embeddings.dtype)
    composed[_EMBEDDINGS] = embeddings
    if embed_map is not None:
        composed[_EMBEDDINGS] = (embeddings.float() @ embed_map.float().T).to(embeddings.dtype)
    config = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    config |= {**changes, "tie_word_embeddings": False}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    out.mkdir(parents=True, exist_ok=True)
    save_file(composed, out / _WEIGHTS, metadata={"format": "pt"})
    (out / _WEIGHTS).chmod(0o644)  # safetensors keeps files to their owner
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / DRAFT_VOCAB).unlink(missing_ok=True)
    if token_ids is not None:
        (out / DRAFT_VOCAB).write_text(json.dumps(token_ids.tolist()) + "\n", encoding="utf-8")
    _copy_companions(target_folder, out)
    return out


def load_tensors(folder: Path, names: set[str]) -> dict[str, torch.Tensor]:
    """Those of the names that the folder's safetensors have."""
    found: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in names & set(file.keys())}
    return found


def load_gguf_model(gguf: Path, dtype: torch.dtype) -> Any:
    """Dense weights. Not `from_pretrained(gguf_file=...)`, which fills them with noise first."""
    try:
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        hf_model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        checkpoint = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=hf_model)
    except ValueError as error:
        raise ConfigError(f"{gguf} cannot be converted: {error}") from error
    missing, unexpected = hf_model.load_state_dict(checkpoint["tensors"], strict=False)
    hf_model.tie_weights()
    tied = set(hf_model.all_tied_weights_keys)
    if unexpected or set(missing) - tied:
        raise ConfigError(f"{gguf}: tensors {sorted(set(missing) - tied) + unexpected} do not fit")
    return hf_model


def _pre_tokenizer_name(gguf: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field else ""


def _renumber(name: str, new_index: dict[int, int]) -> str | None:
    match = _LAYER.match(name)
    if match is None:
        return name
    new = new_index.get(int(match.group(1)))
    return None if new is None else f"model.layers.{new}.{name[match.end() :]}"


def _copy_companions(folder: Path, out: Path) -> None:
    """Tokenizer, chat template and generation config; never weights."""
    for path in sorted(folder.iterdir()):
        is_companion = path.suffix in (".json", ".jinja", ".txt") or path.name.startswith("LICENSE")
        is_index = path.name.endswith(".index.json")
        is_own = is_index or path.name == MANIFEST
        if is_companion and not is_own and not (out / path.name).exists():
            shutil.copyfile(path, out / path.name)
