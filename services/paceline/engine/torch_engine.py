"""`Engine` on any Hugging Face causal LM whose attention goes through the attention interface.

One forward pass for decode, verify and prefill rows together; only sampled rows reach the output
layer. It knows ids and positions: no text, request, draft or target, and no particular device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.engine.base import EngineInfo, EngineStats, StepItem, StepResult
from paceline.engine.blocks import BlockPool
from paceline.engine.checks import check_items
from paceline.engine.pass_plan import SequenceRows
from paceline.engine.runner import Runner
from paceline.engine.sampler import BatchedSampler, SampleRow


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._info = info
        self._clock = clock
        self._pool = BlockPool(info.num_blocks, info.block_size)
        self._sampler = BatchedSampler(draft_top_n=draft_top_n)
        self._num_passes = 0
        self._num_rows = 0
        self._forward_s = 0.0
        self._sample_s = 0.0

    @property
    def info(self) -> EngineInfo:
        return self._info

    def add(self, sequence_id: int) -> None:
        self._pool.add(sequence_id)

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if not items:
            return []
        with self._reserved(items):
            return self._run(items)

    def cached_len(self, sequence_id: int) -> int:
        return self._pool.table(sequence_id).length

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        return self._pool.can_fit(items)

    def free(self, sequence_id: int) -> None:
        self._pool.free(sequence_id)

    def stats(self) -> EngineStats:
        """`extra`: seconds in forward passes and in the sampler, and rows with NaN logits."""
        return EngineStats(
            num_free_blocks=self._pool.num_free_blocks,
            num_sequences=self._pool.num_sequences,
            num_passes=self._num_passes,
            num_rows=self._num_rows,
            extra={
                "forward_s": self._forward_s,
                "sample_s": self._sample_s,
                "num_bad_rows": float(self._sampler.num_bad_rows),
            },
        )

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    def logits(self, items: Sequence[StepItem]) -> torch.Tensor:
        """A step that returns logits [samples, vocab_size] instead of tokens, for tests and tools.

        The cache changes as in `step`.
        """
        with self._reserved(items):
            return self._forward(items)

    @contextmanager
    def _reserved(self, items: Sequence[StepItem]) -> Iterator[None]:
        """Blocks for the rows of a pass; afterwards the rows count, or are as if never begun."""
        check_items(items, self._info, self._pool)
        self._pool.reserve((item.sequence_id, item.start, len(item.token_ids)) for item in items)
        is_done = False
        try:
            with torch.inference_mode():
                yield
            is_done = True
        finally:
            # After a failed forward nothing beyond `start` can be trusted: give it back.
            for item in items:
                if is_done:
                    self._pool.commit(item.sequence_id, item.start + len(item.token_ids))
                else:
                    self._pool.truncate(item.sequence_id, item.start)

    def _run(self, items: Sequence[StepItem]) -> list[StepResult]:
        began = self._clock()
        logits = self._forward(items)
        forwarded = self._clock()
        tokens = self._sampler.sample(logits, _sample_rows(items))
        self._sample_s += self._clock() - forwarded
        self._forward_s += forwarded - began
        self._num_passes += 1
        self._num_rows += sum(len(item.token_ids) for item in items)
        results, taken = [], 0
        for item in items:
            sampled = tuple(tokens[taken : taken + item.num_samples])
            results.append(StepResult(item.sequence_id, sampled))
            taken += item.num_samples
        return results

    def _forward(self, items: Sequence[StepItem]) -> torch.Tensor:
        rows = [
            SequenceRows(
                item.start,
                item.token_ids,
                item.num_samples,
                tuple(self._pool.table(item.sequence_id).blocks),
            )
            for item in items
        ]
        return self._runner.forward(rows)


def _sample_rows(items: Sequence[StepItem]) -> list[SampleRow]:
    return [
        SampleRow(item.sampling, item.output_index + offset)
        for item in items
        for offset in range(item.num_samples)
    ]
