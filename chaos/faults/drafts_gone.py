"""Every draft is killed and none comes back: Serve's replacements are stopped as they start."""

import asyncio
import signal
import subprocess
from pathlib import Path

from chaos.faults.base import Attack
from chaos.faults.signals import watcher_of
from paceline.cli import processes

TITLE = b"ray::ServeReplica:paceline:DraftReplica"
POLL_S = 0.1
REST_S = 0.5  # between polls once all of them are held
MAX_HELD_S = 240


class DraftsGone(Attack):
    """A stopped replacement costs no CPU, as a machine that is not there."""

    name = "drafts_gone"
    ttl_s = MAX_HELD_S
    num_held = 0

    async def attack(self) -> None:
        wanted = len(await self.cluster.replicas("DraftReplica"))
        for replica in await self.cluster.replicas("DraftReplica"):
            self.num_fired += self.cluster.kill(replica.pid)
        held: dict[int, subprocess.Popen[bytes]] = {}
        try:
            while True:
                for pid in await asyncio.to_thread(_starting_drafts):
                    if pid not in held and self.cluster.kill(pid, signal.SIGSTOP):
                        held[pid] = watcher_of(pid, MAX_HELD_S)
                self.num_held = len(held)
                await asyncio.sleep(REST_S if len(held) >= wanted else POLL_S)
        finally:
            for pid, watcher in held.items():
                self.cluster.kill(pid, signal.SIGCONT)
                watcher.kill()
                watcher.wait()

    async def wait_gone(self) -> None:
        """Until all replacements are held."""
        wanted = self.num_fired
        while not wanted or self.num_held < wanted:
            await asyncio.sleep(POLL_S)
            wanted = self.num_fired


def _starting_drafts() -> list[int]:
    found = []
    for process in processes.descendants():
        try:
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if command.startswith(TITLE):
            found.append(process.pid)
    return found
