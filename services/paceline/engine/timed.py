"""Gives any engine the step costs of another machine. Knows no model; reads no clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline.engine.base import Engine, EngineInfo, EngineStats, StepItem, StepResult


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
    """Each step of `engine` takes `base_ms + row_ms * rows` more, by calling `sleep(seconds)`.

    Only rows that the engine computes count: what it finds in its prefix cache costs nothing.
    The scheduling around it is real; only the model is not. A step that raises costs nothing.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        base_ms: float,
        row_ms: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if base_ms < 0 or row_ms < 0:
            raise ValueError(f"costs must be >= 0, got {base_ms} ms and {row_ms} ms a row")
        super().__init__(engine)
        self._base_ms = base_ms
        self._row_ms = row_ms
        self._sleep = sleep

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        num_before = self._engine.stats().num_rows
        results = self._engine.step(items)
        num_rows = self._engine.stats().num_rows - num_before
        self._sleep((self._base_ms + self._row_ms * num_rows) / 1000.0)
        return results
