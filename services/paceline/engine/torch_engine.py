"""`Engine` on any Hugging Face causal LM whose attention goes through the attention interface.

One forward pass for decode, verify and prefill rows together; only rows whose logits somebody
needs reach the output layer. It knows ids and positions: no text, request, draft or target, and
no particular device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.engine.base import EngineInfo, EngineStats, StepItem, StepResult
from paceline.engine.blocks import BlockPool, Reservation
from paceline.engine.checks import check_items
from paceline.engine.grammar_masks import GrammarMasks
from paceline.engine.logits_clock import LogitsClock
from paceline.engine.medusa import HeadSampler
from paceline.engine.pass_plan import SequenceRows
from paceline.engine.pass_results import pass_parts, pass_results
from paceline.engine.runner import Runner
from paceline.engine.sampler import BatchedSampler
from paceline.engine.step_rows import num_logit_rows, wanted_rows


class TorchEngine:
    """See `engine/base.py` for the contract.

    `runner` holds the model and its KV tensors. `clock` gives seconds, for the timings in
    `stats().extra` alone.
    """

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        *,
        draft_top_n: int | None = None,
        enable_prefix_caching: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._info = info
        self._clock = clock
        self._pool = BlockPool(
            info.num_blocks, info.block_size, enable_prefix_caching=enable_prefix_caching
        )
        self._sampler = BatchedSampler(draft_top_n=draft_top_n)
        self._heads = HeadSampler(info.num_heads, info.vocab_size, runner.head_logits)
        self._masks = GrammarMasks(info.grammars)
        self._num_passes = 0
        self._num_rows = 0
        self._forward_s = 0.0
        self._sample_s = 0.0
        self._logits_clock = LogitsClock()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, sequence_id: int) -> None:
        self._pool.add(sequence_id)

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if not items:
            return []
        with self._reserved(items) as reservations:
            return self._run(items, reservations)

    def cached_len(self, sequence_id: int) -> int:
        return self._pool.table(sequence_id).length

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        return self._pool.can_fit(items)

    def free(self, sequence_id: int) -> None:
        self._pool.free(sequence_id)
        self._masks.free(sequence_id)

    def stats(self) -> EngineStats:
        """`extra`: seconds in forward passes and in the sampler, and rows with NaN logits."""
        return EngineStats(
            num_free_blocks=self._pool.num_free_blocks,
            num_sequences=self._pool.num_sequences,
            num_passes=self._num_passes,
            num_rows=self._num_rows,
            num_prefix_tokens=self._pool.num_prefix_tokens,
            num_prefix_queries=self._pool.num_prefix_queries,
            extra={
                "forward_s": self._forward_s,
                "sample_s": self._sample_s,
                "num_bad_rows": float(self._sampler.num_bad_rows),
            },
            logits_us=self._logits_clock.logits_us,
        )

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    def logits(self, items: Sequence[StepItem]) -> torch.Tensor:
        """A step that returns logits [needed rows, vocab_size] instead of tokens, for tests and
        tools. The cache changes as in `step`, but no node of a tree is accepted."""
        with self._reserved(items) as reservations:
            logits = self._forward(items, reservations)
            for item, reservation in zip(items, reservations, strict=True):
                if item.tree_parents:
                    reservation.accept(len(item.tree_parents), ())
            return logits

    @contextmanager
    def _reserved(self, items: Sequence[StepItem]) -> Iterator[list[Reservation]]:
        """Blocks for the rows of a pass; afterwards the rows count, or are as if never begun."""
        check_items(items, self._info, self._pool)
        reservations = self._pool.reserve(map(wanted_rows, items))
        is_done = False
        try:
            with torch.inference_mode():
                yield reservations
            is_done = True
        finally:
            # After a failed forward nothing that it wrote can be trusted.
            end = self._pool.commit if is_done else self._pool.abort
            for reservation in reservations:
                end(reservation)
        self._num_passes += 1
        self._num_rows += sum(len(reservation.computed_ids) for reservation in reservations)

    def _run(
        self, items: Sequence[StepItem], reservations: Sequence[Reservation]
    ) -> list[StepResult]:
        began = self._clock()
        logits = self._forward(items, reservations)
        forwarded = self._clock()
        self._logits_clock.mark(logits)
        tables = (self._pool.table(item.sequence_id) for item in items)
        # on a GPU the masks are made while it computes
        parts = pass_parts(items, reservations, tables, self._masks)
        results = pass_results(parts, logits, self._sampler)
        self._move_accepted(reservations)
        self._heads.add(parts, results)
        self._logits_clock.end(logits)
        self._sample_s += self._clock() - forwarded
        self._forward_s += forwarded - began
        return results

    def _move_accepted(self, reservations: Sequence[Reservation]) -> None:
        """The accepted nodes of trees to where a decoded token's KV would be."""
        size = self._info.block_size
        slots = [pair for reservation in reservations for pair in reservation.moved_slots(size)]
        if slots:
            self._runner.move(slots)

    def _forward(
        self, items: Sequence[StepItem], reservations: Sequence[Reservation]
    ) -> torch.Tensor:
        """Logits [needed rows, vocab_size]; what the output layer has beyond real ids is cut off,
        so that no id comes out which no tokenizer knows."""
        rows = [
            SequenceRows(
                reservation.first,
                reservation.computed_ids,
                num_logit_rows(item, reservation),
                reservation.blocks,
                reservation.copied_block,
                item.adapter,
                item.tree_parents,
            )
            for item, reservation in zip(items, reservations, strict=True)
            if reservation.computed_ids  # else the prefix cache held all of it
        ]
        if not rows:
            return torch.empty(0, self._info.vocab_size)
        return self._runner.forward(rows)[:, : self._info.vocab_size]
