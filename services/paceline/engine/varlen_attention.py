"""Attention of a ragged batch over the paged pool in one kernel call (torch's `varlen_attn`).

For CUDA with fp16 or bf16. Only some kernels behind `varlen_attn` read block tables: FlashAttention
3 on Hopper, 4 on Blackwell, each a package of its own; the one inside torch refuses them. So the
kernel is tried once at start, on this machine and with the model's shapes, against plain torch:
whatever it then refuses or gets wrong, the engine does not use it. Knows slots and blocks; no ids
but those it passes on, no sequences.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn

from paceline.engine.pass_plan import AdapterRows, SequenceRows, find_adapter_rows

_log = logging.getLogger(__name__)

# CUDA compute capability (major) -> the implementation whose kernel reads block tables there.
PAGED_IMPLEMENTATIONS = {9: "FA3", 10: "FA4"}
TYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
TOLERANCE = 0.02


@dataclass(slots=True)
class VarlenPlan:
    """A flat batch, sequence after sequence: the first four fields as in `PassPlan`.

    int32 on the device: `row_bounds` [sequences + 1] cuts the rows, `lengths` [sequences] counts
    the positions that a sequence's last row sees, `block_table` is [sequences, blocks]. The rows
    of a sequence are its last ones. `max_rows`: most rows of one sequence.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write: torch.Tensor
    sample_rows: torch.Tensor
    row_bounds: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    max_rows: int
    block_size: int
    adapter_rows: tuple[AdapterRows, ...] = ()


def plan_varlen(items: Sequence[SequenceRows], block_size: int, device: torch.device) -> VarlenPlan:
    """The plan of any pass, by one pinned copy that the host does not wait for."""
    ids, positions, slots, samples, bounds = list[int](), list[int](), list[int](), list[int](), [0]
    owners = [index for index, item in enumerate(items) for _ in item.token_ids]
    width = max(len(item.blocks) for item in items)
    table = list[int]()
    for item in items:
        ids += item.token_ids
        span = range(item.start, item.start + len(item.token_ids))
        positions += span
        slots += (item.blocks[p // block_size] * block_size + p % block_size for p in span)
        bounds.append(len(ids))
        samples += range(len(ids) - item.num_samples, len(ids))
        table += [*item.blocks, *[item.blocks[-1]] * (width - len(item.blocks))]
    lengths = [item.start + len(item.token_ids) for item in items]
    fields = [ids, positions, slots, samples, bounds, lengths, table]
    numbers = torch.frombuffer(array("q", chain(*fields)), dtype=torch.int64)
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    parts = numbers.to(device, non_blocking=True).split([len(values) for values in fields])
    return VarlenPlan(
        input_ids=parts[0][None],
        position_ids=parts[1][None],
        write=parts[2],
        sample_rows=parts[3],
        row_bounds=parts[4].int(),
        lengths=parts[5].int(),
        block_table=parts[6].int().view(len(items), width),
        max_rows=max(len(item.token_ids) for item in items),
        block_size=block_size,
        adapter_rows=find_adapter_rows(items, owners, samples, device),
    )


def attend_varlen(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: VarlenPlan,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[rows, heads, head_dim] for query [1, heads, rows, head_dim] and a layer's part of the pool.

    The kernel aligns a sequence's rows with the end of what is cached of it, and its window counts
    the positions before a row; ours counts the row too. One split: a row's bits do not depend on
    its batch mates by way of splits (a kernel may still choose tiles by the shapes of the pass).
    """
    blocks = (-1, plan.block_size, *keys.shape[1:])
    output: torch.Tensor = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        keys.view(blocks),
        values.view(blocks),
        plan.row_bounds,
        None,
        plan.max_rows,
        plan.block_table.shape[1] * plan.block_size,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[1],
        seqused_k=plan.lengths,
        block_table=plan.block_table,
        num_splits=1,
    )
    return output


def varlen_problem(
    shapes: set[tuple[int, int]], dtype: torch.dtype, device: torch.device, block_size: int
) -> str | None:
    """Why the kernel cannot serve layers of these (kv_heads, head_dim); None when it can.

    Switches the process to the FlashAttention implementation that this device needs.
    """
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in TYPES:
        return f"it needs float16 or bfloat16, not {dtype}"
    if any(head_dim > MAX_HEAD_DIM or head_dim % 8 for _, head_dim in shapes):
        return f"a head's width must be a multiple of 8 and at most {MAX_HEAD_DIM}"
    major, minor = torch.cuda.get_device_capability(device)
    name = PAGED_IMPLEMENTATIONS.get(major)
    if name is None or name not in list_flash_attention_impls():
        return f"no kernel of torch reads block tables on compute capability {major}.{minor}"
    is_in_use = current_flash_attention_impl() == name  # by another model of this process
    if not is_in_use:
        try:
            activate_flash_attention_impl(name)
        except Exception as error:  # a package of its own: built for another torch, for example
            _log.exception("%s cannot be used", name)
            return f"{name} is not installed ({error})"
    problem = try_kernel(shapes, dtype, device, block_size)
    if problem is None:
        return None
    if not is_in_use:
        restore_flash_attention_impl()
    return f"{name} {problem}"


def try_kernel(
    shapes: set[tuple[int, int]], dtype: torch.dtype, device: torch.device, block_size: int
) -> str | None:
    """What goes wrong when the kernel attends over each of these (kv_heads, head_dim)."""
    for kv_heads, head_dim in sorted(shapes):
        for window in (None, 5):
            try:
                error = kernel_error(kv_heads, head_dim, dtype, device, block_size, window)
            except Exception as refusal:  # FA4's compiler has exceptions of its own
                _log.exception("the paged attention kernel failed its trial")
                return f"refused: {refusal}"
            if not error < TOLERANCE:
                return f"is off by {error:.3f} (window {window})"
    return None


def kernel_error(
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    window: int | None,
) -> float:
    """Largest error on two sequences with interleaved blocks, against attention row by row."""
    generator = torch.Generator(device).manual_seed(0)
    lengths, num_rows = (2 * block_size + min(block_size, 3), block_size + 1), (3, 1)
    blocks = ((4, 0, 2), (1, 3))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    keys, values = (random(5 * block_size, kv_heads, head_dim) for _ in range(2))
    query = random(1, 2 * kv_heads, sum(num_rows), head_dim)
    rows = [
        SequenceRows(length - count, (0,) * count, 0, table)
        for length, count, table in zip(lengths, num_rows, blocks, strict=True)
    ]
    plan = plan_varlen(rows, block_size, device)
    found = attend_varlen(query, keys, values, plan, None, window)
    worst, row = 0.0, 0
    for item in rows:
        for position in range(item.start, item.start + len(item.token_ids)):
            seen = range(max(0, position + 1 - (window or position + 1)), position + 1)
            slots = [item.blocks[p // block_size] * block_size + p % block_size for p in seen]
            expected = F.scaled_dot_product_attention(
                query[:, :, row : row + 1].float(),
                keys[slots].float().transpose(0, 1)[None],
                values[slots].float().transpose(0, 1)[None],
                enable_gqa=True,
            )
            worst = max(worst, (found[row].float() - expected[0, :, 0]).abs().max().item())
            row += 1
    return worst
