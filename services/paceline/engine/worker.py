"""The one thread that owns an engine, seen from an event loop.

It adds sequences on first sight, frees them before the next pass and times each pass. It knows
nothing of what the passes mean.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.engine.base import (
    Engine,
    EngineBroken,
    EngineInfo,
    OutOfBlocks,
    StepItem,
    StepResult,
)
from paceline.sampling.params import SamplingParams

# No sequence of a target or draft has this id: theirs count from 1.
_PROBE_ID = 0
# Longest wait for the thread, which may be counting blocks.
_BEGIN_TIMEOUT_S = 0.001
_PROBE = StepItem(_PROBE_ID, 0, (0,), 1, SamplingParams(temperature=0.0))


@dataclass(frozen=True, slots=True)
class PassResult:
    """`started_us` and `ended_us` are the process's monotonic clock around `Engine.step`;
    `num_free_blocks` is the engine's count after it. `logits_us`: when it began to sample, 0 where
    the engine does not know."""

    results: list[StepResult]
    started_us: int
    ended_us: int
    num_free_blocks: int = 0
    logits_us: int = 0


def monotonic_us() -> int:
    """The clock of all times in this process, microseconds."""
    return time.monotonic_ns() // 1000


class EngineWorker:
    """`await run(...)` steps the engine on its own thread; the event loop never blocks.

    A pass that takes longer than `max_pass_s` (None: no limit) hangs: the engine is then broken,
    as after an `EngineBroken` of its own, and does nothing more. `now_us` is the clock of all
    times that are told to others.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_pass_s: float | None = None,
        now_us: Callable[[], int] = monotonic_us,
    ) -> None:
        self.now_us = now_us
        self._engine = engine
        self._max_pass_s = max_pass_s
        self._broken: EngineBroken | None = None
        self._known: set[int] = set()
        self._begun = threading.Lock()  # free: the thread has begun with what it was given last
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="paceline-engine")

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def run(self, released: Sequence[int], items: Sequence[StepItem]) -> PassResult:
        """Free `released`, then one pass over `items` (none: only the freeing).

        The engine's exceptions come through; `OutOfBlocks` means that nothing changed,
        `EngineBroken` that there will be no more passes.
        """
        return await self.start(released, items)

    def start(
        self, released: Sequence[int], items: Sequence[StepItem]
    ) -> Coroutine[None, None, PassResult]:
        """As `run`, but the engine begins now; the result must be awaited.

        Waits for its thread to begin: what the caller does next would keep the interpreter's
        lock from it, for up to 5 ms.
        """
        self.check_health()
        self._begun.acquire(blocking=False)
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, self._run, released, items)
        self._begun.acquire(timeout=_BEGIN_TIMEOUT_S)
        return self._watch(running)

    async def _watch(self, running: asyncio.Future[PassResult]) -> PassResult:
        watch = asyncio.timeout(self._max_pass_s)
        try:
            async with watch:
                return await running
        except EngineBroken as broken:
            self._broken = broken
            raise
        except TimeoutError as error:
            if not watch.expired():
                raise
            # The thread cannot be stopped: it stays behind until the process ends.
            self._broken = EngineBroken(f"a pass did not end within {self._max_pass_s} s")
            raise self._broken from error

    async def probe(self) -> None:
        """After a pass that failed: `EngineBroken` if not even one row of its own gets through.

        A device that is gone for good (as CUDA is after an illegal access) raises the same errors
        as a batch that cannot be computed; unnoticed, its replica would fail all that comes.
        """
        try:
            await self.run([], [_PROBE])
        except OutOfBlocks:
            pass  # nothing learned: the next failure finds room
        except EngineBroken:
            raise
        except Exception as error:
            self._broken = EngineBroken(f"not even a single row can be computed: {error!r}")
            raise self._broken from error
        await self.run([_PROBE_ID], [])

    def check_health(self) -> None:
        """Raises `EngineBroken` once the engine can do no more passes."""
        if self._broken is not None:
            raise EngineBroken(str(self._broken)) from self._broken

    def _run(self, released: Sequence[int], items: Sequence[StepItem]) -> PassResult:
        if self._begun.locked():
            self._begun.release()
        for sequence_id in released:
            if sequence_id in self._known:
                self._known.discard(sequence_id)
                self._engine.free(sequence_id)
        for item in items:
            if item.sequence_id not in self._known:
                self._engine.add(item.sequence_id)
                self._known.add(item.sequence_id)
        started_us = self.now_us()
        results = self._engine.step(items) if items else []
        stats = self._engine.stats()
        logits_us = stats.logits_us if items else 0
        return PassResult(results, started_us, self.now_us(), stats.num_free_blocks, logits_us)

    async def free_blocks(self, *, check: bool = False) -> int:
        """Free KV blocks after everything queued so far.

        `check` goes through the whole bookkeeping first (AssertionError), which hashes every
        cached token again: for tests. `EngineBroken` when there is no engine to ask any more.
        """
        self.check_health()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._count, check)

    def _count(self, check: bool) -> int:
        if check:
            self._engine.check_integrity()
        return self._engine.stats().num_free_blocks

    def close(self) -> None:
        """Ends the thread, which may take the rest of a pass; not one that is broken, though."""
        self._executor.shutdown(wait=self._broken is None, cancel_futures=True)
