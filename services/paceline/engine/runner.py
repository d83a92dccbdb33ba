"""Runs one planned pass through a model: rows in, logits out. The seam of tensor parallelism.

Owns weights and KV tensors, and decides nothing: which sequences, which blocks and which tokens
come out is the engine's affair. Given equal rows, every rank's runner makes the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.engine.lora import CurrentPass
from paceline.engine.medusa import MedusaHeads
from paceline.engine.paged_attention import PassContext, ShapeProbe, allocate_pool
from paceline.engine.pass_plan import PassPlan, SequenceRows, plan_pass
from paceline.engine.varlen_attention import VarlenPlan


class Runner(Protocol):
    """`dtype` and `device` are the model's."""

    dtype: torch.dtype
    device: torch.device

    def forward(self, rows: Sequence[SequenceRows]) -> torch.Tensor:
        """Logits [samples, output width] of the rows asked for, in order; writes the KV cache."""

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        """Copy the KV of slots (source, destination); all are read before any is written."""

    def head_logits(self, rows: Sequence[int]) -> torch.Tensor:
        """Logits [heads, len(rows), output width] of the Medusa heads, for rows of what the last
        `forward` returned; only where there are heads."""

    def close(self) -> None:
        """Let go of everything outside this process (other ranks)."""


class ModelRunner:
    """One process, one device. `model` attends through our function, as `probe` recorded.

    `adapters`: where the model's LoRA layers look for the rows of a pass; None: it has none.
    `heads`: attached to the model.
    """

    def __init__(
        self,
        model: Any,
        probe: ShapeProbe,
        num_blocks: int,
        block_size: int,
        *,
        row_by_row: bool = False,
        adapters: CurrentPass | None = None,
        heads: MedusaHeads | None = None,
    ) -> None:
        self._model = model
        self._heads = heads
        self._final_hidden: torch.Tensor | None = None
        self._row_by_row = row_by_row
        self._adapters = adapters
        self._block_size = block_size
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._kv = allocate_pool(probe, num_blocks * block_size, self.dtype, self.device)

    def forward(self, rows: Sequence[SequenceRows]) -> torch.Tensor:
        self._copy_blocks(rows)
        return self._forward(rows)

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        self._kv.move_slots(slots)

    def _copy_blocks(self, rows: Sequence[SequenceRows]) -> None:
        size = self._block_size
        self._kv.copy_blocks(
            [
                (item.copied_block, item.blocks[item.start // size])
                for item in rows
                if item.copied_block is not None
            ],
            size,
        )

    def _forward(self, rows: Sequence[SequenceRows]) -> torch.Tensor:
        plan = plan_pass(
            rows, self._block_size, self.dtype, self.device, row_by_row=self._row_by_row
        )
        return self._run(plan)

    def _run(self, plan: PassPlan | VarlenPlan) -> torch.Tensor:
        if self._adapters is not None:
            self._adapters.begin(plan)
        output = self._model(
            input_ids=plan.input_ids,
            position_ids=plan.position_ids,
            use_cache=False,
            logits_to_keep=plan.sample_rows,
            paged=PassContext(self._kv, plan),
        )
        if self._heads is not None:
            self._final_hidden = self._heads.final_hidden
        logits: torch.Tensor = output.logits[0]
        return logits

    def head_logits(self, rows: Sequence[int]) -> torch.Tensor:
        assert self._heads is not None, "there are no heads"
        assert self._final_hidden is not None, "no pass was run"
        picked = self._final_hidden[torch.tensor(rows, device=self.device)]
        logits: torch.Tensor = self._heads(picked)
        return logits

    def close(self) -> None:
        pass
