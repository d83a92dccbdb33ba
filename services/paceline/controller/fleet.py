"""The Controller's knowledge and decisions, without Ray or a clock: one heartbeat in, one answer
out. Registry (who lives, who serves whom), pool (acceptance) and ceilings (what is scarce) meet
here; each knows nothing of the others.

Soft state: nothing is stored. A new one knows everything again when each replica has reported
once: drafts bring the streams that they have, targets their counts and the ceilings they obey.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.config import ControllerConfig
from paceline.controller.ceilings import CeilingBoard
from paceline.controller.pool import PriorPool
from paceline.controller.registry import Registry
from paceline.fleet_reports import (
    Ceilings,
    DraftReport,
    Plain,
    TargetReport,
    acceptance_rate,
    plain_explanation,
    plain_guidance,
)
from paceline.protocol.lookahead import AcceptanceClass, ClassCounts, Explanation

# Replicas of each kind, and classes, that `status` shows; it says how many there are.
MAX_SHOWN = 256
MAX_SHOWN_CLASSES = 16


class Fleet:
    """`registry` is made by the caller where it must be another than the usual."""

    def __init__(
        self, config: ControllerConfig, make_registry: Callable[..., Registry] = Registry
    ) -> None:
        self.registry = make_registry(
            config.heartbeat_timeout_s, config.targets_per_draft, config.drafts_per_target
        )
        self.registry.on_target_gone = self._forget
        self.pool = PriorPool()
        self.board = CeilingBoard(config.max_draft_utilization)
        # The last explanation of each target: it does not come with every heartbeat.
        self._explanations: dict[str, Explanation] = {}
        self._now_s = 0.0
        self.num_heartbeats = 0

    def set_config(self, config: ControllerConfig) -> None:
        """What may change while it runs (`LiveControllerConfig`)."""
        self.registry.set_limits(config.targets_per_draft, config.drafts_per_target)
        self.board.max_draft_utilization = config.max_draft_utilization

    # -- heartbeats -------------------------------------------------------------------------

    def hear_target(self, report: TargetReport, now_s: float) -> Plain:
        """Returns guidance (`read_guidance`). Raises ReportError where there are too many."""
        self._now_s = now_s
        self.registry.report_target(report, now_s)
        self.num_heartbeats += 1
        self.pool.report(report.replica_id, report.class_counts)
        if report.explanation is not None:
            self._explanations[report.replica_id] = report.explanation
        drafts = self.registry.drafts_of(report.address)
        ceilings = self.board.decide(report, drafts, self._neighbors(drafts), now_s)
        return plain_guidance(self.pool.priors(report.replica_id, now_s), ceilings)

    def hear_draft(self, report: DraftReport, now_s: float) -> tuple[str, ...]:
        """Returns the addresses of its targets. Raises ReportError where there are too many."""
        self._now_s = now_s
        targets = self.registry.report_draft(report, now_s)
        self.num_heartbeats += 1
        return targets

    def leave(self, replica_id: str, now_s: float) -> None:
        self._now_s = now_s
        self.registry.remove(replica_id, now_s)

    def expire(self, now_s: float) -> None:
        """Forget who is silent, also when nobody is left to report."""
        self._now_s = now_s
        self.registry.expire(now_s)

    def _forget(self, replica_id: str) -> None:
        self.pool.leave(replica_id, self._now_s)
        self.board.forget(replica_id)
        self._explanations.pop(replica_id, None)

    def _neighbors(self, drafts: Sequence[DraftReport]) -> list[str]:
        addresses = {
            address
            for draft in drafts
            for address in self.registry.assignment.get(draft.replica_id, ())
        }
        targets = map(self.registry.target_at, sorted(addresses))
        return [target.replica_id for target in targets if target is not None]

    # -- what can be seen -------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The fleet as last reported, JSON-able and bounded: MAX_SHOWN replicas of each kind."""
        targets, drafts = self.registry.targets(), self.registry.drafts()
        targets.sort(key=lambda target: target.replica_id)
        drafts.sort(key=lambda draft: draft.replica_id)
        assignment = self.registry.assignment
        shown = [draft.replica_id for draft in drafts[:MAX_SHOWN]]
        return {
            "num_targets": len(targets),
            "num_drafts": len(drafts),
            "targets": [self._show_target(target) for target in targets[:MAX_SHOWN]],
            "drafts": [self._show_draft(draft) for draft in drafts[:MAX_SHOWN]],
            "assignment": {draft: list(assignment.get(draft, ())) for draft in shown},
            "classes": [_show_class(*item) for item in _heaviest(self.pool.totals())],
        }

    def _show_target(self, report: TargetReport) -> Plain:
        shown = report.plain()
        del shown["class_counts"], shown["metrics"]  # GET /metrics has those
        load = self.board.load_of(report.replica_id)
        drafts = self.registry.drafts_of(report.address)
        return {
            **shown,
            "classes": [_show_class(*item) for item in _heaviest(report.class_counts)],
            "drafts": [draft.replica_id for draft in drafts],
            "ceilings": (load.ceilings if load else Ceilings()).plain(),
            "starvation": load.starvation if load else 0.0,
            "draft_utilization": load.utilization if load else None,
            "explanation": plain_explanation(self._explanations.get(report.replica_id)),
        }

    def _show_draft(self, report: DraftReport) -> Plain:
        assigned = self.registry.assignment.get(report.replica_id, ())
        shown = report.plain()
        del shown["metrics"]
        return {**shown, "targets": list(assigned)}


def _heaviest(
    counts: Mapping[AcceptanceClass, ClassCounts],
) -> list[tuple[AcceptanceClass, ClassCounts]]:
    ranked = sorted(counts.items(), key=lambda item: -sum(item[1].reached))
    return ranked[:MAX_SHOWN_CLASSES]


def _show_class(kind: AcceptanceClass, counts: ClassCounts) -> Plain:
    return {
        "draft_model": kind.draft_model,
        "mode": kind.mode.value,
        "temperature": kind.temperature,
        "num_draft_tokens": round(sum(counts.reached), 1),
        "acceptance_rate": round(acceptance_rate(counts), 4),
    }
