"""What a Controller counts: who lives, who serves whom, what is scarce."""

from __future__ import annotations

from paceline.metrics.metric import Declare, Metric, Role

STATES = ("live", "draining")

_FLEET = Declare(Role.CONTROLLER, "controller: registry")
_BOARD = "controller: ceilings"

TARGETS = _FLEET.gauge(
    "fleet_targets", "Targets that report.", "replicas", labels=("state",), values=STATES
)
DRAFTS = _FLEET.gauge(
    "fleet_drafts", "Drafts that report.", "replicas", labels=("state",), values=STATES
)
TARGETS_LOST = _FLEET.counter(
    "fleet_targets_lost", "Targets forgotten as they fell silent, without a goodbye.", "replicas"
)
DRAFTS_LOST = _FLEET.counter(
    "fleet_drafts_lost", "Drafts forgotten as they fell silent, without a goodbye.", "replicas"
)
HEARTBEATS = _FLEET.counter(
    "fleet_heartbeats", "Reports of replicas that were taken.", "reports", "controller: fleet"
)
ASSIGNMENT = _FLEET.gauge(
    "draft_assignment",
    "1 for each draft and each target that it should have a stream to.",
    "bool",
    labels=("draft", "target"),
)
UTILIZATION = _FLEET.gauge(
    "draft_utilization_ratio",
    "Busy share of the drafts of a target, over the last few heartbeats.",
    "ratio",
    _BOARD,
    labels=("replica",),
)
STARVATION = _FLEET.gauge(
    "starvation_ratio",
    "Missing share of the proposals that a target wanted, over the last few heartbeats.",
    "ratio",
    _BOARD,
    labels=("replica",),
)

FLEET_METRICS: tuple[Metric, ...] = (
    TARGETS, DRAFTS, TARGETS_LOST, DRAFTS_LOST, HEARTBEATS, ASSIGNMENT, UTILIZATION, STARVATION,
)  # fmt: skip
