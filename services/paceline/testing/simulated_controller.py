"""The controller of the simulation: the shipped `Fleet`, fed by heartbeats on a virtual clock.

Soft state: killing it loses all, and nothing that runs may notice. Reports and guidance go through
the same plain data as in production; what a target is told may cost speed, never a token.
"""

from __future__ import annotations

import dataclasses

from paceline.config import ControllerConfig
from paceline.controller.fleet import Fleet
from paceline.controller.registry import Registry
from paceline.draft.fleet_reporter import FleetReporter as DraftReporter
from paceline.fleet_reports import DraftReport, TargetReport
from paceline.target.fleet_reporter import FleetReporter as TargetReporter
from paceline.testing.invariants import require
from paceline.testing.simulated_draft import SimulatedDraft
from paceline.testing.simulated_target import SimulatedTarget
from paceline.testing.world import World

BEAT_US = 3_000
BEAT_TIMEOUT_US = 15_000
# The controller's clock runs so much faster: ceilings move within seconds, and a whole simulation
# is shorter than that.
HASTE = 1000
PID = 1


class SimulatedController:
    """One controller process; replicas report to whichever life of it is there."""

    def __init__(self, world: World) -> None:
        self._world = world
        # By name: a replica's next life has another one. As many as ever lived.
        self._targets: dict[str, TargetReporter] = {}
        self._drafts: dict[str, DraftReporter] = {}
        self.is_up = False
        self.start()

    def start(self) -> None:
        world = self._world
        config = ControllerConfig(
            heartbeat_interval_s=HASTE * BEAT_US / 1e6,
            heartbeat_timeout_s=HASTE * BEAT_TIMEOUT_US / 1e6,
            targets_per_draft=world.scenario.targets_per_draft,
        )
        self.fleet = Fleet(config, world.parts.registry)
        self.clock = world.local_clock()
        # Who has reported to this life, said goodbye or not: what it can know anything about.
        self._heard: set[str] = set()
        self.is_up = True

    @property
    def registry(self) -> Registry:
        return self.fleet.registry

    @property
    def _now_s(self) -> float:
        return HASTE * self.clock.now_us / 1e6

    def kill(self) -> None:
        self.is_up = False

    def report_target(self, target: SimulatedTarget) -> None:
        """Also takes its guidance back to it."""
        address = _address(target.target_id)
        self._heard.add(address)
        name = f"target-{target.target_id}-{target.num_boots}"
        reporter = self._targets.get(name)
        if reporter is None:
            boot_id = f"boot-{target.life}"
            reporter = TargetReporter(target.scheduler, name, boot_id, address)
            self._targets[name] = reporter
        reporter.expire(self._now_s)
        report = TargetReport.read(reporter.report(len(target.streams), target.clock.now_us / 1e6))
        reporter.hear(self.fleet.hear_target(report, self._now_s), self._now_s)
        self._check_bounds()

    def report_draft(self, draft: SimulatedDraft) -> set[int]:
        """The targets that it should have streams to."""
        connected = sorted({_address(stream.target_id) for stream in draft.streams.values()})
        name = _draft_name(draft)
        reporter = self._drafts.get(name)
        if reporter is None:
            reporter = DraftReporter(draft.table, name, f"boot-{draft.num_boots}")
            self._drafts[name] = reporter
        plain = reporter.report(tuple(connected), draft.clock.now_us / 1e6)
        report = dataclasses.replace(DraftReport.read(plain), pid=PID)
        addresses = self.fleet.hear_draft(report, self._now_s)
        for address in connected:
            is_kept = address in addresses or address in self._heard
            require(is_kept, "a new controller took a stream that it knows nothing of", address)
        self._check_bounds()
        return {int(address.split("-")[1]) for address in addresses}

    def goodbye(self, draft: SimulatedDraft) -> None:
        self.fleet.leave(_draft_name(draft), self._now_s)

    def _check_bounds(self) -> None:
        """The replicas that live, and those that have died within the timeout."""
        scenario, registry = self._world.scenario, self.registry
        num = len(registry.targets())
        require(num <= scenario.num_targets, "a registry of more targets than there are", num)
        num = len(registry.drafts())
        most = scenario.num_drafts * (1 + self._world.scenario.faults.num_draft_ends)
        require(num <= most, "a registry of more drafts than ever lived", num)
        for mine in registry.assignment.values():
            require(len(mine) <= scenario.targets_per_draft, "a draft of too many targets", mine)


def _address(target_id: int) -> str:
    return f"host-{target_id}"


def _draft_name(draft: SimulatedDraft) -> str:
    return f"draft-{draft.draft_id}-{draft.num_boots}"
