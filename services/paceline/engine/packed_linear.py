"""Linear layers with weights laid out once for the CPU's own matrix kernels.

A verify pass has a handful of rows, and for those torch's default CPU path costs far more than
one row: it lays the weights out anew in every call. With the layout kept, a pass over a few rows
is bound by reading the weights once, like a decode, and verification is nearly free. Knows
modules only; on other devices, types and torch builds the model stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

# Rows the layout is chosen for: 1 + a usual number of draft tokens.
ROWS_HINT = 8
PACKED_TYPES = (torch.float32, torch.bfloat16)


class PackedLinear(torch.nn.Module):
    """`F.linear` of a prepacked weight [out_features, in_features] and optional bias."""

    def __init__(self, linear: torch.nn.Linear, rows_hint: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Opaque to torch's own operations, so neither a parameter nor a buffer.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows_hint)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            hidden, self.packed, self.bias, "none", [], ""
        )
        return result


def pack_linears(hf_model: Any, rows_hint: int = ROWS_HINT) -> int:
    """Replace every plain linear layer of a CPU model; returns how many.

    The replaced weights are freed, unless they are tied to the input embedding.
    """
    if not _is_available(hf_model):
        return 0
    count = 0
    for parent in list(hf_model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(parent, name, PackedLinear(child, rows_hint))
                count += 1
    return count


def _is_available(hf_model: Any) -> bool:
    """These operations are torch's compiler's own and not promised to exist: look first."""
    on_cpu = hf_model.device.type == "cpu"
    return (
        on_cpu
        and hf_model.dtype in PACKED_TYPES
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
