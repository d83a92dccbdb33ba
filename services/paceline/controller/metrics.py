"""What a Controller knows, as a snapshot of the catalog's metrics. Reads, changes nothing.

Knows no clock: replicas are those that the fleet has not forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from paceline.controller.fleet import MAX_SHOWN, Fleet
from paceline.fleet_reports import DraftReport, Plain, TargetReport
from paceline.metrics import fleet_catalog as catalog
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot

Report = TypeVar("Report", TargetReport, DraftReport)


def fleet_snapshot(fleet: Fleet) -> Snapshot:
    """Of at most MAX_SHOWN replicas of each kind where each has a series of its own."""
    registry = fleet.registry
    targets, drafts = registry.targets(), registry.drafts()
    snapshot = Snapshot(Role.CONTROLLER)
    snapshot.put_each(catalog.TARGETS, _by_state(targets))
    snapshot.put_each(catalog.DRAFTS, _by_state(drafts))
    snapshot.put(catalog.TARGETS_LOST, registry.num_targets_lost)
    snapshot.put(catalog.DRAFTS_LOST, registry.num_drafts_lost)
    snapshot.put(catalog.HEARTBEATS, fleet.num_heartbeats)
    for draft in _shown(drafts):
        for address in registry.assignment.get(draft.replica_id, ()):
            target = registry.target_at(address)
            if target is not None:
                snapshot.put(catalog.ASSIGNMENT, 1, draft.replica_id, target.replica_id)
    for target in _shown(targets):
        load = fleet.board.load_of(target.replica_id)
        if load is not None:
            snapshot.put(catalog.STARVATION, load.starvation, target.replica_id)
            snapshot.put(catalog.UTILIZATION, load.utilization or 0.0, target.replica_id)
    return snapshot


def fleet_metrics(fleet: Fleet) -> Plain:
    """The controller's own, and the last of each replica, by kind and replica id."""
    targets, drafts = fleet.registry.targets(), fleet.registry.drafts()
    return {
        "controller": fleet_snapshot(fleet).plain(),
        "targets": {each.replica_id: each.metrics.plain() for each in _shown(targets)},
        "drafts": {each.replica_id: each.metrics.plain() for each in _shown(drafts)},
    }


def _by_state(reports: Iterable[TargetReport | DraftReport]) -> dict[str, float]:
    draining = [report.is_draining for report in reports]
    return {"live": draining.count(False), "draining": draining.count(True)}


def _shown(reports: list[Report]) -> list[Report]:
    return sorted(reports, key=lambda report: report.replica_id)[:MAX_SHOWN]
