"""The endless loop of a replica: started, woken, watched and ended the same way on both sides.

Knows nothing of what a turn does. A turn that raises ends the loop: that is a bug of ours, said
in this replica's log, and the health check then has Serve replace the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)


class PassLoop:
    """Runs `turn` again and again; `on_end` is called once, however the loop ends."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], Awaitable[None]],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._turn = turn
        self._on_end = on_end
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"paceline-{self._name}-passes")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def check_health(self) -> None:
        """Raises RuntimeError when the loop has ended or was never started."""
        if not self.is_running:
            task = self._task
            error = None if task is None or task.cancelled() else task.exception()
            raise RuntimeError(f"the pass loop of this {self._name} is not running: {error!r}")

    def wake(self) -> None:
        """Something changed: the present or the next `wait` returns at once."""
        self._wake.set()

    async def wait(self, timeout_s: float | None) -> None:
        """Until `wake` was called in this turn, or the time is over (None: no limit)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                await self._turn()
        except Exception:
            logger.exception("the pass loop of this %s failed", self._name)
            raise
        finally:
            self._on_end()
