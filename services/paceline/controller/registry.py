"""Which replicas live and which draft serves which target. Soft state, pure; time is an argument.

Everything here is rebuilt from heartbeats. If it is lost, the last assignment stays in force at
the drafts, and the next registry takes it over from them. It does not know sequences, acceptance
or Serve.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.controller.assignment import Assignment, Pairs, assign
from paceline.fleet_reports import DraftReport, ReportError, TargetReport

__all__ = ["DraftReport", "Registry", "TargetReport", "assign"]

MAX_TARGETS = 4096
MAX_DRAFTS = 4096
# Work shifts: while drafts are too few, who has them is looked at again so often.
REBALANCE_S = 30.0
# A fleet of more replicas than this is not assigned anew for each one that comes.
SMALL_FLEET = 64
MIN_ASSIGN_INTERVAL_S = 0.25


Report = TypeVar("Report", TargetReport, DraftReport)


@dataclass
class _Heard(Generic[Report]):
    """The newest report. `first_s`: when this registry heard of the replica first."""

    report: Report
    first_s: float
    last_s: float


@dataclass
class Registry:
    """Heartbeats in, assignment out. A replica silent for `timeout_s` is forgotten."""

    timeout_s: float
    targets_per_draft: int
    drafts_per_target: int = 1
    # In the order in which they were heard last.
    _targets: OrderedDict[str, _Heard[TargetReport]] = field(default_factory=OrderedDict)
    _drafts: OrderedDict[str, _Heard[DraftReport]] = field(default_factory=OrderedDict)
    _by_address: dict[str, str] = field(default_factory=dict)
    _assignment: Pairs = field(default_factory=dict)
    _drafts_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # The streams that a draft had when it was first heard: what an earlier registry assigned.
    _inherited: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # Replicas came, left or began to drain since the last assignment.
    _is_stale: bool = False
    _is_short: bool = False
    _assigned_s: float = float("-inf")
    # Forgotten for their silence, since this registry is here.
    num_targets_lost: int = 0
    num_drafts_lost: int = 0
    # Told the replica id of every target that is forgotten.
    on_target_gone: Callable[[str], None] = lambda replica_id: None

    # -- heartbeats -------------------------------------------------------------------------

    def report_target(self, report: TargetReport, now_s: float) -> None:
        """Raises ReportError for one target more than MAX_TARGETS."""
        self.expire(now_s)
        # A restarted replica may come back on the same address under another id.
        holder = self._by_address.get(report.address)
        if holder is not None and holder != report.replica_id:
            self._forget_target(holder)
        heard = self._targets.get(report.replica_id)
        if heard is None:
            if len(self._targets) >= MAX_TARGETS:
                raise ReportError(f"this fleet has {MAX_TARGETS} targets; more are not taken")
            heard = self._targets[report.replica_id] = _Heard(report, now_s, now_s)
            self._is_stale = True
        old, heard.report, heard.last_s = heard.report, report, now_s
        self._targets.move_to_end(report.replica_id)
        if old.address != report.address:
            self._by_address.pop(old.address, None)
        if old.address != report.address or old.is_draining != report.is_draining:
            self._is_stale = True
        self._by_address[report.address] = report.replica_id

    def report_draft(self, report: DraftReport, now_s: float) -> tuple[str, ...]:
        """Returns the target addresses that this draft should have streams to.

        A live stream to a target that has not reported (yet, or in time) is kept: it is better
        evidence than a missing heartbeat. A draft that came with streams keeps all of them for
        `timeout_s`: a new controller has heard of nobody. Raises ReportError for one draft more
        than MAX_DRAFTS.
        """
        self.expire(now_s)
        heard = self._drafts.get(report.replica_id)
        if heard is None:
            if len(self._drafts) >= MAX_DRAFTS:
                raise ReportError(f"this fleet has {MAX_DRAFTS} drafts; more are not taken")
            heard = self._drafts[report.replica_id] = _Heard(report, now_s, now_s)
            self._inherited[report.replica_id] = report.connected
            self._is_stale = True
        self._is_stale |= heard.report.is_draining != report.is_draining
        heard.report, heard.last_s = report, now_s
        self._drafts.move_to_end(report.replica_id)
        if now_s - heard.first_s >= self.timeout_s:
            self._inherited.pop(report.replica_id, None)  # every target that lives was heard
        self._assign(now_s)
        assigned = self._assignment.get(report.replica_id, ())
        if self._inherited.get(report.replica_id):
            # We have not the whole picture yet: nothing is taken, free places are filled.
            more = [address for address in assigned if address not in report.connected]
            num_free = max(0, self.targets_per_draft - len(report.connected))
            return tuple(sorted({*report.connected, *more[:num_free]}))
        unheard = [address for address in report.connected if address not in self._by_address]
        return tuple(sorted({*assigned, *unheard}))

    def remove(self, replica_id: str, now_s: float) -> None:
        """An orderly goodbye."""
        self._forget_target(replica_id)
        self._forget_draft(replica_id)
        self.expire(now_s)

    def set_limits(self, targets_per_draft: int, drafts_per_target: int) -> None:
        if (targets_per_draft, drafts_per_target) != (
            self.targets_per_draft,
            self.drafts_per_target,
        ):
            self.targets_per_draft, self.drafts_per_target = targets_per_draft, drafts_per_target
            self._is_stale = True

    def expire(self, now_s: float) -> None:
        """Forget who has been silent for too long."""
        limit = now_s - self.timeout_s
        while self._targets and (first := next(iter(self._targets.items())))[1].last_s < limit:
            self._forget_target(first[0])
            self.num_targets_lost += 1
        while self._drafts and (oldest := next(iter(self._drafts.items())))[1].last_s < limit:
            self._forget_draft(oldest[0])
            self.num_drafts_lost += 1

    def _forget_target(self, replica_id: str) -> None:
        heard = self._targets.pop(replica_id, None)
        if heard is not None:
            self._by_address.pop(heard.report.address, None)
            self.on_target_gone(replica_id)
            self._is_stale = True

    def _forget_draft(self, replica_id: str) -> None:
        self._inherited.pop(replica_id, None)
        if self._drafts.pop(replica_id, None) is not None:
            self._is_stale = True

    def _assign(self, now_s: float) -> None:
        """Anew when somebody came or left, or work may have shifted while drafts are too few."""
        elapsed_s = now_s - self._assigned_s
        is_small = len(self._targets) + len(self._drafts) <= SMALL_FLEET
        if self._is_stale:
            if not is_small and elapsed_s < MIN_ASSIGN_INTERVAL_S:
                return
        elif not self._is_short or elapsed_s < REBALANCE_S:
            return
        targets = {heard.report.address: heard.report for heard in self._targets.values()}
        drafts = {name: heard.report for name, heard in self._drafts.items()}
        plan = Assignment(
            targets,
            drafts,
            self.targets_per_draft,
            {draft: self._before(draft) for draft in drafts},
            self.drafts_per_target,
            [address for address, each in targets.items() if each.is_draining]
            + [name for name, each in drafts.items() if each.is_draining],
        )
        self._assignment = plan.pairs(
            {address: each.num_running + each.num_waiting for address, each in targets.items()},
            {name: each.max_sessions for name, each in drafts.items()},
        )
        self._is_stale, self._is_short, self._assigned_s = False, plan.is_short, now_s
        self._drafts_of = _inverse(self._assignment)

    def _before(self, draft: str) -> tuple[str, ...]:
        return (*self._inherited.get(draft, ()), *self._assignment.get(draft, ()))

    # -- what is known ----------------------------------------------------------------------

    def targets(self) -> list[TargetReport]:
        return [heard.report for heard in self._targets.values()]

    def drafts(self) -> list[DraftReport]:
        return [heard.report for heard in self._drafts.values()]

    @property
    def assignment(self) -> Mapping[str, tuple[str, ...]]:
        """Target addresses by draft, as of the last time that a draft asked."""
        return self._assignment

    def target_at(self, address: str) -> TargetReport | None:
        replica_id = self._by_address.get(address)
        return None if replica_id is None else self._targets[replica_id].report

    def drafts_of(self, address: str) -> list[DraftReport]:
        """The living drafts that are assigned to a target."""
        names = self._drafts_of.get(address, ())
        return [self._drafts[name].report for name in names if name in self._drafts]


def _inverse(pairs: Pairs) -> dict[str, tuple[str, ...]]:
    out: dict[str, list[str]] = {}
    for draft, targets in sorted(pairs.items()):
        for target in targets:
            out.setdefault(target, []).append(draft)
    return {target: tuple(drafts) for target, drafts in out.items()}
