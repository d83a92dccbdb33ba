"""What is done when, with which traffic, and what is promised. Data; `run.py` carries it out."""

from __future__ import annotations

import random
from dataclasses import dataclass

CODES_OF_LOSS = frozenset({"target_lost", "target_died", "engine_broken"})
SHED = frozenset({"too_many_requests", "overloaded", "queue_full", "queue_timeout", "not_ready"})
# Long enough that engines, which only sleep, are what is scarce, and not this machine's cores.
SLOW_STEP_MS = 80.0
ANY_LOSS = frozenset({"connection_lost", "internal_error", *CODES_OF_LOSS})


@dataclass(frozen=True, slots=True)
class Step:
    """At `at_s` the fault is injected; it is healed at `until_s`."""

    at_s: float
    fault: str
    until_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """`may_fail`: the error codes that requests may end with, empty: none fails. `is_slow`: on a
    service of its own whose passes take SLOW_STEP_MS.

    Always promised, whatever the scenario: no text differs from the reference, no token is lost
    or repeated, every request ends, nothing is left behind, drafts are used again afterwards.
    """

    name: str
    promise: str
    steps: tuple[Step, ...]
    may_fail: frozenset[str] = frozenset()
    concurrency: int = 6
    kind: str = "faults"
    is_slow: bool = False


def once(
    fault: str,
    promise: str,
    *,
    name: str = "",
    at_s: float = 0.5,
    for_s: float = 2.0,
    may_fail: frozenset[str] = frozenset(),
    concurrency: int = 6,
) -> Scenario:
    step = Step(at_s, fault, at_s + for_s)
    return Scenario(name or fault, promise, (step,), may_fail, concurrency)


INVISIBLE = "nobody notices: same texts, no failed request"

SCENARIOS: tuple[Scenario, ...] = (
    once("noop", INVISIBLE, for_s=1.0),
    once("kill_draft", INVISIBLE),
    once("kill_all_drafts", INVISIBLE),
    once("stall_draft", INVISIBLE),
    once("slow_draft", INVISIBLE),
    once("kill_target", "the other target goes on with every stream: 0 failed", for_s=2.0),
    once("stall_target", "found by its silence, the other target goes on: 0 failed", for_s=6.0),
    once(
        "kill_all_targets",
        "nobody is left: waits for the next target or a clean error, nothing half as success",
        for_s=6.0,
        may_fail=CODES_OF_LOSS,
    ),
    once("kill_controller", INVISIBLE),
    once(
        "kill_gateway",
        "the other gateway's streams go on; the dead one's break and never look whole",
        for_s=2.0,
        may_fail=ANY_LOSS | SHED,
    ),
    once("link_delay", INVISIBLE),
    once("link_jitter", INVISIBLE),
    once("link_loss", INVISIBLE),
    once("link_rate", INVISIBLE),
    once("link_slices", INVISIBLE, for_s=2.0),
    once("partition_up", INVISIBLE),
    once("partition_down", INVISIBLE),
    once("partition_both", INVISIBLE),
    once("link_reset", INVISIBLE),
    once("corrupt_wire", INVISIBLE),
    once("garbage", INVISIBLE),
    once("oversize", "refused with 4xx, the others notice nothing", for_s=2.0),
    once(
        "kv_exhaustion",
        "preempted and computed again: same texts; too many at once are refused in time",
        may_fail=SHED,
        concurrency=3,
    ),
    once("slow_reader", "slow clients cost only themselves", for_s=3.0, concurrency=4),
    once(
        "disconnect_storm",
        "who leaves is forgotten at once; the others notice nothing",
        concurrency=3,
        may_fail=SHED,
    ),
    once("collector_down", INVISIBLE),
    Scenario(
        "disk_full",
        "replicas start without their logs: same texts",
        (Step(0.5, "disk_full", 5.0), Step(0.8, "kill_draft", 0.9), Step(0.8, "kill_target", 0.9)),
    ),
    Scenario(
        "rolling",
        "drafts, then targets, one after the other under load: 0 failed",
        (
            Step(1.0, "kill_draft", 1.1),
            Step(3.5, "kill_target", 3.6),
            Step(6.0, "kill_draft", 6.1),
        ),
    ),
    Scenario("bad_model", "refused at start with a sentence", (), kind="bad_model"),
    Scenario(
        "drafts_dead",
        "tokens/s as without drafts; then it returns",
        (),
        kind="drafts_dead",
        is_slow=True,
    ),
    Scenario(
        "overload",
        "goodput at 10x >= 90 % of the peak",
        (),
        may_fail=SHED,
        kind="overload",
        is_slow=True,
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

# For `random`: whatever is drawn, these promise that no request fails.
HARMLESS = tuple(
    scenario.name for scenario in SCENARIOS if scenario.steps and not scenario.may_fail
)
RANDOM_STEPS = 4
RANDOM_PAUSE_S = 2.0
RANDOM_LENGTH_S = (1.0, 3.0)
SKIPPED_IN_RANDOM = frozenset({"noop", "rolling", "collector_down", "disk_full", "kill_target"})


def draw_random(seed: int) -> Scenario:
    """A few faults one after another, some of them overlapping; the seed decides everything."""
    rng = random.Random(f"random/{seed}")
    steps, at_s = [], 1.0
    names = [name for name in HARMLESS if name not in SKIPPED_IN_RANDOM]
    for _ in range(RANDOM_STEPS):
        for_s = rng.uniform(*RANDOM_LENGTH_S)
        steps.append(Step(at_s, rng.choice(names), at_s + for_s))
        at_s += rng.uniform(0.5, RANDOM_PAUSE_S)
    return Scenario("random", INVISIBLE + " (drawn)", tuple(steps))
