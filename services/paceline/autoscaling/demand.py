"""What a load needs, in replicas. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from paceline.autoscaling.reports import DraftLoad, TargetLoad, is_number

# What is measured at full load does not say how much more there is: double at most.
MAX_GROWTH = 2.0
# Sequences that should share a draft before there is another for how busy they keep it: what one
# alone lacks is a faster draft, not more of them.
MIN_SHARING = 2.0
EPSILON = 1e-9


@dataclass(frozen=True)
class Knobs:
    """`policy_kwargs` of the YAML: shares between 0 and 1, at which a replica is fully used.

    Keep `draft_busy_share` below `controller.max_draft_utilization`: above that the Controller
    makes drafts run less far ahead, and they would never look busy enough for another one.
    """

    target_kv_share: float = 0.85  # of the KV blocks
    target_row_share: float = 0.75  # of the rows that its passes could hold
    draft_busy_share: float = 0.6  # of the time, for proposals that targets verify
    draft_session_share: float = 0.85  # of draft.max_sessions
    starvation_share: float = 0.1  # of the accepted tokens that came too late
    tolerance: float = 0.1  # so much above full use, and of sequences that must wait, is nothing
    headroom: float = 0.2  # fewer replicas only if they stay so far below full use


def knob_problems(kwargs: Mapping[str, object]) -> list[str]:
    """What is wrong with a YAML's `policy_kwargs`, one phrase per key."""
    names = {field.name for field in fields(Knobs)}
    problems = []
    for name, value in kwargs.items():
        if name not in names:
            problems.append(f"unknown key {name}")
        elif not is_number(value) or not 0.0 < float(value) < 1.0:  # type: ignore[arg-type]
            problems.append(f"{name}: must be a number between 0 and 1, got {value!r}")
    return problems


@dataclass(frozen=True)
class Demand:
    """Replicas that the load needs, by cause; `at_least` so many, whatever else.

    `counted` follow from numbers of requests alone. `measured` follow from how much the replicas
    that run are used, and say nothing about those that are still starting. `is_crowded`: the
    `num_sequences` of now have to wait or get less than they could use. That shows only while it
    lasts: with one replica more it is over, though needed.
    """

    at_least: int
    counted: Mapping[str, float]
    measured: Mapping[str, float]
    num_sequences: float = 0.0
    is_crowded: bool = False

    @property
    def most_counted(self) -> float:
        return max(self.counted.values(), default=0.0)

    @property
    def most(self) -> float:
        return max(self.most_counted, max(self.measured.values(), default=0.0))

    def __str__(self) -> str:
        causes = {"at least": self.at_least, **self.counted, **self.measured}
        return ", ".join(f"{name} {value:.2f}" for name, value in causes.items())


def target_demand(
    loads: Sequence[TargetLoad], num_requests: float, per_replica: float, knobs: Knobs
) -> Demand:
    """Targets that `num_requests` and the measured loads need; never none.

    How long passes take together is no cause: a lone stream keeps its target busy all the time
    and would gain nothing from a second one. How full they are is one.
    """
    num_running = sum(load.num_running for load in loads)
    num_waiting = sum(load.num_waiting for load in loads)
    ongoing = max(num_requests, num_running + num_waiting)
    measured = {
        "kv": sum(load.kv_share for load in loads) / knobs.target_kv_share,
        "rows": sum(load.row_share for load in loads) / knobs.target_row_share,
    }
    is_crowded = num_waiting > knobs.tolerance * num_running > 0
    if is_crowded:
        # What runs is all that fits.
        growth = (num_running + num_waiting) / num_running
        measured["queue"] = len(loads) * min(MAX_GROWTH, growth)
    counted = {"ongoing": ongoing / max(EPSILON, per_replica)}
    return Demand(1, counted, measured, num_running + num_waiting, is_crowded)


def _are_slow(targets: Sequence[TargetLoad], drafts: Sequence[DraftLoad]) -> bool:
    """Whether drafts need longer for a window and the token behind it than targets for a pass, in
    the mean over sequences. True where nobody says how long either takes."""
    saying = [load for load in targets if load.pass_ms and load.num_wanting]
    stepping = [load for load in drafts if load.step_ms and load.num_sessions]
    num_wanting = sum(load.num_wanting for load in saying)
    num_sessions = sum(load.num_sessions for load in stepping)
    if not (num_wanting and num_sessions):
        return True
    # Of each sequence: the steps that its window needs, as many as passes of its target.
    passes_per_step = sum(load.num_wanting * (load.window + 1) / load.pass_ms for load in saying)
    step_ms = sum(load.num_sessions * load.step_ms for load in stepping) / num_sessions
    return step_ms * passes_per_step / num_wanting > 1.0


def draft_demand(
    targets: Sequence[TargetLoad], drafts: Sequence[DraftLoad], knobs: Knobs
) -> Demand:
    """Drafts that the targets' sequences need: none when none wants one.

    A draft that has nothing better to do runs further ahead, so being busy is a cause only as far
    as targets verify what it makes. Proposals that come too late are one only if drafts are busy
    and cannot make a window while a target does a pass: else it is the way that takes long (each
    correction empties a window for a round trip), and another draft would be as late. And drafts
    that few sequences share are enough, however busy.
    """
    num_wanting = sum(load.num_wanting for load in targets)
    if not (num_wanting and drafts):
        return Demand(1 if num_wanting else 0, {}, {})
    max_sessions = max(load.max_sessions for load in drafts)
    sessions = num_wanting / max(1.0, max_sessions * knobs.draft_session_share)
    num_drafts, busy = len(drafts), sum(load.busy_share for load in drafts)
    drafted = sum(load.drafted_rate for load in drafts)
    verified = sum(load.verified_rate for load in targets)
    useful = min(1.0, verified / drafted) if drafted else 0.0
    measured = {"busy": busy * useful / knobs.draft_busy_share}
    num_unserved = sum(load.num_unserved for load in targets)
    num_served = num_wanting - num_unserved
    # Nobody served: it is not their number, they have just come or no target takes them.
    if num_served > 0 and num_unserved > knobs.tolerance * num_wanting:
        measured["unserved"] = num_drafts * min(MAX_GROWTH, num_wanting / num_served)
    wanted = sum(load.wanted_rate for load in targets)
    missing = sum(load.missing_rate for load in targets)
    are_busy = busy >= knobs.draft_busy_share * num_drafts
    if are_busy and missing > knobs.starvation_share * wanted and _are_slow(targets, drafts):
        growth = wanted / max(EPSILON, wanted - missing)
        measured["starvation"] = num_drafts * min(MAX_GROWTH, growth)
    most = 1.0 + math.floor(num_wanting / MIN_SHARING)
    measured = {name: min(value, most) for name, value in measured.items()}
    is_crowded = not measured.keys().isdisjoint(("unserved", "starvation"))
    return Demand(1, {"sessions": sessions}, measured, num_wanting, is_crowded)
