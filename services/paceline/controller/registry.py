"""Which replicas live and which draft serves which target. Soft state, pure; time is an argument.

Everything here is rebuilt from heartbeats. If it is lost, the last assignment stays in force at
the drafts. It does not know sequences, acceptance or Serve.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One heartbeat of a target. `address` is host:port of its Speculation server."""

    replica_id: str
    boot_id: str
    address: str
    pid: int
    num_running: int = 0
    num_waiting: int = 0
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class DraftReport:
    """One heartbeat of a draft. `connected` lists the target addresses with a live stream."""

    replica_id: str
    boot_id: str
    pid: int
    max_sessions: int
    num_sessions: int = 0
    connected: tuple[str, ...] = ()


def assign(
    targets: Sequence[str],
    drafts: Sequence[str],
    targets_per_draft: int,
    previous: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Target addresses for each draft: balanced coverage, previous pairs kept where possible.

    Every draft serves min(len(targets), targets_per_draft) targets. Coverage of two targets
    differs by at most one; while it is balanced, pairs of `previous` stay.
    """
    size = min(len(targets), targets_per_draft)
    if size == len(targets):
        return {draft: tuple(sorted(targets)) for draft in drafts}
    kept = _keep(sorted(targets), sorted(drafts), size, previous or {})
    _fill(kept, targets, size)
    return {draft: tuple(sorted(mine)) for draft, mine in kept.items()}


def _keep(
    targets: Sequence[str],
    drafts: Sequence[str],
    size: int,
    previous: Mapping[str, tuple[str, ...]],
) -> dict[str, list[str]]:
    """The pairs of `previous` that fit a balanced coverage; what must go is spread over drafts."""
    floor, spare = divmod(size * len(drafts), len(targets))
    kept = {draft: list(previous.get(draft, ())) for draft in drafts}
    holders: dict[str, list[str]] = {target: [] for target in targets}
    for draft, mine in kept.items():
        mine[:] = [target for target in mine if target in holders][:size]
        for target in mine:
            holders[target].append(draft)
    num_dropped = dict.fromkeys(drafts, 0)
    for target, mine in holders.items():
        allowed = floor
        if len(mine) > floor and spare > 0:
            allowed, spare = floor + 1, spare - 1
        mine.sort(key=lambda draft: (num_dropped[draft], draft))
        for draft in mine[: max(0, len(mine) - allowed)]:
            kept[draft].remove(target)
            num_dropped[draft] += 1
    return kept


def _fill(kept: dict[str, list[str]], targets: Sequence[str], size: int) -> None:
    """Give every draft `size` targets, always the least covered it lacks; then even out."""
    fixed = {draft: frozenset(mine) for draft, mine in kept.items()}
    coverage = Counter(dict.fromkeys(targets, 0))
    for mine in kept.values():
        coverage.update(mine)
    heap = [(count, target) for target, count in coverage.items()]
    heapq.heapify(heap)
    for draft in sorted(kept):
        popped: list[tuple[int, str]] = []
        while len(kept[draft]) < size:
            count, target = heapq.heappop(heap)
            if target not in fixed[draft]:
                kept[draft].append(target)
                count += 1
            popped.append((count, target))
        for entry in popped:
            heapq.heappush(heap, entry)
    coverage.update({target: count - coverage[target] for count, target in heap})
    while True:
        low = min((c, t) for t, c in coverage.items())[1]
        high = max((c, t) for t, c in coverage.items())[1]
        if coverage[high] - coverage[low] <= 1:
            return
        # One exists: more drafts hold `high` than hold `low`. A new pair moves before an old one.
        movable = (d for d in kept if high in kept[d] and low not in kept[d])
        draft = min(movable, key=lambda d: (high in fixed[d], d))
        kept[draft][kept[draft].index(high)] = low
        coverage[high] -= 1
        coverage[low] += 1


@dataclass
class Registry:
    """Heartbeats in, assignment out. A replica silent for `timeout_s` is forgotten."""

    timeout_s: float
    targets_per_draft: int
    _targets: dict[str, tuple[TargetReport, float]] = field(default_factory=dict)
    _drafts: dict[str, tuple[DraftReport, float]] = field(default_factory=dict)
    _assignment: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # The replicas that `_assignment` was made for: most heartbeats change nothing.
    _assigned_for: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))

    def report_target(self, report: TargetReport, now_s: float) -> None:
        # A restarted replica may come back on the same address under another id.
        stale = [
            replica_id
            for replica_id, (old, _) in self._targets.items()
            if old.address == report.address and replica_id != report.replica_id
        ]
        for replica_id in stale:
            del self._targets[replica_id]
        self._targets[report.replica_id] = (report, now_s)
        self._expire(now_s)

    def report_draft(self, report: DraftReport, now_s: float) -> tuple[str, ...]:
        """Returns the target addresses that this draft should have streams to.

        A live stream to a target that has not reported (yet, or in time) is kept: it is better
        evidence than a missing heartbeat, and a new controller has heard of nobody.
        """
        if report.replica_id not in self._drafts:
            self._assignment.setdefault(report.replica_id, report.connected)
        self._drafts[report.replica_id] = (report, now_s)
        self._expire(now_s)
        known = {target.address for target, _ in self._targets.values()}
        unheard = [address for address in report.connected if address not in known]
        return tuple(sorted({*self._assignment.get(report.replica_id, ()), *unheard}))

    def remove(self, replica_id: str, now_s: float) -> None:
        """An orderly goodbye."""
        self._targets.pop(replica_id, None)
        self._drafts.pop(replica_id, None)
        self._expire(now_s)

    def _expire(self, now_s: float) -> None:
        limit = now_s - self.timeout_s
        self._targets = {k: v for k, v in self._targets.items() if v[1] >= limit}
        self._drafts = {k: v for k, v in self._drafts.items() if v[1] >= limit}
        addresses = {report.address for report, _ in self._targets.values()}
        members = (addresses, set(self._drafts))
        if members != self._assigned_for:
            self._assigned_for = members
            self._assignment = assign(
                sorted(addresses), sorted(self._drafts), self.targets_per_draft, self._assignment
            )

    def targets(self) -> list[TargetReport]:
        return [report for report, _ in self._targets.values()]

    def drafts(self) -> list[DraftReport]:
        return [report for report, _ in self._drafts.values()]
