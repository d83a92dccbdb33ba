"""LoRA adapters beside a model's linear layers: many of them, and none, in one pass.

A layer's own product is computed for all rows, as it would be without adapters; then each adapter
adds `scale * B (A x)` to its rows. So the rows of others keep their bits. The KV of a text depends
on its adapter too, which `prefix_cache.adapter_salt` sees to. Weights are held in the model's
type, with the scale in B. Knows modules and rows; nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.engine.paged_attention import ShapeProbe
from paceline.engine.pass_plan import AdapterRows, PassPlan
from paceline.engine.peft_folder import (
    TOKENIZER,
    LoraConfig,
    LoraShapes,
    read_lora_config,
    read_lora_shapes,
    read_lora_weights,
)
from paceline.engine.reproducible import LINEARS, TiledLinear
from paceline.engine.varlen_attention import VarlenPlan
from paceline.errors import ConfigError
from paceline.models import tokenizer_hash

MAX_ADAPTERS = 64
_MIB = 2**20
_PROBE_ROWS, _PROBE_SAMPLES = 3, 2

logger = logging.getLogger(__name__)


class CurrentPass:
    """Whose rows are in the pass that is being run; every `LoraLinear` of a model looks here."""

    def __init__(self) -> None:
        self.parts: Sequence[AdapterRows] = ()
        self.num_rows = self.num_samples = 0

    def begin(self, plan: PassPlan | VarlenPlan) -> None:
        self.parts = plan.adapter_rows
        self.num_rows, self.num_samples = plan.input_ids.shape[1], len(plan.sample_rows)


class LowRank(torch.nn.Module):
    """The product of an adapter's two matrices with rows, scale included."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor, *, is_tiled: bool) -> None:
        super().__init__()
        layers = (_linear(down), _linear(up))
        self.down, self.up = (TiledLinear(each) if is_tiled else each for each in layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.up(self.down(hidden))
        return result


class LoraLinear(torch.nn.Module):
    """`inner`, a linear layer of any kind, and what the adapters in `low_ranks` add to it.

    `is_output`: it sees the sampled rows alone, as the output layer does.
    """

    def __init__(self, inner: Any, current: CurrentPass, *, is_output: bool) -> None:
        super().__init__()
        self.inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.low_ranks: dict[str, LowRank] = {}
        self._current, self._is_output = current, is_output

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(hidden)
        current = self._current
        if not current.parts:
            return result
        inputs = hidden.reshape(-1, hidden.shape[-1])
        expected = current.num_samples if self._is_output else current.num_rows
        if len(inputs) != expected:  # a layer for some rows only, as experts are
            raise RuntimeError(f"an adapted layer got {len(inputs)} rows of {expected}")
        outputs = result.reshape(len(inputs), self.out_features)
        for part in current.parts:
            low_rank = self.low_ranks.get(part.adapter)
            rows = part.samples if self._is_output else part.rows
            if low_rank is not None and len(rows):
                outputs.index_add_(0, rows, low_rank(inputs[rows]))
        return outputs.view(result.shape)


def attach_adapters(
    hf_model: Any, adapters: Mapping[str, str], base_folder: Path
) -> CurrentPass | None:
    """Load each adapter (name -> PEFT folder) beside the layers that it changes; None without any.

    Call it after weights were packed, quantized or tiled. `ConfigError`, with the fix, for an
    adapter that cannot be served as it was trained.
    """
    if not adapters:
        return None
    if len(adapters) > MAX_ADAPTERS:
        raise ConfigError(f"{len(adapters)} adapters: a target holds at most {MAX_ADAPTERS}")
    current = CurrentPass()
    linears, others = _layers(hf_model)
    output = hf_model.get_output_embeddings()
    wrapped: dict[str, LoraLinear] = {}
    num_bytes = 0
    for name, place in adapters.items():
        folder = Path(place).expanduser()
        try:
            config, shapes = read_lora_config(folder), read_lora_shapes(folder)
            _check_vocabulary(folder, base_folder)
            _check_modules(config, shapes, linears, others, output)
            for module in shapes:
                if module not in wrapped:
                    inner = linears[module]
                    layer = LoraLinear(inner, current, is_output=inner is output)
                    hf_model.set_submodule(module, layer)
                    wrapped[module] = layer
                low_rank = _low_rank(hf_model, config, folder, module, linears[module])
                wrapped[module].low_ranks[name] = low_rank
        except ConfigError as error:
            raise ConfigError(f"adapter {name}: {error}") from error
        used = sum(_num_weights(each) for each in shapes.values()) * hf_model.dtype.itemsize
        num_bytes += used
        logger.info("adapter %s: %d layers, %.1f MiB", name, len(shapes), used / _MIB)
    logger.info("%d adapters take %.1f MiB", len(adapters), num_bytes / _MIB)
    _check_calls(hf_model, current, wrapped)
    return current


def adapter_bytes(folder: Path, bytes_per_weight: int) -> int:
    """What an adapter takes in memory, by its file's header alone."""
    return sum(_num_weights(each) for each in read_lora_shapes(folder).values()) * bytes_per_weight


def _layers(hf_model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """By full name: the linear layers as the model has them, and all its other modules."""
    named = dict(hf_model.named_modules())
    linears = {
        name: each for name, each in named.items() if isinstance(each, (*LINEARS, TiledLinear))
    }
    inside = {f"{name}.inner" for name in linears}
    linears = {name: each for name, each in linears.items() if name not in inside}
    others = {n: each for n, each in named.items() if n and n not in linears and n not in inside}
    return linears, others


def _check_modules(
    config: LoraConfig,
    shapes: Mapping[str, LoraShapes],
    linears: Mapping[str, Any],
    others: Mapping[str, Any],
    output: Any,
) -> None:
    """An adapter's configuration, its file and the model must name the same modules."""
    named = {
        name for name, each in linears.items() if config.adapts(name, is_output=each is output)
    }
    if config.targets != "all-linear":
        for name in others:
            if config.adapts(name):
                raise ConfigError(f"target_modules names {name}, which is no linear layer here")
    for name in shapes:
        if name not in linears:
            raise ConfigError(f"it adapts {name}, which is no linear layer of this model")
    if stray := sorted(shapes.keys() ^ named):
        where = "adapter_config.json" if stray[0] in named else "its weights"
        raise ConfigError(f"only {where} names {stray[0]}: the two files do not belong together")
    if not shapes:
        raise ConfigError("target_modules names no layer of this model: is it for another one?")
    for name, shape in shapes.items():
        rank, layer = config.rank_of(name), linears[name]
        expected = LoraShapes((rank, layer.in_features), (layer.out_features, rank))
        if shape != expected:
            raise ConfigError(
                f"{name} has matrices of {shape.down} and {shape.up} where this model and r {rank}"
                f" ask for {expected.down} and {expected.up}: is it for another model?"
            )


def _check_vocabulary(folder: Path, base_folder: Path) -> None:
    """PEFT folders often hold the tokenizer that the adapter was trained with."""
    if not (folder / TOKENIZER).is_file() or not (base_folder / TOKENIZER).is_file():
        return
    if tokenizer_hash(folder) != tokenizer_hash(base_folder):
        raise ConfigError(
            f"{folder / TOKENIZER} has other token ids than the model's: serve the model that it"
            " was trained on, or remove that file if it is not the one of the training"
        )


def _low_rank(hf_model: Any, config: LoraConfig, folder: Path, module: str, layer: Any) -> LowRank:
    down, up = read_lora_weights(folder, module)
    up = up.float() * config.scale_of(module)
    device, dtype = hf_model.device, hf_model.dtype
    is_tiled = isinstance(layer, TiledLinear)
    return LowRank(down.to(device, dtype), up.to(device, dtype), is_tiled=is_tiled)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
    return layer


def _num_weights(shapes: LoraShapes) -> int:
    return shapes.down[0] * shapes.down[1] + shapes.up[0] * shapes.up[1]


def _check_calls(hf_model: Any, current: CurrentPass, wrapped: Mapping[str, LoraLinear]) -> None:
    """Every adapted layer must be called once in a pass, with its rows: a model that reads the
    weights of a layer by itself, or sends it some rows only, would leave the adapter out."""
    num_calls = dict.fromkeys(wrapped, 0)

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            num_calls[name] += 1

        return hook

    hooks = [layer.register_forward_hook(count(name)) for name, layer in wrapped.items()]
    rows = torch.arange(_PROBE_ROWS, device=hf_model.device)
    samples = rows[-_PROBE_SAMPLES:]
    names = {name for layer in wrapped.values() for name in layer.low_ranks}
    current.parts = [AdapterRows(name, rows, rows[:_PROBE_SAMPLES]) for name in sorted(names)]
    current.num_rows, current.num_samples = _PROBE_ROWS, _PROBE_SAMPLES
    try:
        with torch.inference_mode():
            hf_model(
                input_ids=torch.zeros_like(rows)[None],
                position_ids=rows[None],
                use_cache=False,
                logits_to_keep=samples,
                paged=ShapeProbe(),
            )
    except (AttributeError, RuntimeError, TypeError) as error:
        kind = type(hf_model).__name__
        raise ConfigError(
            f"{kind} does not call its layers so that they can be adapted: {error}"
        ) from error
    finally:
        current.parts = ()
        for hook in hooks:
            hook.remove()
    for name, calls in num_calls.items():
        if calls != 1:
            raise ConfigError(f"a pass calls {name} {calls} times: it cannot be adapted")
