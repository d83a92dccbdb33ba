"""What can go wrong in a simulated cluster, and how often. Values only; nothing here acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    """The first five happen to one message, the others to a link, a process or a request."""

    DROP = "drop"  # never arrives
    DUPLICATE = "duplicate"  # arrives twice, the second time behind newer messages
    DELAY = "delay"  # arrives late, and so does all that follows it on the stream
    CORRUPT = "corrupt"  # a DraftTokens arrives with other content than was sent
    STRAGGLE = "straggle"  # outlives its stream and arrives on the next one
    PARTITION = "partition"  # nothing passes a link for a while
    ONE_WAY = "one_way"  # nothing passes a link in one direction for a while
    CUT = "cut"  # the stream ends, and the two ends notice at different times
    KILL = "kill"  # a draft process is gone with all it knew
    RESTART = "restart"  # a killed draft comes back empty
    STALL = "stall"  # a draft pass takes very long
    SLOW_DRAFT = "slow_draft"  # all passes of a draft take several times longer for a while
    DRAIN = "drain"  # a draft is told to go: it says so, serves on a little and leaves
    BUSY = "busy"  # a draft refuses every new sequence for a while
    TARGET_KILL = "target_kill"  # a target process is gone with all it knew
    TARGET_RESTART = "target_restart"  # a killed target comes back empty
    HANG = "hang"  # a target stands still for a while, then goes on as if nothing had been
    FAIL = "fail"  # a target's pass raises, and the engine can go on
    BREAK = "break"  # a target's engine fails: its requests are told, the replica is replaced
    POISON = "poison"  # a request kills whatever target computes it
    SLOW_TARGET = "slow_target"  # all passes of a target take several times longer for a while
    GATEWAY_PARTITION = "gateway_partition"  # nothing passes between a gateway and a target
    CONTROLLER_KILL = "controller_kill"  # the controller is gone with all it knew
    CONTROLLER_RESTART = "controller_restart"  # and comes back empty
    SKEW = "skew"  # every process has a clock of its own, at a rate of its own
    OVERLOAD = "overload"  # far more requests at once than the targets have places
    ABORT = "abort"  # the client leaves


MESSAGE_FAULTS = (Fault.DROP, Fault.DUPLICATE, Fault.DELAY, Fault.CORRUPT)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Probabilities per message, and how often the rest happens; all zeros is a perfect network.

    `kinds`: message class names that may be hit; empty means all. `scripted` overrides chance:
    `{("Verdict", 3): Fault.DROP}` drops the third verdict of the run. `horizon_us`: faults that
    have a number begin before it. `restart_share` is of drafts, `target_restart_share` of targets.
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
    num_one_ways: int = 0
    num_cuts: int = 0
    num_kills: int = 0
    restart_share: float = 1.0
    num_slow_drafts: int = 0
    num_drains: int = 0
    num_busy: int = 0
    num_target_kills: int = 0
    target_restart_share: float = 1.0
    num_hangs: int = 0
    num_breaks: int = 0
    num_failed_passes: int = 0
    num_slow_targets: int = 0
    num_gateway_partitions: int = 0
    num_controller_kills: int = 0
    num_aborts: int = 0
    horizon_us: int = 30_000

    @property
    def may_lose_messages(self) -> bool:
        """Whether a close can vanish, so that only the idle limit frees a draft's session."""
        lossy = self.drop or self.duplicate or self.corrupt or self.straggle
        return bool(lossy or self.scripted)

    @property
    def num_draft_ends(self) -> int:
        """How often a draft's life may end."""
        return self.num_kills + self.num_drains


# The fields of a `FaultPlan` that say how often something happens: what a shrinker sets to 0.
CHANCES = ("drop", "duplicate", "delay", "corrupt", "straggle", "stall")
NUMBERS = tuple(name for name in FaultPlan.__dataclass_fields__ if name.startswith("num_"))
