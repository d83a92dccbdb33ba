"""What every process of the service holds at one moment: memory, files, threads, tasks, KV.

Reads /proc and asks the replicas. A process is named by its pid and its start time, so that a
replacement is never taken for the one that it replaced.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos.cluster import Cluster
from paceline.cli import processes

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
OURS = ("Gateway", "TargetReplica", "DraftReplica", "Controller")
HARNESS = "harness"
# What must be as small as at the baseline once nothing is going on.
COUNTED = ("num_fds", "num_threads", "num_tasks")
EMPTY = (
    "num_running",
    "num_waiting",
    "num_reserved_blocks",
    "num_engine_blocks_used",
    "num_sessions",
    "num_in_progress",
)


@dataclass
class ProcessSample:
    """One process at one moment. `sizes`: what it says about itself, replicas only."""

    role: str
    pid: int
    started: int
    rss_mb: float
    num_fds: int
    num_threads: int
    num_tasks: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.role}/{self.pid}/{self.started}"

    @property
    def is_ours(self) -> bool:
        return self.role in OURS


@dataclass
class Sample:
    """All of them. `at_s` counts from the beginning of the run."""

    at_s: float
    processes: dict[str, ProcessSample]

    def as_json(self) -> dict[str, Any]:
        return {
            "at_s": round(self.at_s, 1),
            "processes": [asdict(p) for p in self.processes.values()],
        }


async def take(cluster: Cluster, started_s: float) -> Sample:
    """Ask the kernel and the replicas."""
    found = await asyncio.to_thread(_read_processes)
    by_pid = {sample.pid: sample for sample in found}
    for deployment in OURS[:3]:
        for stats in await cluster.stats(deployment):
            sample = by_pid.get(stats["pid"])
            if sample is not None:
                sample.num_tasks = stats["num_tasks"]
                sample.sizes = {key: stats[key] for key in EMPTY if key in stats}
    return Sample(time.monotonic() - started_s, {sample.key: sample for sample in found})


async def take_lowest(cluster: Cluster, started_s: float, times: int, pause_s: float) -> Sample:
    """Several moments, of each count the smallest: a call in flight is no leak."""
    lowest = await take(cluster, started_s)
    for _ in range(times - 1):
        await asyncio.sleep(pause_s)
        other = await take(cluster, started_s)
        for key, sample in other.processes.items():
            before = lowest.processes.setdefault(key, sample)
            before.rss_mb = min(before.rss_mb, sample.rss_mb)
            before.num_fds = min(before.num_fds, sample.num_fds)
            before.num_threads = min(before.num_threads, sample.num_threads)
            if sample.num_tasks is not None:
                before.num_tasks = min(before.num_tasks or sample.num_tasks, sample.num_tasks)
            before.sizes = {**before.sizes, **sample.sizes}
        for key in lowest.processes.keys() - other.processes.keys():
            del lowest.processes[key]
    return lowest


def _read_processes() -> list[ProcessSample]:
    own = {process for process in processes.descendants(os.getppid()) if process.pid == os.getpid()}
    found = [_read(process, HARNESS) for process in own]
    found += [_read(process, "") for process in processes.descendants()]
    return [sample for sample in found if sample is not None]


def _read(process: processes.Process, role: str) -> ProcessSample | None:
    """None when it ended meanwhile."""
    folder = Path(f"/proc/{process.pid}")
    try:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        resident = int((folder / "statm").read_text().split()[1])
        num_fds = len(os.listdir(folder / "fd"))
        num_threads = len(os.listdir(folder / "task"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return ProcessSample(
        role or _role(command),
        process.pid,
        process.started,
        round(resident * PAGE_BYTES / 2**20, 1),
        num_fds,
        num_threads,
    )


def _role(command: str) -> str:
    """ray::ServeReplica:paceline:TargetReplica -> TargetReplica; else what the program is."""
    title = command.split(" ", 1)[0]
    if title.startswith("ray::ServeReplica:"):
        return title.split(":")[4].split(".")[0]
    if title.startswith("ray::"):
        return title.removeprefix("ray::").split(".")[0].split(":")[0]
    words = [word for word in command.split() if not word.startswith("-")]
    for word in words[1:2]:
        if word.endswith(".py") or word.startswith("chaos."):
            return Path(word).name.removesuffix(".py")
    return Path(title).name
