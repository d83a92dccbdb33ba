"""Which accelerators this process sees, and what is free there. For `paceline doctor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str
    free_bytes: int
    total_bytes: int
    has_bfloat16: bool


def visible_accelerators() -> tuple[Accelerator, ...]:
    """The CUDA devices, in torch's order; none where the driver does not answer."""
    if not torch.cuda.is_available():
        return ()
    return tuple(_describe(index) for index in range(torch.cuda.device_count()))


def _describe(index: int) -> Accelerator:
    with torch.cuda.device(index):
        free, total = torch.cuda.mem_get_info()
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Accelerator(torch.cuda.get_device_name(index), free, total, has_bfloat16)
