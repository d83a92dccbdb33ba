"""Medusa heads as files (Cai et al. 2024): `config.json` beside `medusa_lm_head.safetensors`.

Head h guesses the token h + 1 places behind the one that the target's own output layer decides
from the same final hidden state x [hidden_size] (what goes into the output layer).

`config.json`: `medusa_num_heads`, `medusa_num_layers` (ResBlocks per head) and, for information,
`base_model_name_or_path`; `medusa_draft_vocab_size` if the file has a `draft_vocab`.
The tensors, in the published layout; L = medusa_num_layers, names may begin with `medusa_head.`:

  `{h}.{i}.linear.weight` [hidden_size, hidden_size] and `.bias` [hidden_size], i < L:
      x <- x + SiLU(weight x + bias), one after the other
  `{h}.{L}.weight` [width of the target's output layer, hidden_size]: logits = weight x

and in a small form, which has no output layers of its own (some published files have none either,
and then neither of these):

  `{h}.map.weight` [hidden_size, hidden_size], optional: x <- weight x
  `draft_vocab` int32 or int64 [M], once, ascending: logits of these ids = the target's output
      layer, rows `draft_vocab`, times x; every other logit is -inf. Without it all rows count.

All heads have the same parts. Matrices are float32, float16, bfloat16, or int8 with
`NAME.weight.scale` float32 [rows, 1] as `engine/packed.py` makes them. Where there is only the
original `medusa_lm_head.pt`, its tensors are read without running what a pickle may hold. Published
configs may count fewer heads than their file has: the file counts.

Knows files and shapes; runs no head.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.engine.medusa_source import HEAD_CONFIG, HEAD_FILES
from paceline.engine.packed import unpack
from paceline.errors import ConfigError

WEIGHTS, PICKLED = HEAD_FILES
MAX_HEADS, MAX_LAYERS = 16, 8
MAX_CONFIG_BYTES = 1 << 20
MAX_OTHER_BYTES = 1 << 20  # of a file, beside its tensors: names, shapes

_PREFIX = re.compile(r"medusa_heads?\.")
_NAME = re.compile(r"(0|[1-9][0-9]?)\.((?:0|[1-9]|map)(?:\.linear)?\.(?:weight|bias))(\.scale)?")
_VOCAB = "draft_vocab"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INTS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """One head. `blocks`: weight and bias of each ResBlock. `output`: [width, hidden_size], None
    where it uses the target's; then `map` may come before that."""

    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    output: torch.Tensor | None = None
    map: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MedusaTensors:
    """`draft_vocab`: int64 [M], or None."""

    heads: tuple[HeadTensors, ...]
    draft_vocab: torch.Tensor | None = None

    @property
    def needs_output(self) -> bool:
        """Whether they guess with rows of the target's output layer."""
        return self.heads[0].output is None


@dataclass(frozen=True, slots=True)
class _Config:
    num_heads: int
    num_layers: int
    draft_vocab_size: int | None


def read_medusa(
    folder: Path, hidden_size: int, width: int, dtype: torch.dtype = torch.float32
) -> MedusaTensors:
    """The heads in `folder` as `dtype`, on the CPU, for a target whose output layer is
    [width, hidden_size]. `ConfigError` for whatever is not what this file describes."""
    config = _read_config(folder)
    path = _weights_path(folder)
    size = MAX_HEADS * ((MAX_LAYERS + 1) * (hidden_size + 1) + width) * hidden_size * 4
    if path.stat().st_size > size + 8 * width + MAX_OTHER_BYTES:
        raise ConfigError(f"{path} is larger than any heads of this target: not made for it")
    loaded = _load_safetensors(path) if path.name == WEIGHTS else _load_pickled(path)
    tensors = _renamed(path, loaded)
    reader = _Reader(path, config, tensors, hidden_size, width, dtype)
    return reader.read()


def _read_config(folder: Path) -> _Config:
    path = folder / HEAD_CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} has no {HEAD_CONFIG}: it is no folder of Medusa heads")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes: not a Medusa config")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict) or "medusa_num_heads" not in data:
        raise ConfigError(f"{path} names no medusa_num_heads: it is no config of Medusa heads")
    num_heads = _count(path, data, "medusa_num_heads", 1, MAX_HEADS)
    num_layers = _count(path, data, "medusa_num_layers", 0, MAX_LAYERS)
    size = None
    if data.get("medusa_draft_vocab_size") is not None:
        size = _count(path, data, "medusa_draft_vocab_size", 1, 1 << 24)
    return _Config(num_heads, num_layers, size)


def _count(path: Path, data: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = data.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{path}: {name} must be {least} to {most}, got {str(value)[:60]}")
    return value


def _weights_path(folder: Path) -> Path:
    for name in (WEIGHTS, PICKLED):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder} has neither {WEIGHTS} nor {PICKLED}: download the heads again")


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): download the heads again") from error
    return loaded


def _load_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The state dict in a file of `torch.save`; nothing in it is run, and nothing unpacked."""
    fix = "save the heads' state dict as " + WEIGHTS
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ConfigError(f"{path} is compressed, which torch.save never does: {fix}")
        # Tensors are looked at where they lie in the file, so that no size it states is believed.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except ConfigError:
        raise
    except Exception as error:  # a bent pickle can make the unpickler raise anything
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"{path} holds something else than plain tensors, which is not loaded ({reason}): {fix}"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise ConfigError(f"{path} holds no state dict of tensors by their names: {fix}")
    for name, tensor in loaded.items():
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        if not is_plain or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ConfigError(f"{path}: {name[:60]} is no plain tensor: {fix}")
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _renamed(path: Path, loaded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the prefix that some exports have; `ConfigError` for a name that means nothing."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in loaded.items():
        short = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        if short in tensors:
            raise ConfigError(f"{path} has {short[:60]} twice: save the heads again")
        if short != _VOCAB and not _NAME.fullmatch(short):
            raise ConfigError(f"{path}: {name[:60]!r} is no part of Medusa heads")
        tensors[short] = tensor
    return tensors


class _Reader:
    """Checks and converts the tensors of one file; takes each out of `tensors`."""

    def __init__(
        self,
        path: Path,
        config: _Config,
        tensors: dict[str, torch.Tensor],
        hidden_size: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self._path, self._config, self._tensors = path, config, tensors
        self._hidden_size, self._width, self._dtype = hidden_size, width, dtype

    def read(self) -> MedusaTensors:
        draft_vocab = self._draft_vocab()
        num_heads = self._num_heads()
        output, mapped = f"{self._config.num_layers}.weight", "map.weight"
        has_output, has_map = f"0.{output}" in self._tensors, f"0.{mapped}" in self._tensors
        if has_output and (has_map or draft_vocab is not None):
            raise ConfigError(f"{self._path} has output layers beside a {_VOCAB} or maps: use one")
        size = self._hidden_size
        heads = [
            HeadTensors(
                tuple(
                    (
                        self._take(f"{head}.{layer}.linear.weight", (size, size)),
                        self._take(f"{head}.{layer}.linear.bias", (size,)),
                    )
                    for layer in range(self._config.num_layers)
                ),
                self._take(f"{head}.{output}", (self._width, size)) if has_output else None,
                self._take(f"{head}.{mapped}", (size, size)) if has_map else None,
            )
            for head in range(num_heads)
        ]
        if self._tensors:
            name = min(self._tensors)
            raise ConfigError(
                f"{self._path}: {name} does not fit medusa_num_layers {self._config.num_layers}"
                " or the other heads: correct the config, or download the heads again"
            )
        return MedusaTensors(tuple(heads), draft_vocab)

    def _num_heads(self) -> int:
        seen = {int(name.partition(".")[0]) for name in self._tensors}
        if len(seen) > MAX_HEADS:
            raise ConfigError(f"{self._path} has {len(seen)} heads: at most {MAX_HEADS}")
        num_heads = max(seen, default=-1) + 1
        if num_heads < self._config.num_heads or len(seen) != num_heads:
            raise ConfigError(
                f"{self._path} has heads {sorted(seen)} where medusa_num_heads is"
                f" {self._config.num_heads}: download them again"
            )
        return num_heads

    def _draft_vocab(self) -> torch.Tensor | None:
        token_ids, size = self._tensors.pop(_VOCAB, None), self._config.draft_vocab_size
        if token_ids is None and size is None:
            return None
        if token_ids is None or size is None or tuple(token_ids.shape) != (size,):
            shape = None if token_ids is None else list(token_ids.shape)
            raise ConfigError(
                f"{self._path}: {_VOCAB} has shape {shape} where medusa_draft_vocab_size is {size}"
            )
        if token_ids.dtype not in _INTS:
            raise ConfigError(f"{self._path}: {_VOCAB} is of type {token_ids.dtype}, not int32")
        token_ids = token_ids.long()
        is_ascending = bool((token_ids[1:] > token_ids[:-1]).all())
        if not is_ascending or token_ids[0] < 0 or token_ids[-1] >= self._width:
            raise ConfigError(
                f"{self._path}: {_VOCAB} must be ascending ids below the target's {self._width}"
            )
        return token_ids

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.pop(name, None)
        scale = self._tensors.pop(f"{name}.scale", None)
        if tensor is None:
            raise ConfigError(f"{self._path} lacks {name}: download the heads again")
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self._path}: {name} is {list(tensor.shape)} where the target needs"
                f" {list(shape)}: these heads were made for another model"
            )
        is_packed = tensor.dtype == torch.int8 and len(shape) == 2 and scale is not None
        if scale is not None and is_packed:
            is_packed = scale.dtype == torch.float32 and tuple(scale.shape) == (shape[0], 1)
            tensor = unpack({name: tensor, f"{name}.scale": scale})[name] if is_packed else tensor
        if not is_packed and (scale is not None or tensor.dtype not in _FLOATS):
            raise ConfigError(
                f"{self._path}: {name} is of type {tensor.dtype}: save it as float32, or as int8"
                f" with {name}.scale float32 [rows, 1]"
            )
        tensor = tensor.to(self._dtype)
        if not bool(tensor.isfinite().all()):
            raise ConfigError(f"{self._path}: {name} has weights that are no {self._dtype} numbers")
        return tensor.contiguous()
