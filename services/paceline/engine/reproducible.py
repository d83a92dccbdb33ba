"""Makes a row's result independent of how many rows share its pass, bit for bit, on a CPU.

A matrix product over five rows need not give the bits of the same product over one: kernels block
and sum by shape. So every linear layer gets tiles of exactly `TILE_ROWS` rows, the last one filled
up, every attention call one query row, and every pass a multiple of `TILE_ROWS` rows
(`plan_pass(row_by_row=True)`). Then a token's logits depend on the tokens before it and on nothing
else: not on proposals, K, batch mates, chunks, the prefix cache or a preemption, in float32,
bfloat16 and quantized weights alike (design, section 6). It costs speed: a decode row pays for a
whole tile, a prompt for one attention call per row and layer.
Knows modules only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from paceline.engine.packed_linear import PackedLinear
from paceline.engine.pass_plan import ROW_MULTIPLE
from paceline.engine.quantization import Int4Linear, Int8Linear
from paceline.errors import ConfigError

TILE_ROWS = ROW_MULTIPLE
LINEARS = (torch.nn.Linear, PackedLinear, Int8Linear, Int4Linear)


class TiledLinear(torch.nn.Module):
    """`inner` over tiles of `TILE_ROWS` rows: [..., in_features] -> [..., out_features]."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        missing = -rows.shape[0] % TILE_ROWS
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        parts = [self.inner(tile) for tile in padded.split(TILE_ROWS)]
        result = parts[0] if len(parts) == 1 else torch.cat(parts)
        return result[: rows.shape[0]].reshape(*hidden.shape[:-1], result.shape[-1])


def tile_linears(hf_model: Any) -> None:
    """Replace every linear layer; `ConfigError` for a model with other matrices (experts, Conv1D).

    Call it after weights were packed or quantized.
    """
    if hf_model.device.type != "cpu":
        raise ConfigError("reproducible is built and tested for CPUs only: set device: cpu")
    for parent in list(hf_model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LINEARS):
                setattr(parent, name, TiledLinear(child))
    for name, module in hf_model.named_modules():
        has_matrix = any(p.dim() > 1 for p in module.parameters(recurse=False))
        if has_matrix and not isinstance(module, (*LINEARS, torch.nn.Embedding)):
            raise ConfigError(
                f"reproducible: {type(module).__name__} ({name}) multiplies by a matrix in a way"
                " of its own; only models of plain linear layers can be reproducible"
            )
