"""A LoRA adapter as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors`.

Says which modules an adapter changes, by which rank and scale, and what its file holds. Whatever
would have to be computed in another way than `scale * B (A x)` is refused with the fix, and so is
every field that we do not know and that is set. Opens no pickle. Knows no model and no pass.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED, TOKENIZER = "adapter_model.bin", "tokenizer.json"
MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20  # a list of a large model's modules by their full names fits

_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_FLOATS = ("F16", "BF16", "F32")

T = TypeVar("T")

# Fields that do not change what is computed, or are read below.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "alpha_pattern",
    "revision",
    "target_modules",
    "use_rslora",
    "eva_config",  # how training began: the weights say it all
}
_MERGE = "merge it into the model and serve that as a model of its own"
# field -> the values that mean nothing special, and what to do about others. A field that is not
# in a table must be empty or false.
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "bias": (("none", None), f"train it with bias='none', or {_MERGE}"),
    "task_type": (("CAUSAL_LM", None), "only adapters of causal language models are served"),
    # the others change the model's own weights when training begins
    "init_lora_weights": (
        (True, False, None, "gaussian", "orthogonal", "eva"),
        "save it with path_initial_model_for_weight_conversion, which makes a plain LoRA of it",
    ),
}
_FIXES = {
    "use_dora": f"DoRA is not supported: {_MERGE}",
    "modules_to_save": f"it has whole layers of its own: {_MERGE}",
    "trainable_token_indices": f"it has embeddings of its own: {_MERGE}",
    "target_parameters": f"only linear layers can be adapted: {_MERGE}",
    "fan_in_fan_out": f"layers that keep their weights transposed are not supported: {_MERGE}",
    "lora_bias": f"train it with lora_bias=False, or {_MERGE}",
    "layer_replication": f"it changes the model's layers: {_MERGE}",
}


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What is to be adapted, and how. `excluded` and `targets`: a pattern for whole names, or the
    last parts of names. A pattern's rank or alpha is that of the first one that fits a name."""

    rank: int
    alpha: float
    use_rslora: bool
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]
    layer_patterns: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def adapts(self, module: str, *, is_output: bool = False) -> bool:
        """Whether the linear layer of this full name is one to adapt."""
        if self.excluded and _is_named(self.excluded, module):
            return False
        if self.targets == "all-linear":
            return not is_output
        if not _is_named(self.targets, module):
            return False
        return not self.layers or isinstance(self.targets, str) or self._is_in_layers(module)

    def rank_of(self, module: str) -> int:
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        alpha, rank = _of_pattern(self.alpha_pattern, module, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def _is_in_layers(self, module: str) -> bool:
        for pattern in self.layer_patterns or (r"[^.]*",):
            # the first number is the layer's, a later one may be an expert's
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(found[1]) in self.layers
        return False


def read_lora_config(folder: Path) -> LoraConfig:
    """`ConfigError` for what cannot be read, or not be served as it is."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: name the one that PEFT saved the adapter in")
    data = _read_json(folder / CONFIG)
    if data.get("peft_type") != "LORA":
        raise ConfigError(f"{folder / CONFIG}: peft_type is {data.get('peft_type')!r}, not 'LORA'")
    for name, value in data.items():
        _check_field(folder, name, value)
    fields = _Fields(folder / CONFIG, data)
    config = LoraConfig(
        rank=fields.rank("r", data.get("r")),
        alpha=fields.number("lora_alpha", data.get("lora_alpha")),
        use_rslora=bool(data.get("use_rslora")),
        targets=fields.names("target_modules"),
        excluded=fields.names("exclude_modules"),
        layers=fields.layers(),
        layer_patterns=fields.patterns("layers_pattern"),
        rank_pattern=fields.by_pattern("rank_pattern", fields.rank),
        alpha_pattern=fields.by_pattern("alpha_pattern", fields.number),
    )
    if not config.targets:
        raise ConfigError(f"{folder / CONFIG} names no target_modules: save the adapter again")
    return config


def _check_field(folder: Path, name: str, value: Any) -> None:
    if name in _ONLY:
        usual, fix = _ONLY[name]
        # by identity: 1 is not True
        if not any(value is each or (isinstance(value, str) and value == each) for each in usual):
            raise ConfigError(f"{folder / CONFIG}: {name} is {value!r}: {fix}")
    elif value and name not in _HARMLESS:
        fix = _FIXES.get(name, f"not supported here: {_MERGE}")
        raise ConfigError(f"{folder / CONFIG}: {name} is set: {fix}")


class _Fields:
    """Values of `adapter_config.json` by their types; `ConfigError` for others."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self._path, self._data = path, data

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self._wrong(name, value, f"must be a whole number from 1 to {MAX_RANK}")
        return value

    def number(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(name, value, "must be a number")
        return float(value)

    def names(self, name: str) -> str | tuple[str, ...]:
        """A list of names, or a pattern; empty without."""
        value = self._data.get(name)
        if isinstance(value, str):
            self._check_pattern(name, value)
            return value
        return self._texts(name, value)

    def patterns(self, name: str) -> tuple[str, ...]:
        value = self._data.get(name)
        texts = (value,) if isinstance(value, str) and value else self._texts(name, value or ())
        for text in texts:
            self._check_pattern(name, text)
        return texts

    def layers(self) -> tuple[int, ...]:
        value = self._data.get("layers_to_transform")
        listed = () if value is None else value if isinstance(value, list) else [value]
        if not all(type(layer) is int for layer in listed):
            raise self._wrong("layers_to_transform", value, "must be numbers of layers")
        return tuple(listed)

    def by_pattern(self, name: str, read: Callable[[str, Any], T]) -> dict[str, T]:
        value = self._data.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(name, value, "must be an object")
        for pattern in value:
            self._check_pattern(name, pattern)
        return {pattern: read(f"{name}[{pattern!r}]", each) for pattern, each in value.items()}

    def _texts(self, name: str, value: Any) -> tuple[str, ...]:
        listed = () if value is None else value
        if not isinstance(listed, list | tuple) or not all(isinstance(t, str) for t in listed):
            raise self._wrong(name, value, "must be names of modules")
        return tuple(listed)

    def _check_pattern(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise self._wrong(name, pattern, f"is no regular expression ({error})") from error

    def _wrong(self, name: str, value: Any, need: str) -> ConfigError:
        return ConfigError(f"{self._path}: {name} {need}, got {str(value)[:60]}")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {CONFIG}: not an adapter that PEFT saved")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes: not PEFT's")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is no JSON object: not an adapter that PEFT saved")
    return data


def _is_named(names: str | tuple[str, ...], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


@dataclass(frozen=True, slots=True)
class LoraShapes:
    """Of one module: [rank, inputs] of A and [outputs, rank] of B."""

    down: tuple[int, ...]
    up: tuple[int, ...]


def read_lora_shapes(folder: Path) -> dict[str, LoraShapes]:
    """Module -> shapes in the adapter's file; only its header is read."""
    path = folder / WEIGHTS
    if not path.is_file():
        found = f"only {PICKLED}, and pickles are not read: save it with safe_serialization=True"
        why = found if (folder / PICKLED).is_file() else "not an adapter that PEFT saved"
        raise ConfigError(f"{folder} has no {WEIGHTS}: {why}")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                shapes[key] = tuple(part.get_shape())
                if part.get_dtype() not in _FLOATS:
                    raise ConfigError(f"{path}: {key} is of type {part.get_dtype()}: save it again")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error
    modules = {_module_of(path, key) for key in shapes}
    for module in modules:
        for suffix in (_DOWN, _UP):
            if _PREFIX + module + suffix not in shapes:
                raise ConfigError(f"{path} lacks {_PREFIX}{module}{suffix}: copy it again")
    return {
        module: LoraShapes(shapes[_PREFIX + module + _DOWN], shapes[_PREFIX + module + _UP])
        for module in sorted(modules)
    }


def _module_of(path: Path, key: str) -> str:
    for suffix in (_DOWN, _UP):
        if key.startswith(_PREFIX) and key.endswith(suffix):
            return key[len(_PREFIX) : -len(suffix)]
    if "embed" not in key and not key.endswith(".base_layer.weight"):
        raise ConfigError(f"{path}: {key} is no matrix of a LoRA: {_MERGE}")
    raise ConfigError(
        f"{path}: {key} is a layer of the model itself: save the adapter with"
        f" save_embedding_layers=False if it was not trained, else {_MERGE}"
    )


def read_lora_weights(folder: Path, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, inputs] and B [outputs, rank] of one module, as they were saved."""
    path = folder / WEIGHTS
    try:
        with safe_open(path, "pt") as file:
            down = file.get_tensor(_PREFIX + module + _DOWN)
            up = file.get_tensor(_PREFIX + module + _UP)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; copy it again") from error
    if not (down.isfinite().all() and up.isfinite().all()):
        raise ConfigError(f"{path}: {module} has weights that are no numbers: train it again")
    return down, up
