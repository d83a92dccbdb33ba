"""How busy the machine is, and how much of that is the service's: is an engine the bottleneck?"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.cli import processes

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
NUM_CORES = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds used so far: by everybody, and by this process and those below it."""

    at_s: float
    machine_s: float
    own_s: float

    def until(self, later: Reading) -> str:
        """The cores that were in use meanwhile, in words."""
        seconds = later.at_s - self.at_s
        own = (later.own_s - self.own_s) / seconds
        machine = (later.machine_s - self.machine_s) / seconds
        return f"{own:.1f} of {NUM_CORES} cores (with others {machine:.1f})"


def read() -> Reading:
    """Processes that ended are not counted: none ends while this is used."""
    pids = [os.getpid(), *(process.pid for process in processes.descendants())]
    busy = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq = (int(word) for word in busy[1:8])
    ticks = user + nice + system + irq + softirq
    return Reading(time.monotonic(), ticks / TICKS_PER_S, sum(map(_used_s, pids)))


def _used_s(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text[text.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
