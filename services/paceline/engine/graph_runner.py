"""Small passes padded to few shapes, so that each shape can be replayed as one CUDA graph.

A decode or verify pass over a few sequences costs a GPU less than the host needs to launch it.
Such passes are laid out as `num_seqs` x `num_rows`: too few rows of a sequence are filled up in
front, missing sequences behind, all with rows that write to a scratch block that nobody owns and
whose results nobody asks for. Prefill and other shapes run as they are, and so does a pass in which
somebody has a LoRA adapter or a tree: which rows are whose is not part of a graph. Without CUDA the
same padded pass simply runs, which is how it is tested. Knows rows and slots, like `ModelRunner`.
"""

from __future__ import annotations

import contextlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from paceline.engine.attention_group import AttentionGroup
from paceline.engine.lora import CurrentPass
from paceline.engine.medusa import MedusaHeads
from paceline.engine.paged_attention import ShapeProbe
from paceline.engine.pass_plan import PassPlan, SequenceRows
from paceline.engine.runner import ModelRunner
from paceline.engine.varlen_attention import VarlenPlan, plan_varlen

SEQS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
ROWS = (1, 2, 4, 6, 8, 12, 16)
# sdpa reads every position of a shape, needed or not: shapes of so many positions x 2^n.
MIN_POSITIONS = 256
MAX_PADDED_ROWS = 256  # more keep a GPU busy without help, and their logits would take much room
MAX_GRAPHS = 64  # each holds only its inputs; the rest of its memory is shared
NUM_WARMUPS = 2  # kernels are chosen, and workspaces allocated, outside of the capture

_log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """A padded pass: sequences, rows of each, blocks that each may read."""

    num_seqs: int
    num_rows: int
    num_blocks: int

    @property
    def sizes(self) -> list[int]:
        """int64 numbers of: ids, positions, slots written, rows sampled; lengths; block table."""
        rows = self.num_seqs * self.num_rows
        return [rows, rows, rows, rows, self.num_seqs, self.num_seqs * self.num_blocks]


@dataclass(slots=True)
class StaticPass:
    """The fixed buffers of one shape. `logits` is where the graph leaves them, [rows, width], and
    `hidden` for its final hidden states, [rows, hidden_size], if the model has Medusa heads."""

    host: torch.Tensor
    device: torch.Tensor
    copied: Any = None  # CUDA event: the host buffer may be written again
    graph: Any = None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


def pick_shape(rows: Sequence[SequenceRows], block_size: int, max_blocks: int) -> Shape | None:
    """The least shape that holds the pass; None when there is none or nothing is sampled.

    A shape has `max_blocks` blocks or fewer.
    """
    longest = max(len(item.token_ids) for item in rows)
    if len(rows) > SEQS[-1] or longest > ROWS[-1] or not any(item.num_samples for item in rows):
        return None
    num_seqs = next(size for size in SEQS if size >= len(rows))
    num_rows = next(size for size in ROWS if size >= longest)
    if num_seqs * num_rows > MAX_PADDED_ROWS:
        return None
    positions, needed = MIN_POSITIONS, max(item.start + len(item.token_ids) for item in rows)
    while positions < needed:
        positions *= 2
    return Shape(num_seqs, num_rows, min(-(-positions // block_size), max_blocks))


def pad_rows(
    rows: Sequence[SequenceRows], shape: Shape, block_size: int, scratch: int
) -> array[int]:
    """The numbers (int64) of a padded pass, in the order of `Shape.sizes`."""
    ids, positions, slots, samples = list[int](), list[int](), list[int](), list[int]()
    lengths, table = list[int](), array("q")  # the tables of long texts are most of it
    idle = SequenceRows(0, (0,), 0, (scratch,))
    for index, item in enumerate([*rows, *[idle] * (shape.num_seqs - len(rows))]):
        num_pads = shape.num_rows - len(item.token_ids)
        span = range(item.start, item.start + len(item.token_ids))
        ids += [0] * num_pads + list(item.token_ids)
        positions += [0] * num_pads + list(span)
        slots += [scratch * block_size] * num_pads
        slots += (item.blocks[p // block_size] * block_size + p % block_size for p in span)
        end = (index + 1) * shape.num_rows
        samples += range(end - item.num_samples, end)
        lengths.append(span.stop)
        blocks = item.blocks[: -(-span.stop // block_size)]
        table.extend(blocks)
        table += array("q", blocks[-1:]) * (shape.num_blocks - len(blocks))
    samples += [0] * (shape.num_seqs * shape.num_rows - len(samples))
    return array("q", ids + positions + slots + samples + lengths) + table


class GraphRunner(ModelRunner):
    """`ModelRunner` with padded passes; captures a graph per shape unless `use_graphs` is False.

    `use_varlen`: attend by `varlen_attn`, in padded and in other passes.
    """

    def __init__(
        self,
        model: Any,
        probe: ShapeProbe,
        num_blocks: int,
        block_size: int,
        *,
        max_model_len: int,
        use_varlen: bool,
        use_graphs: bool = True,
        adapters: CurrentPass | None = None,
        heads: MedusaHeads | None = None,
    ) -> None:
        super().__init__(model, probe, num_blocks + 1, block_size, adapters=adapters, heads=heads)
        self._scratch = num_blocks
        self._max_blocks = -(-max_model_len // block_size)
        self._windows = {window for window in probe.windows.values() if window is not None}
        self._use_varlen, self._use_graphs = use_varlen, use_graphs
        self._passes: dict[Shape, StaticPass] = {}
        # Shared by all graphs, because only one of them runs at a time. The stream is one for all,
        # because cuBLAS keeps a workspace for every stream that it ever saw.
        self._memory: Any = None
        self._side: Any = None
        self._logits: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None

    def _forward(self, rows: Sequence[SequenceRows]) -> torch.Tensor:
        if any(item.tree_parents for item in rows):  # a mask of its own for every tree
            return super()._forward(rows)
        can_replay = self._use_graphs and not any(item.adapter for item in rows)
        shape = pick_shape(rows, self._block_size, self._max_blocks) if can_replay else None
        if shape is not None and self._use_varlen:  # reads only what is there: one width for all
            shape = shape._replace(num_blocks=self._max_blocks)
        if shape is not None and (shape in self._passes or len(self._passes) < MAX_GRAPHS):
            return self._padded(rows, shape)
        if self._use_varlen:
            return self._run(plan_varlen(rows, self._block_size, self.device))
        return super()._forward(rows)

    def _padded(self, rows: Sequence[SequenceRows], shape: Shape) -> torch.Tensor:
        static = self._passes.get(shape)
        if static is None:
            on_cuda = self.device.type == "cuda"
            host = torch.zeros(sum(shape.sizes), dtype=torch.int64, pin_memory=on_cuda)
            static = StaticPass(host, torch.zeros_like(host, device=self.device))
            self._passes[shape] = static
        if static.copied is not None:
            static.copied.synchronize()
        numbers = pad_rows(rows, shape, self._block_size, self._scratch)
        # Far faster than torch.tensor, and the block tables of long texts are large.
        static.host.copy_(torch.frombuffer(numbers, dtype=torch.int64))
        static.device.copy_(static.host, non_blocking=True)
        num_samples = sum(item.num_samples for item in rows)
        if self.device.type != "cuda":
            return self._run(self._plan(static, shape))[:num_samples]
        with torch.cuda.device(self.device):
            static.copied = static.copied or torch.cuda.Event()
            static.copied.record()
            if static.graph is None:
                try:
                    self._capture(static, shape)
                except RuntimeError as error:  # a model that needs the host during a pass
                    _log.warning("passes are not captured as CUDA graphs: %s", error)
                    self._end_graphs()
                    return self._forward(rows)
            static.graph.replay()
        assert static.logits is not None
        self._final_hidden = static.hidden
        # The next replay overwrites them.
        return static.logits[:num_samples].clone()

    def _capture(self, static: StaticPass, shape: Shape) -> None:
        """Writes the KV of the present pass again and again, always the same."""
        if self._side is None:
            self._side, self._memory = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(NUM_WARMUPS):
                logits = self._run(self._plan(static, shape))
        torch.cuda.current_stream().wait_stream(side)
        if self._logits is None or len(self._logits) < len(logits):
            self._logits = torch.empty_like(logits)  # older graphs keep the smaller one
        static.logits = self._logits[: len(logits)]
        hidden = self._final_hidden
        if hidden is not None:
            if self._hidden is None or len(self._hidden) < len(hidden):
                self._hidden = torch.empty_like(hidden)
            static.hidden = self._hidden[: len(hidden)]
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph, pool=self._memory, stream=side, capture_error_mode="thread_local"
        )
        # The outer one takes us back from the side stream: a capture that fails does not.
        with torch.cuda.stream(side), capture:
            static.logits.copy_(self._run(self._plan(static, shape)))
            if static.hidden is not None:
                static.hidden.copy_(self._final_hidden)
        static.graph = graph

    def _end_graphs(self) -> None:
        """No graphs from now on, after a capture failed."""
        self._use_graphs = False
        # torch 2.13 leaves the allocator in the middle of the capture: it would free no cached
        # memory any more. There is no public way out; an error means that there is no need.
        if self._memory is not None:
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(self.device.index, self._memory)
                torch._C._cuda_releasePool(self.device.index, self._memory)
        self._passes.clear()

    def _plan(self, static: StaticPass, shape: Shape) -> PassPlan | VarlenPlan:
        """Computed on the device from the numbers alone: part of the graph."""
        ids, positions, write, samples, lengths, table = static.device.split(shape.sizes)
        table = table.view(shape.num_seqs, shape.num_blocks)
        if self._use_varlen:
            bounds = torch.arange(shape.num_seqs + 1, dtype=torch.int32, device=self.device)
            return VarlenPlan(
                input_ids=ids[None],
                position_ids=positions[None],
                write=write,
                sample_rows=samples,
                row_bounds=bounds * shape.num_rows,
                lengths=lengths.int(),
                block_table=table.int(),
                max_rows=shape.num_rows,
                block_size=self._block_size,
            )
        group = self._group(shape, lengths[:, None], table)
        return PassPlan(ids[None], positions[None], write, samples, [group])

    def _group(self, shape: Shape, lengths: torch.Tensor, table: torch.Tensor) -> AttentionGroup:
        length = shape.num_blocks * self._block_size
        position = torch.arange(length, device=self.device)[None]
        slot = torch.minimum(position, lengths - 1)  # beyond its end a sequence reads its end
        read = table.gather(1, slot // self._block_size) * self._block_size
        read = (read + slot % self._block_size).flatten()
        row = torch.arange(shape.num_rows, device=self.device)[None]
        # Padding in front of a short text sees its first position: a row that sees nothing is NaN.
        last = (lengths - shape.num_rows + row).clamp_min(0)[:, :, None]

        def group(hidden: torch.Tensor) -> AttentionGroup:
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            mask = mask.masked_fill(hidden, float("-inf"))[:, None]
            return AttentionGroup(0, shape.num_seqs, shape.num_rows, length, read, mask)

        full = group(position[None] > last)
        for window in self._windows:
            past = position[None] <= last - window
            full.windowed[window] = group((position[None] > last) | past)
        return full
