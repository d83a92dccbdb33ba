"""The disk of the service's logs and caches is full.

A tiny full file system is mounted over the folder of the Serve logs. A process that runs keeps
the files that it has open, so scenarios let replicas start meanwhile.
"""

import asyncio
import os
import random
import subprocess
from pathlib import Path

from chaos.cluster import Cluster
from chaos.faults.base import TTL_S, Fault

SIZE_KB = 64


class DiskFull(Fault):
    """New log files and whatever is opened anew fail with "no space left on device"."""

    name = "disk_full"
    why_not = "" if os.geteuid() == 0 else "mounting a small tmpfs needs root"

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._mounted: Path | None = None

    async def inject(self) -> None:
        folder = _logs()
        await asyncio.to_thread(_mount, folder)
        self._mounted = folder
        self.num_fired += await asyncio.to_thread(_fill, folder)

    async def heal(self) -> None:
        if self._mounted is not None:
            await asyncio.to_thread(subprocess.run, ["umount", "-l", self._mounted])
            self._mounted = None


def _logs() -> Path:
    """Of our own Ray: others may run on this machine."""
    import ray

    return Path(ray._private.worker._global_node.get_session_dir_path()) / "logs" / "serve"


def _mount(folder: Path) -> None:
    """Unmounts itself after the time-to-live, whatever became of the harness."""
    options = f"size={SIZE_KB}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "chaos", folder], check=True)
    subprocess.Popen(
        ["sh", "-c", f"sleep {TTL_S:.0f}; umount -l {folder} 2>/dev/null"],
        start_new_session=True,
    )


def _fill(folder: Path) -> int:
    """1 once not another byte fits."""
    try:
        with open(folder / "full", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    except OSError:
        return 1
