"""Matrices as int8 with one scale a row: half of bfloat16 in a file. Never used to compute."""

from __future__ import annotations

import torch

_SCALE = ".scale"
_LARGEST = 127.0


def pack_int8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every matrix as int8 beside `NAME.scale`, float32 [rows, 1]; vectors stay float32."""
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            packed[name] = tensor.float()
            continue
        largest = tensor.float().abs().amax(dim=1, keepdim=True)
        scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
        packed[name] = (tensor.float() / scale).round().to(torch.int8)
        packed[name + _SCALE] = scale
    return packed


def unpack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse; tensors without a scale are returned as they are."""
    return {
        name: tensor.float() * tensors[name + _SCALE] if name + _SCALE in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith(_SCALE)
    }
