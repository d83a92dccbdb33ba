"""What can go wrong in a simulated cluster, and how often. Values only; nothing here acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """The first four happen to one message, the others to a link, a process or a request."""

    DROP = "drop"  # never arrives
    DUPLICATE = "duplicate"  # arrives twice, the second time behind newer messages
    DELAY = "delay"  # arrives late, and so does all that follows it on the stream
    CORRUPT = "corrupt"  # a DraftTokens arrives with other content than was sent
    STRAGGLE = "straggle"  # outlives its stream and arrives on the next one
    PARTITION = "partition"  # nothing passes a link for a while
    CUT = "cut"  # the stream ends, and the two ends notice at different times
    KILL = "kill"  # a draft process is gone with all it knew
    RESTART = "restart"  # a killed draft comes back empty
    STALL = "stall"  # a draft pass takes very long
    ABORT = "abort"  # the client leaves


MESSAGE_FAULTS = (Fault.DROP, Fault.DUPLICATE, Fault.DELAY, Fault.CORRUPT)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Probabilities per message, and times of the rest; all zeros is a perfect network.

    `kinds`: message class names that may be hit; empty means all. `scripted` overrides chance:
    `{("Verdict", 3): Fault.DROP}` drops the third verdict of the run.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    straggle: float = 0.0
    stall: float = 0.0
    kinds: frozenset[str] = frozenset()
    scripted: Mapping[tuple[str, int], Fault] = field(default_factory=dict)
    num_partitions: int = 0
    num_cuts: int = 0
    num_kills: int = 0
    restart_share: float = 1.0
    num_aborts: int = 0
    horizon_us: int = 30_000

    @property
    def may_lose_messages(self) -> bool:
        """Whether a close can vanish, so that only the idle limit frees a draft's session."""
        lossy = self.drop or self.duplicate or self.corrupt or self.straggle
        return bool(lossy or self.scripted)
