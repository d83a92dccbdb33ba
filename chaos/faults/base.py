"""What every fault is: one way to break the service, and how to mend it.

A fault counts what it really did (`num_fired`): a run in which nothing was hit proves nothing.
`heal` may be called at any time and more than once; the harness calls it in a `finally`. What
would outlive the harness (a stopped process, a shaped link) ends by itself after TTL_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, ClassVar

from chaos.cluster import Cluster

TTL_S = 30.0


class Fault(ABC):
    """`why_not` says why a fault cannot be had here."""

    name: ClassVar[str]
    why_not: ClassVar[str] = ""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.num_fired = 0

    def available(self) -> bool:
        return not self.why_not

    @abstractmethod
    async def inject(self) -> None:
        """Break it; returns when it is broken."""

    async def heal(self) -> None:  # noqa: B027  most faults heal by what the service does
        """Undo what the service cannot mend by itself."""


class Attack(Fault):
    """A fault that goes on in the background until it is healed, at most `ttl_s`."""

    ttl_s: ClassVar[float] = TTL_S

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._task: asyncio.Task[None] | None = None

    async def inject(self) -> None:
        self._task = asyncio.create_task(
            _bounded(self.attack(), self.ttl_s), name=f"fault-{self.name}"
        )

    @abstractmethod
    async def attack(self) -> None:
        """Runs until it is cancelled, or ends by itself."""

    async def heal(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None


async def _bounded(work: Coroutine[Any, Any, None], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work
