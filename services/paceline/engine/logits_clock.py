"""When a pass had its logits: its first half is the model's, the second the sampler's.

On a GPU the process runs ahead of the device, so the device itself has to say; it is not waited
for until the tokens are here anyhow.
"""

from __future__ import annotations

import time

import torch


class LogitsClock:
    """`logits_us` of the last pass, on the process's monotonic clock; 0 before the first."""

    def __init__(self) -> None:
        self.logits_us = 0
        # Reused: of the logits, and of the tokens behind them.
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def mark(self, logits: torch.Tensor) -> None:
        """The model's work for these logits has been begun, on the current stream."""
        if not logits.is_cuda:
            self.logits_us = time.monotonic_ns() // 1000
            return
        if self._events is None:
            first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._events = first, second
        self._events[0].record()

    def end(self, logits: torch.Tensor) -> None:
        """The tokens have been read: the device has nothing left to do."""
        if not logits.is_cuda or self._events is None:
            return
        begun, ended = self._events
        ended.record()
        ended.synchronize()
        sample_us = int(begun.elapsed_time(ended) * 1000)
        self.logits_us = time.monotonic_ns() // 1000 - sample_us
