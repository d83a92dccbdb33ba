"""Begins a draft's training where another one's ended: `paceline distill --init DRAFT`.

A draft's folder holds its two maps only folded into the embeddings and the output layer. They are
found again by least squares, which also tells whether the draft was made for this target at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig

from paceline.engine.student import SHAPE_KEYS, Student
from paceline.errors import ConfigError
from paceline.models import sha256_of

MAX_MAP_ERROR = 0.02  # of the layer's norm; rounding to bfloat16 costs some 0.003
_LAYERS, _NORM = "model.layers.", "model.norm."
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def shape_of(draft: Path) -> dict[str, int]:
    """What `Recipe.student_config` has to say for a draft of the same shape."""
    try:
        config = AutoConfig.from_pretrained(draft, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot read the model config in {draft}: {error}") from error
    given = config.to_dict()
    return {key: given[key] for key in SHAPE_KEYS if given.get(key)}


def digest_of(draft: Path) -> str:
    """Of its weights, to know it again; `ConfigError` where there are none."""
    shards = sorted(draft.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"{draft} has no safetensors: --init names a draft's folder or alias")
    return hashlib.sha256("".join(map(sha256_of, shards)).encode()).hexdigest()


@torch.no_grad()
def start_from(student: Student, draft: Path, embeddings: torch.Tensor, head: torch.Tensor) -> None:
    """Copy the draft's layers and norm into the student of its shape, and find its maps again.

    `embeddings`, `head`: the target's [vocab, hidden]. `ConfigError` if the draft is another's.
    """
    tensors = _load(draft)
    layers = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith(_LAYERS)}
    layers |= {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith(_NORM)}
    try:
        student.trunk.load_state_dict(layers)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{draft} does not fit the target's kind of model: {reason}") from error
    mine = tensors.get(_EMBEDDINGS, embeddings)
    student.head_map.weight.copy_(_map_of(head, tensors.get(_HEAD, mine), draft))
    if student.embed_map is not None:
        student.embed_map.weight.copy_(_map_of(embeddings, mine, draft).T)
    elif mine.shape != embeddings.shape or _distance(embeddings, mine) > MAX_MAP_ERROR:
        raise _made_for_another(draft)


def _load(draft: Path) -> Mapping[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    try:
        for shard in sorted(draft.glob("*.safetensors")):
            tensors |= load_file(shard)
    except SafetensorError as error:
        raise ConfigError(f"{draft} cannot be read: {error}") from error
    return tensors


def _map_of(rows: torch.Tensor, mapped: torch.Tensor, draft: Path) -> torch.Tensor:
    """The M with rows [n, in] @ M = mapped [n, out], float64 [in, out] on the CPU."""
    if len(rows) != len(mapped):
        raise _made_for_another(draft)
    rows, mapped = rows.cpu().double(), mapped.double()
    found: torch.Tensor = torch.linalg.lstsq(rows.T @ rows, rows.T @ mapped).solution
    if not _distance(mapped, rows @ found) <= MAX_MAP_ERROR:  # also when it is no number
        raise _made_for_another(draft)
    return found


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    right = right.to(left.device, left.dtype)
    return float((left - right).norm() / left.norm())


def _made_for_another(draft: Path) -> ConfigError:
    return ConfigError(
        f"{draft} was not distilled from this target: its embeddings or output layer are no map "
        "of the target's"
    )
