"""The heartbeat that every replica runs towards the Controller. Knows neither side's content."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_REPORT_TIMEOUT_FACTOR = 5.0
_GOODBYE_TIMEOUT_S = 1.0


class HeartbeatLoop:
    """Calls `report` every `interval_s`; a failed or slow report is logged once and repeated.

    While the Controller is away nothing changes here: the last assignment stays in force.
    """

    def __init__(
        self,
        interval_s: float,
        report: Callable[[], Awaitable[None]],
        goodbye: Callable[[], Awaitable[None]],
    ) -> None:
        self._interval_s = interval_s
        self._report = report
        self._goodbye = goodbye
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._hurried = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="paceline-heartbeats")

    def hurry(self) -> None:
        """There is news: the next beat comes now."""
        self._hurried.set()

    async def stop(self) -> None:
        """No more beats, and an orderly goodbye: nobody waits for this replica's timeout."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                await self._goodbye()
        except Exception as error:
            # When everything stops, the controller may be gone first; silence says the same.
            logger.info("the controller did not hear the goodbye: %r", error)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s * _REPORT_TIMEOUT_FACTOR):
                    await self._report()
                self._is_failing = False
            except Exception as error:
                # Whatever Serve raises while the Controller restarts, the next beat tries again.
                if not self._is_failing:
                    logger.warning("no answer from the controller: %r", error)
                self._is_failing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._hurried.wait()
            self._hurried.clear()
