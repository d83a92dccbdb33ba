"""The decision: grow, shrink or stay, and the callable that Serve's controller uses.

Serve itself waits `upscale_delay_s` and `downscale_delay_s` before it obeys, and keeps the bounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from paceline.autoscaling.demand import (
    EPSILON,
    Demand,
    Knobs,
    draft_demand,
    knob_problems,
    target_demand,
)
from paceline.autoscaling.reports import (
    Context,
    TargetLoad,
    draft_load,
    is_number,
    loads,
    target_load,
)

logger = logging.getLogger("ray.serve")

# Of an application's first model; those of a further one have its name behind a dash.
TARGETS = "TargetReplica"
DRAFTS = "DraftReplica"
# Between two looks at the metrics; the controller asks more often than they can change. The larger
# the fleet the longer, or looking would take most of the controller's time.
DECIDE_EVERY_S = 0.25
DECIDE_EVERY_S_PER_REPLICA = 0.001
# How long it is remembered that so many sequences per replica were too many.
CROWD_MEMORY_S = 600.0
# A policy that fails says so this often, not ten times a second.
LOG_EVERY_S = 60.0

Id = TypeVar("Id")


@dataclass(frozen=True)
class Memory:
    """What a decision knows of those before it; Serve keeps it as the deployment's state.

    The last decision, at `decided_at`, was `num_replicas`, when Serve's number was `target`.
    `num_running` replicas ran since `changed_at`. `wish` was wanted at `wished_at`; it was made
    with `pressing` sequences per replica that were crowded (0: they were not). `crowd` were so
    crowded, at `crowded_at`, that Serve added a replica.
    """

    num_replicas: float = 0.0
    decided_at: float = -math.inf
    target: float = 0.0
    num_running: float = -1.0
    changed_at: float = 0.0
    wish: float = 0.0
    wished_at: float = -math.inf
    pressing: float = 0.0
    crowd: float = 0.0
    crowded_at: float = -math.inf

    @staticmethod
    def of(state: Mapping[str, Any]) -> Memory:
        known = {field.name for field in fields(Memory)}
        return Memory(**{name: state[name] for name in known if is_number(state.get(name))})

    def state(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Memory)}


def _is_recent(time_s: float, now_s: float, period_s: float) -> bool:
    """False also for a time in the future: the clock may have been set back."""
    return 0.0 <= now_s - time_s < period_s


def decide(
    context: Context, demand: Demand, is_complete: bool, memory: Memory, knobs: Knobs
) -> tuple[int, Memory]:
    """The number of replicas to wish for, and what to remember.

    Between full use and `headroom` below it nothing changes. While replicas start, and until the
    look-back period holds nothing from before they did, what is measured adds no replica; what it
    still shows of an old load takes none away. `is_complete`: every replica has reported; without
    that none is taken away. A wish for more holds for half of `upscale_delay_s`, so that one quiet
    moment does not start Serve's delay again.
    """
    now_s, target = _now(context), context.target_num_replicas
    running = context.current_num_replicas
    changed_at = memory.changed_at if running == memory.num_running else now_s
    is_settled = not _is_recent(changed_at, now_s, context.config.look_back_period_s)
    may_measure = is_settled and running >= target
    most = demand.most if may_measure else demand.most_counted
    least = max(demand.at_least, _ceil(most / (1.0 + knobs.tolerance)))
    wish, wished_at = float(least), now_s
    pressing = 0.0
    if may_measure and demand.is_crowded:
        pressing = demand.num_sequences / max(1, running)
    hold_s = context.config.upscale_delay_s / 2
    if least < memory.wish and _is_recent(memory.wished_at, now_s, hold_s):
        wish, wished_at, pressing = memory.wish, memory.wished_at, memory.pressing
        least = int(wish)
    crowd, crowded_at = _crowd(context, memory)
    enough = max(demand.at_least, _ceil(demand.most / (1.0 - knobs.headroom)))
    if crowd:
        enough = max(enough, _ceil(demand.num_sequences / crowd / (1.0 - knobs.headroom)))
    number = max(target, least)
    if number > enough and is_complete and is_settled:
        number = max(enough, least)
    if not running:
        # Serve obeys without delay when nothing runs, so no more than a first one.
        number = min(number, max(1, target))
    number = min(number, context.capacity_adjusted_max_replicas)
    number = max(number, context.capacity_adjusted_min_replicas)
    done, runs = (number, now_s, target), (running, changed_at)
    return number, Memory(*done, *runs, wish, wished_at, pressing, crowd, crowded_at)


def _crowd(context: Context, memory: Memory) -> tuple[float, float]:
    """How many sequences per replica are known to be too many, and since when; 0: nobody knows.

    What a replica was added for is over as soon as it is there. To take it away again for that
    would bring it back, and so on.
    """
    now_s = _now(context)
    if memory.pressing and context.target_num_replicas > memory.target:
        return memory.pressing, now_s
    if _is_recent(memory.crowded_at, now_s, CROWD_MEMORY_S):
        return memory.crowd, memory.crowded_at
    return 0.0, -math.inf


def _ceil(replicas: float) -> int:
    return math.ceil(replicas - EPSILON)


def _now(context: Context) -> float:
    return context.current_time or 0.0


class FleetPolicy:
    """The policy: `autoscaling_policy: {policy_function: "paceline.autoscaling:FleetPolicy"}`.

    It is called with the contexts of all deployments that have an `autoscaling_config`, and
    returns a number of replicas and a state for each. The drafts of a model follow the targets of
    the same model. Another deployment than targets and drafts gets what Serve's own policy would
    give it.
    """

    def __init__(self, **kwargs: Any) -> None:
        # To raise here would end Serve's controller when it restarts.
        problems = knob_problems(kwargs)
        for problem in problems:
            logger.error("autoscaling_policy.policy_kwargs: %s; the default holds", problem)
        wrong = {name for name in kwargs if knob_problems({name: kwargs[name]})}
        self.knobs = Knobs(**{name: kwargs[name] for name in kwargs.keys() - wrong})
        self._logged_at = -math.inf

    def __call__(
        self, contexts: Mapping[Id, Context]
    ) -> tuple[dict[Id, int], dict[Id, dict[str, Any]]]:
        numbers: dict[Id, int] = {}
        states: dict[Id, dict[str, Any]] = {}
        targets: dict[str, list[Context]] = {}
        for context in contexts.values():
            kind, pool = _kind_and_pool(context)
            targets.setdefault(pool, []).extend([context] if kind == TARGETS else [])
        fleets = {pool: _Fleet(of_pool) for pool, of_pool in targets.items()}
        for key, context in contexts.items():
            try:
                fleet = fleets[_kind_and_pool(context)[1]]
                numbers[key], states[key] = self._decide(context, fleet)
            except Exception:
                # Serve's controller must not stumble over a bug here: all stays as it is.
                numbers[key], states[key] = context.target_num_replicas, {}
                if self._is_log_due(_now(context)):
                    logger.exception("no autoscaling decision for %s", context.deployment_name)
        return numbers, states

    def _decide(self, context: Context, fleet: _Fleet) -> tuple[int, dict[str, Any]]:
        memory = Memory.of(context.policy_state)
        num_replicas = fleet.num_targets + context.current_num_replicas
        period_s = DECIDE_EVERY_S + DECIDE_EVERY_S_PER_REPLICA * num_replicas
        if _is_recent(memory.decided_at, _now(context), period_s):
            return int(memory.num_replicas), memory.state()
        found = self._demand(context, fleet)
        if found is None:
            return context.target_num_replicas, memory.state()
        demand, is_complete = found
        number, remembered = decide(context, demand, is_complete, memory, self.knobs)
        if memory.target not in (context.target_num_replicas, 0.0):
            logger.info(
                "autoscaling: %s from %d to %d replicas (needed: %s)",
                *(context.deployment_name, memory.target, context.target_num_replicas, demand),
            )
        return number, remembered.state()

    def _demand(self, context: Context, fleet: _Fleet) -> tuple[Demand, bool] | None:
        """And whether everybody that it depends on has reported; None: nothing is known."""
        kind, _ = _kind_and_pool(context)
        if kind not in (TARGETS, DRAFTS):
            per_replica = max(EPSILON, context.config.target_ongoing_requests)
            return Demand(0, {"ongoing": context.total_num_requests / per_replica}, {}), True
        targets = fleet.loads
        if not targets:
            # With min_replicas 0 there may be none, and one is needed whatever nobody says.
            return (Demand(1, {}, {}), False) if kind == TARGETS else None
        is_complete = len(targets) == fleet.num_targets
        if kind == TARGETS:
            per_replica = context.config.target_ongoing_requests
            num_requests = context.total_num_requests
            return target_demand(targets, num_requests, per_replica, self.knobs), is_complete
        drafts = loads(context, draft_load)
        is_complete &= len(drafts) == context.current_num_replicas
        return draft_demand(targets, drafts, self.knobs), is_complete

    def _is_log_due(self, now_s: float) -> bool:
        if _is_recent(self._logged_at, now_s, LOG_EVERY_S):
            return False
        self._logged_at = now_s
        return True


def _kind_and_pool(context: Context) -> tuple[str, str]:
    """What a deployment does, and for which model; the first one's pool has no name."""
    kind, _, pool = context.deployment_name.partition("-")
    return kind, pool


class _Fleet:
    """The targets of one pool, read at most once in a call. (A `cached_property` cannot be
    pickled.)"""

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = contexts
        self._loads: list[TargetLoad] | None = None
        self.num_targets = sum(context.current_num_replicas for context in contexts)

    @property
    def loads(self) -> list[TargetLoad]:
        if self._loads is None:
            self._loads = [load for c in self._contexts for load in loads(c, target_load)]
        return self._loads
