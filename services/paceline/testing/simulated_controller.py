"""The controller of the simulation: the shipped `Registry`, fed by heartbeats on a virtual clock.

Soft state: killing it loses all, and nothing that runs may notice.
"""

from __future__ import annotations

from paceline.controller.registry import DraftReport, Registry, TargetReport
from paceline.testing.invariants import require
from paceline.testing.simulated_draft import SimulatedDraft
from paceline.testing.simulated_target import SimulatedTarget
from paceline.testing.world import World

BEAT_US = 3_000
BEAT_TIMEOUT_US = 15_000
PID = 1


class SimulatedController:
    """One controller process; replicas report to whichever life of it is there."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_up = False
        self.start()

    def start(self) -> None:
        world = self._world
        self.registry: Registry = world.parts.registry(
            BEAT_TIMEOUT_US / 1e6, world.scenario.targets_per_draft
        )
        self.clock = world.local_clock()
        # Who has reported to this life, said goodbye or not: what it can know anything about.
        self._heard: set[str] = set()
        self.is_up = True

    def kill(self) -> None:
        self.is_up = False

    def report_target(self, target: SimulatedTarget) -> None:
        address = _address(target.target_id)
        self._heard.add(address)
        replica_id = f"target-{target.target_id}-{target.num_boots}"
        report = TargetReport(replica_id, f"boot-{target.life}", address, PID)
        self.registry.report_target(report, self.clock.now_us / 1e6)
        self._check_bounds()

    def report_draft(self, draft: SimulatedDraft) -> set[int]:
        """The targets that it should have streams to."""
        connected = sorted({_address(stream.target_id) for stream in draft.streams.values()})
        report = DraftReport(
            replica_id=_draft_name(draft),
            boot_id=f"boot-{draft.num_boots}",
            pid=PID,
            max_sessions=self._world.scenario.draft_max_sessions,
            num_sessions=len(draft.table),
            connected=tuple(connected),
        )
        addresses = self.registry.report_draft(report, self.clock.now_us / 1e6)
        for address in connected:
            is_kept = address in addresses or address in self._heard
            require(is_kept, "a new controller took a stream that it knows nothing of", address)
        self._check_bounds()
        return {int(address.split("-")[1]) for address in addresses}

    def goodbye(self, draft: SimulatedDraft) -> None:
        self.registry.remove(_draft_name(draft), self.clock.now_us / 1e6)

    def _check_bounds(self) -> None:
        """The replicas that live, and those that have died within the timeout."""
        scenario, registry = self._world.scenario, self.registry
        num = len(registry.targets())
        require(num <= scenario.num_targets, "a registry of more targets than there are", num)
        num = len(registry.drafts())
        most = scenario.num_drafts * (1 + self._world.scenario.faults.num_draft_ends)
        require(num <= most, "a registry of more drafts than ever lived", num)


def _address(target_id: int) -> str:
    return f"host-{target_id}"


def _draft_name(draft: SimulatedDraft) -> str:
    return f"draft-{draft.draft_id}-{draft.num_boots}"
