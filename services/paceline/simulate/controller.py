"""The Controller of a simulated fleet: heartbeats in, ceilings out, while drafts are scarce.

The real `controller.ceilings` decides. Only targets with a policy of their own report; their
followers do what they do. Replicas neither come nor go, so the assignment stays, and priors are
not pooled: each policy learns by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import SpeculationConfig
from paceline.controller.ceilings import CeilingBoard
from paceline.fleet_reports import Ceilings, DraftReport, TargetReport, guidance
from paceline.simulate.clock import Clock
from paceline.simulate.decider import PolicyDecider
from paceline.simulate.draft import SimDraft


@dataclass(slots=True)
class _Beat:
    """A replica's counts at its last heartbeat. `num_steps`: of a target, its passes."""

    at_us: float = 0.0
    busy_us: float = 0.0
    num_steps: int = 0
    num_rows: int = 0


class SimController:
    """`leaders`: each policy with the drafts of its target."""

    def __init__(
        self,
        clock: Clock,
        interval_s: float,
        max_draft_utilization: float,
        speculation: SpeculationConfig,
        leaders: list[tuple[PolicyDecider, list[SimDraft]]],
    ) -> None:
        self._clock = clock
        self._interval_us = 1e6 * interval_s
        self._speculation = speculation
        self._leaders = leaders
        self._board = CeilingBoard(max_draft_utilization)
        self._drafts = {draft.id: draft for _, drafts in leaders for draft in drafts}
        self._beats = {draft_id: _Beat() for draft_id in self._drafts}
        self._target_beats = [_Beat() for _ in leaders]
        self._ceilings = [Ceilings()] * len(leaders)
        self.min_draft_ahead: int | None = None  # the lowest ceiling that was ever in force

    def start(self) -> None:
        if self._leaders:
            self._clock.at(self._interval_us, self._beat)

    def _beat(self, now_us: float) -> None:
        reports = {draft_id: self._report(draft_id, now_us) for draft_id in self._drafts}
        sharing = self._sharing()
        for number, (leader, drafts) in enumerate(self._leaders):
            mine = [reports[draft.id] for draft in drafts]
            report = self._target_report(number, leader)
            ceilings = self._board.decide(report, mine, sharing[number], now_us / 1e6)
            if ceilings != self._ceilings[number]:
                self._ceilings[number] = ceilings
                leader.guide(guidance({}, ceilings))
                ahead = ceilings.max_draft_ahead
                if ahead is not None:
                    self.min_draft_ahead = min(ahead, self.min_draft_ahead or ahead)
        self._clock.at(now_us + self._interval_us, self._beat)

    def _sharing(self) -> list[list[str]]:
        """For each leader the others whose targets share a draft with its own."""
        ids = [{draft.id for draft in drafts} for _, drafts in self._leaders]
        return [
            [str(other) for other, theirs in enumerate(ids) if other != number and mine & theirs]
            for number, mine in enumerate(ids)
        ]

    def _report(self, draft_id: int, now_us: float) -> DraftReport:
        draft, old = self._drafts[draft_id], self._beats[draft_id]
        num_steps = draft.num_steps - old.num_steps
        num_rows = draft.num_tokens - old.num_rows
        busy_us = draft.busy_us - old.busy_us
        share = min(1.0, busy_us / (now_us - old.at_us))
        self._beats[draft_id] = _Beat(now_us, draft.busy_us, draft.num_steps, draft.num_tokens)
        return DraftReport(
            replica_id=f"draft-{draft_id}",
            boot_id="simulated",
            pid=0,
            max_sessions=draft.kind.max_sessions,
            num_sessions=len(draft.sessions),
            busy_share=share,
            num_drafted_tokens=num_rows,
            step_ms=busy_us / num_steps / 1e3 if num_steps else 0.0,
            batch=num_rows / num_steps if num_steps else 0.0,
        )

    def _target_report(self, number: int, leader: PolicyDecider) -> TargetReport:
        counts, speculation = leader.policy.starvation(), self._speculation
        old = self._target_beats[number]
        num_passes, busy_us = leader.num_passes - old.num_steps, leader.busy_us - old.busy_us
        self._target_beats[number] = _Beat(0.0, leader.busy_us, leader.num_passes)
        return TargetReport(
            replica_id=str(number),
            boot_id="simulated",
            address=str(number),
            pid=0,
            num_speculative_tokens=leader.mean_cap,
            max_num_speculative_tokens=speculation.max_num_speculative_tokens,
            max_draft_ahead=speculation.max_draft_ahead,
            max_fan_out=speculation.max_fan_out,
            wanted=counts.wanted,
            missing=counts.missing,
            ceilings=self._ceilings[number],
            pass_ms=busy_us / num_passes / 1e3 if num_passes else 0.0,
        )
