"""One run: the fleet that a configuration describes, put together and let run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.controller.assignment import assign
from paceline.simulate.branches import BranchTable
from paceline.simulate.clock import Clock
from paceline.simulate.config import SimulateConfig, ZoneConfig
from paceline.simulate.controller import SimController
from paceline.simulate.decider import Decider, FollowerDecider, PlainDecider, PolicyDecider
from paceline.simulate.desk import Desk
from paceline.simulate.draft import SimDraft
from paceline.simulate.draws import RunLengths
from paceline.simulate.line import Line
from paceline.simulate.load import TraceRow
from paceline.simulate.metrics import Metrics
from paceline.simulate.places import Places
from paceline.simulate.requests import Requests
from paceline.simulate.target import Request, SimTarget

MAX_LEADERS = 16
NUM_TICKS = 100
DRIFT_TICK_US = 50_000.0
Progress = Callable[[float], None]  # share of the simulated time that is done


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run measured. `num_leaders`: targets that asked a policy of their own."""

    config: SimulateConfig
    metrics: Metrics
    num_leaders: int
    num_deciding: int
    wall_s: float


class Fleet:
    """Everything of one run; `run` may be called once."""

    def __init__(self, config: SimulateConfig, trace: Sequence[TraceRow] = ()) -> None:
        self.config = config
        self.clock = Clock()
        self.places = Places(config.fleet.num_targets, config.target_kind.max_num_seqs)
        from_us = 1e6 * config.warmup_s
        self.metrics = Metrics(
            from_us,
            from_us + 1e6 * config.duration_s,
            1e3 * config.slo.ttft_ms,
            1e3 * config.slo.tpot_ms,
        )
        self.runs = RunLengths(config.traffic.classes, config.seed)
        self.requests = Requests(config, self.clock, self.metrics, trace)
        self.drafts = self._make_drafts()
        self._drafts_of = self._connect()
        self.deciders = self._make_deciders()
        self.targets = [self._make_target(target_id) for target_id in range(self._num_targets)]

    @property
    def _num_targets(self) -> int:
        return self.config.fleet.num_targets

    # -- putting together -------------------------------------------------------------------

    def _make_drafts(self) -> list[SimDraft]:
        config, kind = self.config, self.config.draft_kind
        if kind is None or config.speculation.method == "off":
            return []
        fan_out = config.speculation.max_fan_out
        branches = BranchTable(self.places, fan_out) if fan_out else None
        return [
            SimDraft(draft_id, kind, self.places, self.clock, self.metrics, branches)
            for draft_id in range(config.fleet.num_drafts)
        ]

    def _connect(self) -> list[list[tuple[SimDraft, Line]]]:
        """The controller's assignment as lines; for each target its drafts."""
        network = self.config.network
        target_zones = place_in_zones(network.zones, "target_share", self._num_targets)
        draft_zones = place_in_zones(network.zones, "draft_share", len(self.drafts))
        drafts_of: list[list[tuple[SimDraft, Line]]] = [[] for _ in range(self._num_targets)]
        for draft, mine in zip(self.drafts, self._assignment(), strict=True):
            lines: dict[float, int] = {}
            for target in mine:
                rtt_ms = network.rtt_ms
                if network.zones:
                    rtt_ms = network.zone_rtt_ms[target_zones[target]][draft_zones[draft.id]]
                number = lines.setdefault(rtt_ms, len(lines))
                if number == len(draft.lines):
                    draft.lines.append(Line(self.places, self.clock, 500.0 * rtt_ms))
                draft.line_of[target] = number
                drafts_of[target].append((draft, draft.lines[number]))
        return drafts_of

    def _assignment(self) -> list[list[int]]:
        """For each draft the numbers of its targets: what the real controller says."""
        targets = {f"target-{number:06}": number for number in range(self._num_targets)}
        names = [f"draft-{draft.id:06}" for draft in self.drafts]
        if not names:
            return []
        controller = self.config.controller
        assignment = assign(
            list(targets),
            names,
            controller.targets_per_draft,
            drafts_per_target=controller.drafts_per_target,
        )
        return [[targets[name] for name in assignment[draft]] for draft in names]

    def _make_deciders(self) -> list[Decider]:
        """Every n-th target that has a draft leads; the others follow in turn."""
        config = self.config
        deciding = [number for number, drafts in enumerate(self._drafts_of) if drafts]
        every = config.policy_sampling or -(-len(deciding) // MAX_LEADERS) or 1
        leaders: list[PolicyDecider] = []
        pairs: list[tuple[PolicyDecider, list[SimDraft]]] = []
        for number in deciding[::every]:
            low = number * self.places.max_num_seqs
            leader = PolicyDecider(self.places, low, config.speculation, config.traffic.classes)
            leaders.append(leader)
            pairs.append((leader, [draft for draft, _ in self._drafts_of[number]]))
            for _, line in self._drafts_of[number]:
                line.listeners.append(leader.hear)
        self.num_leaders, self.num_deciding = len(leaders), len(deciding)
        self.controller = SimController(
            self.clock,
            config.controller.heartbeat_interval_s,
            config.controller.max_draft_utilization,
            config.speculation,
            pairs,
        )
        plain = PlainDecider(self.places)
        deciders: list[Decider] = [plain] * self._num_targets
        for order, number in enumerate(deciding):
            if order % every == 0:
                deciders[number] = leaders[order // every]
            else:
                leader = leaders[order % len(leaders)]
                deciders[number] = FollowerDecider(self.places, leader)
        return deciders

    def _make_target(self, target_id: int) -> SimTarget:
        decider = self.deciders[target_id]
        desk = Desk(target_id, self.places, decider, self._drafts_of[target_id])

        def on_finish(now_us: float, request: Request) -> None:
            self.requests.ended(now_us, request, self.targets[target_id])

        return SimTarget(
            target_id,
            self.config.target_kind,
            self.places,
            self.clock,
            self.metrics,
            self.runs,
            desk,
            decider,
            on_finish,
        )

    # -- running ----------------------------------------------------------------------------

    def run(self, progress: Progress = lambda share: None) -> Outcome:
        started_s = time.perf_counter()
        with np.errstate(all="raise"):
            if self.config.has_controller:
                self.controller.start()
            self.requests.start(self.targets)
            if self.runs.has_drift:
                self.clock.at(DRIFT_TICK_US, self._drift)
            end_us = self.metrics.to_us
            for tick in range(1, NUM_TICKS + 1):
                self.clock.run(end_us * tick / NUM_TICKS)
                progress(tick / NUM_TICKS)
        wall_s = time.perf_counter() - started_s
        return Outcome(self.config, self.metrics, self.num_leaders, self.num_deciding, wall_s)

    def _drift(self, now_us: float) -> None:
        self.runs.set_time(now_us)
        self.clock.at(now_us + DRIFT_TICK_US, self._drift)


def place_in_zones(zones: tuple[ZoneConfig, ...], share: str, count: int) -> list[int]:
    """The zone of each replica, by shares, zone after zone."""
    ends, total = [], 0.0
    for zone in zones:
        total += getattr(zone, share)
        ends.append(round(total * count))
    numbers: list[int] = []
    for number, end in enumerate(ends):
        numbers += [number] * (end - len(numbers))
    return numbers
