"""The process tree below this process, so that none of it is left behind.

Reads /proc. Where there is none (macOS) nothing is seen, and Ray's own shutdown has to do.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A pid may be reused after its process ended; with its start time it is unique."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True)
class _Status:
    process: Process
    parent: int
    is_zombie: bool


def _status(pid: int) -> _Status | None:
    """None when the process is gone. The command (in parentheses) may hold spaces: cut it off."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # state, ppid, ...; start time is the 20th
    return _Status(Process(pid, int(fields[19])), int(fields[1]), fields[0] in "ZX")


def descendants(root: int | None = None) -> frozenset[Process]:
    """All living processes below `root` (default: this one); a zombie has ended already."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    statuses = [status for pid in pids if (status := _status(pid)) is not None]
    children: dict[int, list[_Status]] = {}
    for status in statuses:
        children.setdefault(status.parent, []).append(status)
    found: set[Process] = set()
    queue = [os.getpid() if root is None else root]
    while queue:
        for status in children.get(queue.pop(), []):
            queue.append(status.process.pid)
            if not status.is_zombie:
                found.add(status.process)
    return frozenset(found)


def still_alive(processes: frozenset[Process]) -> frozenset[Process]:
    """Which of them still run, wherever they hang in the tree by now."""
    now = {process: _status(process.pid) for process in processes}
    return frozenset(
        process
        for process, status in now.items()
        if status is not None and status.process == process and not status.is_zombie
    )


def end(processes: frozenset[Process], grace_s: float) -> frozenset[Process]:
    """Wait up to `grace_s` for them to end by themselves, then kill; returns who was killed."""
    deadline = time.monotonic() + grace_s
    while (left := still_alive(processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in left:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended just now
            continue
    while still_alive(left):
        time.sleep(POLL_S)
    return left
