"""Weights of linear layers held in 8 or 4 bits, where that is exact enough and really supported.

On a CPU torch's own kernels multiply bfloat16 rows by the packed weights (measured: faster than
torchao's CPU path). A row's product does not depend on how many rows there are, but what else a
layer does may, and 16 bits magnify it: near ties fall as they do with dtype bfloat16, whatever
`model.dtype` is. On CUDA the model is loaded through transformers' torchao configuration. A GGUF
file with 4-bit blocks keeps them: they are read as numbers and packed again without loss of a
level. Embeddings, norms and the output layer stay as they are. Knows modules, files and devices;
no attention.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline.config import ModelConfig
from paceline.errors import ConfigError

GROUP_SIZE = 32  # weights that share a 4-bit scale; the block of GGUF's Q4_0 and Q4_1
NUM_LEVELS = 16
CPU_TYPES = ("float32", "bfloat16")
GGUF_PACKED = {"Q4_0", "Q4_1"}
INT4_MULTIPLES = (16, GROUP_SIZE)  # of output and input width, asked for by torch's kernel


class Int8Linear(torch.nn.Module):
    """`F.linear` of int8 weights [out_features, in_features], one scale per output."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = _parts(linear)
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12).bfloat16()
        levels = (weight / scale.float()[:, None]).round_().clamp_(-127, 127)
        self.register_buffer("levels", levels.to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features).bfloat16()
        result = torch.ops.aten._weight_int8pack_mm(rows, self.levels, self.scale)
        return _finish(result, hidden, self.bias)


class Int4Linear(torch.nn.Module):
    """`F.linear` of 4-bit weights [out_features, in_features], scale and zero per 32 inputs.

    `levels` and `scales` as `quantize_int4` gives them.
    """

    def __init__(self, linear: torch.nn.Linear, levels: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = _parts(linear)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales.transpose(0, 1).contiguous())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, self.in_features).bfloat16()
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.packed, GROUP_SIZE, self.scales
        )
        return _finish(result, hidden, self.bias)


def quantize_int4(weight: torch.Tensor, *, is_symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 levels [out, in] and bfloat16 (scale, zero) [out, groups, 2] of float32 weights.

    A weight is (level - 8) x scale + zero of its group, with levels 0 to 15.

    Weights that lie on a grid of 16 levels from their least to their greatest (GGUF's Q4_1), or
    on multiples of an eighth of the largest in size (Q4_0, `is_symmetric`), keep their levels;
    only the grid's step and offset are rounded to bfloat16.
    """
    groups = weight.view(weight.shape[0], -1, GROUP_SIZE)
    if is_symmetric:
        peak = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        scale, zero = (peak / -8).bfloat16(), torch.zeros_like(peak, dtype=torch.bfloat16)
    else:
        low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
        scale = ((high - low) / (NUM_LEVELS - 1)).bfloat16()
        zero = (low + 8 * (high - low) / (NUM_LEVELS - 1)).bfloat16()
    step = torch.where(scale == 0, torch.ones_like(scale), scale).float()
    levels = ((groups - zero.float()) / step).round_().add_(8).clamp_(0, NUM_LEVELS - 1)
    return levels.view_as(weight).to(torch.int32), torch.cat([scale, zero], dim=2)


def check_quantization(model: ModelConfig, device: torch.device, gguf: Path | None) -> None:
    """`ConfigError` with the fix when the weights cannot be held as the config asks.

    `gguf` is the model folder's GGUF file, None for one with safetensors.
    """
    kind = model.quantization
    if (kind == "gguf") != (gguf is not None):
        raise ConfigError(
            f"quantization {kind}, but {model.source} "
            + ("holds only a GGUF file: set quantization: gguf" if gguf else "has no GGUF file")
        )
    if kind == "none":
        return
    if model.tensor_parallel_size > 1:
        raise ConfigError(f"quantization {kind} does not work with tensor_parallel_size > 1")
    if device.type == "cpu":
        if model.dtype not in CPU_TYPES:
            raise ConfigError(f"quantization {kind} on a CPU needs dtype {' or '.join(CPU_TYPES)}")
    elif kind == "gguf" or device.type != "cuda":
        raise ConfigError(f"quantization {kind} is not supported on {device.type}")
    elif kind == "int4" and model.dtype != "bfloat16":
        raise ConfigError("quantization int4 on cuda needs dtype bfloat16")


def torchao_config(kind: str) -> Any:
    """transformers' quantization config of weight-only int8 or int4; `ConfigError` without torchao.

    The int4 layout is the one whose kernel is part of torch (tinygemm).
    """
    if find_spec("torchao") is None:
        raise ConfigError(
            f"quantization {kind} on cuda needs torchao: pip install 'paceline[quantization]'"
        )
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig())
    tiles = "tile_packed_to_4d"
    return TorchAoConfig(Int4WeightOnlyConfig(group_size=GROUP_SIZE, int4_packing_format=tiles))


def loading_arguments(kind: str, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs for it. A CPU model is packed after loading instead."""
    if kind not in ("int8", "int4") or device.type == "cpu":
        return {}
    # The tensors are packed while they arrive, by kernels of the device they are meant for.
    return {"quantization_config": torchao_config(kind), "device_map": {"": device}}


def pack_on_cpu(hf_model: Any, kind: str, gguf: Path | None = None) -> int:
    """Replace the decoder's linear layers; returns how many. `ConfigError` when one cannot be.

    For `gguf` only the layers that the file holds in 4 bits; the others stay as they are.
    """
    decoder = hf_model.base_model
    if any(parameter.dim() > 2 for parameter in decoder.parameters()):
        raise ConfigError(f"quantization {kind}: mixtures of experts are not supported")
    kinds = _gguf_types(gguf) if gguf is not None else {}
    count = 0
    for name, module in list(decoder.named_modules()):
        if type(module) is not torch.nn.Linear:
            continue
        stored = kinds.get(f"{name}.weight", "")
        if kind == "gguf" and stored not in GGUF_PACKED:
            continue
        is_int8 = kind == "int8"
        packed = Int8Linear(module) if is_int8 else _pack_int4(kind, name, module, stored)
        decoder.set_submodule(name, packed)
        count += 1
    if count == 0:
        what = "no Q4_0 or Q4_1 tensor" if kind == "gguf" else "no plain linear layer"
        raise ConfigError(f"quantization {kind}: {type(hf_model).__name__} has {what} to pack")
    return count


def _gguf_types(gguf: Path) -> dict[str, str]:
    """The decoder's parameter name -> GGUF type name, for the layers that llama.cpp names alike."""
    from gguf import GGUFReader

    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    kinds = {}
    for tensor in GGUFReader(gguf).tensors:
        words = tensor.name.split(".")
        if words[0] == "blk" and len(words) == 4 and words[2] in parts:
            kinds[f"layers.{words[1]}.{parts[words[2]]}.weight"] = tensor.tensor_type.name
    return kinds


def _pack_int4(kind: str, name: str, linear: torch.nn.Linear, stored: str) -> Int4Linear:
    """`stored`: the GGUF type whose levels must be found again; empty for none."""
    for width, multiple in zip(linear.weight.shape, INT4_MULTIPLES, strict=True):
        if width % multiple:
            raise ConfigError(
                f"quantization {kind}: a side of {name} is {width}, no multiple of {multiple}"
            )
    weight = linear.weight.detach().float()
    levels, scales = quantize_int4(weight, is_symmetric=stored == "Q4_0")
    if stored:
        scale, zero = scales.float().repeat_interleave(GROUP_SIZE, 1).unbind(2)
        error = ((levels - 8) * scale + zero - weight).abs()
        # Rounding of scale and zero moves a weight by 1/16 of a step at most; a wrong level by 1/2.
        if (error > scale.abs() / 4).any():
            raise ConfigError(
                f"quantization {kind}: {name} does not use the ends of its {stored} blocks, "
                "so they cannot be packed again exactly: convert the file to safetensors"
            )
    return Int4Linear(linear, levels, scales)


def _parts(linear: torch.nn.Linear) -> tuple[int, int, torch.nn.Parameter | None]:
    return linear.in_features, linear.out_features, linear.bias


def _finish(result: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = result.view(*hidden.shape[:-1], result.shape[-1]).to(hidden.dtype)
    return result if bias is None else result + bias
