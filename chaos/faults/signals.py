"""The three things that a signal does to a replica: end it, stop it, slow it down."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import Iterable
from typing import ClassVar

from chaos.cluster import Cluster, Replica
from chaos.faults.base import TTL_S, Attack, Fault

SLICE_S = 0.1


async def victims(
    fault: Fault, deployment: str, everyone: bool, spared: frozenset[int]
) -> list[Replica]:
    """One replica, drawn; or all. Never one of `spared`."""
    running = [r for r in await fault.cluster.replicas(deployment) if r.pid not in spared]
    if everyone or not running:
        return running
    return [fault.rng.choice(running)]


class Kill(Fault):
    """SIGKILL; Serve starts another one."""

    deployment: ClassVar[str]
    everyone: ClassVar[bool] = False

    def __init__(self, cluster: Cluster, rng: random.Random, spared: Iterable[int] = ()) -> None:
        super().__init__(cluster, rng)
        self.spared = frozenset(spared)

    async def inject(self) -> None:
        for replica in await victims(self, self.deployment, self.everyone, self.spared):
            self.num_fired += self.cluster.kill(replica.pid)


class Stop(Fault):
    """SIGSTOP, and SIGCONT when it heals. A watcher process lets it go on if nobody does."""

    deployment: ClassVar[str]

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._stopped: list[tuple[int, subprocess.Popen[bytes]]] = []

    async def inject(self) -> None:
        for replica in await victims(self, self.deployment, False, frozenset()):
            self._stopped.append((replica.pid, watcher_of(replica.pid)))
            self.num_fired += self.cluster.kill(replica.pid, signal.SIGSTOP)

    async def heal(self) -> None:
        for pid, watcher in self._stopped:
            self.cluster.kill(pid, signal.SIGCONT)
            watcher.kill()
            await asyncio.to_thread(watcher.wait)
        self._stopped.clear()


class Slow(Attack):
    """Stopped nine tenths of the time: a tenth of its speed."""

    deployment: ClassVar[str]
    share_running: ClassVar[float] = 0.1

    async def attack(self) -> None:
        chosen = await victims(self, self.deployment, False, frozenset())
        if not chosen:
            return
        pid = chosen[0].pid
        watcher = watcher_of(pid)
        try:
            while self.cluster.kill(pid, signal.SIGSTOP):
                self.num_fired = 1
                await asyncio.sleep(SLICE_S * (1 - self.share_running))
                self.cluster.kill(pid, signal.SIGCONT)
                await asyncio.sleep(SLICE_S * self.share_running)
        finally:
            self.cluster.kill(pid, signal.SIGCONT)
            watcher.kill()
            await asyncio.to_thread(watcher.wait)


def watcher_of(pid: int, seconds: float = TTL_S + 5) -> subprocess.Popen[bytes]:
    """A process that wakes `pid` up after so long, also when the harness is dead."""
    return subprocess.Popen(["sh", "-c", f"sleep {seconds:.0f}; kill -CONT {pid} 2>/dev/null"])
