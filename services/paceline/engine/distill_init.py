"""Begins a draft's training where another one's ended: `paceline distill --init DRAFT`.

A draft's folder holds its two maps only folded into the embeddings and the output layer. They are
found again by least squares, which also tells whether the draft was made for this target at all.
All of that is checked before the first chat is made (`check_init`), and done later (`start_from`).
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from paceline import models
from paceline.engine.convert import DRAFT_LAYERS, load_tensors
from paceline.engine.draft_head import DRAFT_VOCAB, read_draft_vocab
from paceline.engine.medusa_source import HEAD_FILES
from paceline.engine.model_config import read_model_config
from paceline.engine.student import SHAPE_KEYS, Recipe, Student, draft_config
from paceline.errors import ConfigError

MAX_MAP_ERROR = 0.02  # of the layer's norm; rounding to bfloat16 costs some 0.003
_LAYERS, _NORM = "model.layers.", "model.norm."
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ROWS_AT_ONCE = 4096
# Beside the shape: what decides what the weights compute. The next draft has the target's.
_FORWARD_KEYS = (
    *("model_type", "hidden_act", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
    *("attention_bias", "mlp_bias", "sliding_window", "use_sliding_window"),
    "quantization_config",
)


def find_draft(source: str) -> Path:
    """The folder of an --init; `ConfigError` for what is no whole draft, before `models.resolve`
    asks for a model's parts."""
    folder = Path(os.path.expanduser(source))
    if not source:
        raise ConfigError("--init '' names no draft: give a draft's folder or alias")
    if folder.is_dir():
        _check_kind(folder)
    return models.resolve(source)


def complete_recipe(
    recipe: Recipe, config: Mapping[str, Any], draft: Path, *, own_vocab: bool
) -> Recipe:
    """The recipe in the draft's shape, with its vocabulary or the recipe's; the config is the
    target's. `ConfigError` where the draft's config or vocabulary does not fit it."""
    _check_kind(draft)
    given = read_model_config(draft).to_dict()
    vocab = recipe.vocab
    if own_vocab:
        ids = read_draft_vocab(draft) or ()
        if ids and ids[-1] >= config["vocab_size"]:
            raise ConfigError(
                f"{draft / DRAFT_VOCAB} has the token {ids[-1]}: the target has "
                f"{config['vocab_size']}"
            )
        vocab = len(ids)
    shape = {key: given[key] for key in SHAPE_KEYS if given.get(key)}
    recipe = replace(recipe, student_config=shape, vocab=vocab, init=_digest_of(draft))
    try:
        changes = draft_config(config, recipe)
    except ConfigError as error:
        raise ConfigError(f"--init {draft}: {error}") from error
    for key in (*_FORWARD_KEYS, "layer_types"):
        wanted = changes.get(key) if key == "layer_types" else config.get(key)
        if given.get(key) != wanted:
            raise ConfigError(
                f"{draft} does not fit the target's kind of model: its {key} is "
                f"{_short(given.get(key))}, not {_short(wanted)}"
            )
    return recipe


def _check_kind(draft: Path) -> None:
    if any((draft / name).exists() for name in HEAD_FILES):
        raise ConfigError(f"{draft} holds Medusa heads: --init names a draft's folder or alias")
    is_small = (draft / DRAFT_LAYERS).exists() or (draft / models.ASSET_DESCRIPTION).exists()
    if is_small and not (draft / "config.json").exists():
        raise ConfigError(
            f"{draft} is the small form of a draft: --init needs the whole one, the folder of "
            "--out or an alias such as smollm2-135m-draft"
        )


def _digest_of(draft: Path) -> str:
    """Of its weights, to know it again; `ConfigError` where there are none."""
    shards = sorted(draft.glob("*.safetensors"))
    if not shards:
        raise ConfigError(f"{draft} has no safetensors: --init names a draft's folder or alias")
    return hashlib.sha256("".join(map(models.sha256_of, shards)).encode()).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# --------------------------------------------------------------------------------------- tensors


@torch.no_grad()
def check_init(draft: Path, target: Path, recipe: Recipe) -> None:
    """`ConfigError` unless the draft's tensors are those of the recipe's shape, and its embeddings
    and output layer maps of the target's. Reads two matrices of the target's."""
    tensors = _load(draft)
    _check_shapes(tensors, draft, target, recipe)
    known = load_tensors(target, {_EMBEDDINGS, _HEAD})
    if _EMBEDDINGS not in known:
        raise ConfigError(f"{target} has no {_EMBEDDINGS}: no draft could be composed for it")
    _maps(tensors, draft, known[_EMBEDDINGS], known.get(_HEAD, known[_EMBEDDINGS]))


@torch.no_grad()
def start_from(student: Student, draft: Path, embeddings: torch.Tensor, head: torch.Tensor) -> None:
    """Copy the draft's layers and norm into the student of its shape, and find its maps again.

    `embeddings`, `head`: the target's [vocab, hidden]. `ConfigError` if the draft is another's.
    """
    tensors = _load(draft)
    layers = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith(_LAYERS)}
    layers |= {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith(_NORM)}
    student.trunk.load_state_dict(layers)
    head_map, embed_map = _maps(tensors, draft, embeddings, head)
    student.head_map.weight.copy_(head_map)
    if student.embed_map is not None and embed_map is not None:
        student.embed_map.weight.copy_(embed_map.T)


def _load(draft: Path) -> Mapping[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    try:
        for shard in sorted(draft.glob("*.safetensors")):
            found = load_file(shard)
            if twice := sorted(found.keys() & tensors.keys()):
                raise ConfigError(f"{draft} has {twice[0]} in two files: which one counts?")
            tensors |= found
    except SafetensorError as error:
        raise ConfigError(f"{draft} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise ConfigError(f"{draft}: {name} is {tensor.dtype}, not float or bfloat16")
        if not tensor.isfinite().all():
            raise ConfigError(f"{draft}: {name} has numbers that are none (NaN or infinite)")
    return tensors


def _check_shapes(
    tensors: Mapping[str, torch.Tensor], draft: Path, target: Path, recipe: Recipe
) -> None:
    """What the recipe's model has, no tensor more or less. Tied embeddings are the output layer."""
    config = copy.deepcopy(read_model_config(target))
    for key, value in draft_config(config.to_dict(), recipe).items():
        setattr(config, key, value)
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config).state_dict()
    said = f"{draft} does not fit the target's kind of model"
    for name in sorted(wanted.keys() ^ tensors.keys()):
        if name not in wanted:
            raise ConfigError(f"{said}: it has {name}, which a draft for it has not")
        if name != _HEAD:
            raise ConfigError(f"{said}: it has no {name}")
    for name, tensor in tensors.items():
        has, needs = list(tensor.shape), list(wanted[name].shape)
        if has != needs:
            raise ConfigError(f"{said}: its {name} is {has}, not {needs}")


# ------------------------------------------------------------------------------------------ maps


def _maps(
    tensors: Mapping[str, torch.Tensor], draft: Path, embeddings: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Head map [hidden, draft's] and embed map [hidden, draft's], None for a draft that has the
    target's embeddings as they are."""
    mine = tensors[_EMBEDDINGS]
    head_map = _map_of(head, tensors.get(_HEAD, mine), draft)
    if mine.shape[1] < embeddings.shape[1]:
        return head_map, _map_of(embeddings, mine, draft)
    if not _distance(mine, embeddings) <= MAX_MAP_ERROR:
        raise _made_for_another(draft)
    return head_map, None


def _map_of(rows: torch.Tensor, mapped: torch.Tensor, draft: Path) -> torch.Tensor:
    """The M with rows [n, in] @ M = mapped [n, out], float64 [in, out] on the CPU.

    A few rows at a time: all of a large target's would be many GB in float64.
    """
    size, out = rows.shape[1], mapped.shape[1]
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, out, dtype=torch.float64)
    for some, goal in _in_parts(rows, mapped):
        gram += some.T @ some
        cross += some.T @ goal
    found: torch.Tensor = torch.linalg.lstsq(gram, cross).solution
    if not _distance(mapped, rows, found) <= MAX_MAP_ERROR:  # also when it is no number
        raise _made_for_another(draft)
    return found


def _distance(
    mapped: torch.Tensor, rows: torch.Tensor, linear: torch.Tensor | None = None
) -> float:
    """|mapped - rows @ linear| / |mapped|; NaN where there is nothing."""
    wrong = total = torch.zeros((), dtype=torch.float64)
    for some, goal in _in_parts(rows, mapped):
        guess = some if linear is None else some @ linear
        wrong = wrong + (goal - guess).square().sum()
        total = total + goal.square().sum()
    return float((wrong / total).sqrt())


def _in_parts(*matrices: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Rows in float64 on the CPU, of all matrices alike."""
    for parts in zip(*(matrix.split(_ROWS_AT_ONCE) for matrix in matrices), strict=True):
        yield [part.cpu().double() for part in parts]


def _made_for_another(draft: Path) -> ConfigError:
    return ConfigError(
        f"{draft} was not distilled from this target: its embeddings or output layer are no map "
        "of the target's"
    )
