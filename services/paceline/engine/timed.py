"""Gives any engine the step costs of another machine. Knows no model and no schedule."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.engine.base import Engine, EngineInfo, EngineStats, StepItem, StepResult

# How much too late the system may wake a thread: the last of a wait is spent awake.
_WAKE_MARGIN_S = 0.0003


def sleep_exactly(seconds: float) -> None:
    """Sleep to within some microseconds: `time.sleep` alone wakes 60 to 200 of them too late.

    At the end it yields to other threads and processes, but uses the time that nobody wants.
    """
    deadline = time.perf_counter() + seconds
    if seconds > _WAKE_MARGIN_S:
        time.sleep(seconds - _WAKE_MARGIN_S)
    while time.perf_counter() < deadline:
        os.sched_yield()  # unlike time.sleep(0) it costs no timer


class EngineWrapper:
    """An engine that passes everything on to `engine`; subclasses change some of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def add(self, sequence_id: int) -> None:
        self._engine.add(sequence_id)

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        return self._engine.step(items)

    def cached_len(self, sequence_id: int) -> int:
        return self._engine.cached_len(sequence_id)

    def can_fit(self, items: Sequence[tuple[int, int]]) -> bool:
        return self._engine.can_fit(items)

    def free(self, sequence_id: int) -> None:
        self._engine.free(sequence_id)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def check_integrity(self) -> None:
        self._engine.check_integrity()


class TimedEngine(EngineWrapper):
    """Each step of `engine` takes `base_ms + row_ms * rows` in all, by calling `sleep(seconds)`.

    What `engine` itself needs is part of it: only the rest is slept away, and nothing where it
    needs more (`num_late` counts those steps). Only rows that the engine computes count: what it
    finds in its prefix cache costs nothing. The scheduling around it is real; only the model is
    not. A step that raises costs nothing. `busy_s` is the time spent in steps, by `clock`.
    What `engine` needs to sample is at the end of a step: the time slept away is the model's.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        base_ms: float,
        row_ms: float = 0.0,
        sleep: Callable[[float], None] = sleep_exactly,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if base_ms < 0 or row_ms < 0:
            raise ValueError(f"costs must be >= 0, got {base_ms} ms and {row_ms} ms a row")
        super().__init__(engine)
        self._base_ms = base_ms
        self._row_ms = row_ms
        self._sleep = sleep
        self._clock = clock
        self.busy_s = 0.0
        self.num_late = 0
        self._shift_us = 0  # what the last step's logits came later than the engine believes

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        began = self._clock()
        num_before = self._engine.stats().num_rows
        results = self._engine.step(items)
        num_rows = self._engine.stats().num_rows - num_before
        cost_s = (self._base_ms + self._row_ms * num_rows) / 1000.0
        ended = self._clock()
        left_s = began + cost_s - ended
        if left_s > 0:
            self._sleep(left_s)
        elif cost_s:
            self.num_late += 1
        self._shift_us = int((self._clock() - ended) * 1e6)
        self.busy_s += self._clock() - began
        return results

    def stats(self) -> EngineStats:
        stats = self._engine.stats()
        if not stats.logits_us:
            return stats
        return replace(stats, logits_us=stats.logits_us + self._shift_us)
