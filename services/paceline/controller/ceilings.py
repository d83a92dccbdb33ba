"""What a target must do without while its drafts are scarce. Pure; time is an argument.

Drafts are scarce for a target when all four hold (math.md 2g.8, 2h): while it does a pass they
cannot refill a window (K + 1 of their steps take longer), they compute for more than
`max_draft_utilization` of the time, for several sequences at once, and proposals are missing at
one of the targets that they serve. None of them alone is a sign: a draft that runs ahead uses the
time that it has; a window is empty after each correction for a round trip, whatever the draft
does; a lone sequence takes time from nobody. And places (`draft.max_sessions`, BUSY) are something
else: a shorter look-ahead frees none, more drafts do.

Then the draft-ahead limit goes down first (the tokens least likely to be of use), then branches,
then K, none below what drafts make of a window while a pass runs: less would leave them idle. The
steps of most drafts take hardly less without branches; then branches come back at once. The rest
comes back one step at a time, slowly, and last what went first. It does not know sequences, links
or what a policy makes of its ceilings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.fleet_reports import Ceilings, DraftReport, TargetReport

# One step down needs this long to show its effect in heartbeats; one step up is tried so rarely.
SHRINK_INTERVAL_S = 2.0
GROW_INTERVAL_S = 10.0
# A step takes a quarter of what there is.
STEP = 0.75
# Below this share of the limit drafts are at ease.
CALM_SHARE = 0.85
# Sequences per draft pass from which on they share a draft.
MIN_SHARED_BATCH = 1.5
# Share of the wanted proposals that are missing: from the first on it hurts, below the second
# nobody notices.
STARVING = 0.05
SATED = 0.01
# Weight of the newest heartbeat in the means.
SMOOTHING = 0.5
# K + 1 steps in less than this share of a pass: drafts are at ease.
FITS_SHARE = 0.85
# Branches must take so much of a step's time, or they come back: up to that they are worth it, and
# drafts that keep to their budget (protocol/branch_budget.py) take less. Tried again so rarely.
MIN_GAIN = 0.3
RETRY_BRANCHES_S = 300.0
# More steps than a window can hold.
MAX_STEPS_PER_PASS = 1 << 10


@dataclass(frozen=True, slots=True)
class Usage:
    """What a target would use without ceilings: `num_speculative_tokens` is the K in force, the
    three `max_` are its deployment's limits. `steps_per_pass`: steps that its drafts do while it
    does a pass, and a few; no ceiling is below."""

    num_speculative_tokens: int
    max_num_speculative_tokens: int
    max_draft_ahead: int
    max_fan_out: int
    steps_per_pass: int = 1

    @staticmethod
    def of(report: TargetReport, steps_per_pass: int = 1) -> Usage:
        return Usage(
            max(1, math.ceil(report.num_speculative_tokens)),
            max(1, report.max_num_speculative_tokens),
            max(1, report.max_draft_ahead),
            report.max_fan_out,
            steps_per_pass,
        )


def shrink(ceilings: Ceilings, usage: Usage) -> Ceilings:
    """One step down. At the bottom (K is what drafts make in a pass, as much beyond it, no
    branches) nothing changes."""
    num = _least(ceilings.max_num_speculative_tokens, usage.num_speculative_tokens)
    num = min(num, usage.max_num_speculative_tokens)
    # A draft is never given more than 2 K + 1, so a ceiling above that would do nothing.
    ahead = min(_least(ceilings.max_draft_ahead, 2 * num + 1), usage.max_draft_ahead)
    least_ahead = min(num + usage.steps_per_pass, usage.max_draft_ahead)
    if ahead > least_ahead:
        return replace(ceilings, max_draft_ahead=max(least_ahead, int(ahead * STEP)))
    fan_out = _least(ceilings.max_fan_out, usage.max_fan_out)
    if fan_out > 0:
        return replace(ceilings, max_fan_out=fan_out - 1)
    if num > usage.steps_per_pass:
        num = max(usage.steps_per_pass, min(num - 1, int(num * STEP)))
        ahead = min(ahead, num + usage.steps_per_pass)
        return replace(ceilings, max_num_speculative_tokens=num, max_draft_ahead=ahead)
    return ceilings


def grow(ceilings: Ceilings, usage: Usage) -> Ceilings:
    """One step up: K first, then branches, then the draft-ahead limit, until there is none."""
    num, fan_out = ceilings.max_num_speculative_tokens, ceilings.max_fan_out
    ahead = ceilings.max_draft_ahead
    if num is not None:
        more = num + 1
        ahead = None if ahead is None else max(ahead, min(more + 1, usage.max_draft_ahead))
        is_free = more >= usage.max_num_speculative_tokens
        return replace(
            ceilings, max_num_speculative_tokens=None if is_free else more, max_draft_ahead=ahead
        )
    if fan_out is not None:
        return replace(ceilings, max_fan_out=None if fan_out + 1 >= usage.max_fan_out
                       else fan_out + 1)  # fmt: skip
    if ahead is not None:
        more = ahead + max(1, int(ahead * (1 - STEP)))
        return replace(ceilings, max_draft_ahead=None if more >= usage.max_draft_ahead else more)
    return ceilings


def utilization(drafts: Sequence[DraftReport]) -> tuple[float, float] | None:
    """Busy share and batch of a target's drafts, weighted by their sequences; None: unknown."""
    known = [d for d in drafts if d.busy_share is not None]
    weights = [1 + draft.num_sessions for draft in known]
    if not known:
        return None
    busy = sum(w * (d.busy_share or 0.0) for w, d in zip(weights, known, strict=True))
    batch = sum(w * d.batch for w, d in zip(weights, known, strict=True))
    return busy / sum(weights), batch / sum(weights)


def mean_step_ms(drafts: Sequence[DraftReport]) -> float:
    """What a step of a target's drafts takes, weighted by their sequences; 0: unknown."""
    known = [(1 + draft.num_sessions, draft.step_ms) for draft in drafts if draft.step_ms]
    weight = sum(w for w, _ in known)
    return sum(w * step_ms for w, step_ms in known) / weight if weight else 0.0


@dataclass(slots=True)
class TargetLoad:
    """One target's state. `starvation`: missing share of the wanted proposals; `utilization`, of
    its drafts, None before the first report of one; `step_ms` of its drafts and its own `pass_ms`
    (0: unknown). All are means over the last few beats.

    `untrimmed`: ceilings before branches went down, and what a step took then, until it shows
    whether that was of use. `keeps_branches_s`: no other try before."""

    boot_id: str
    ceilings: Ceilings
    wanted: float = 0.0
    missing: float = 0.0
    starvation: float = 0.0
    utilization: float | None = None
    batch: float = 0.0
    step_ms: float = 0.0
    pass_ms: float = 0.0
    changed_s: float = float("-inf")
    untrimmed: tuple[Ceilings, float] | None = None
    keeps_branches_s: float = float("-inf")

    def hear(self, report: TargetReport, drafts: Sequence[DraftReport]) -> None:
        """One heartbeat."""
        wanted, missing = report.wanted - self.wanted, report.missing - self.missing
        self.wanted, self.missing = report.wanted, report.missing
        share = min(1.0, max(0.0, missing / wanted)) if wanted > 0 else 0.0
        self.starvation += SMOOTHING * (share - self.starvation)
        self.step_ms = _smooth(self.step_ms, mean_step_ms(drafts))
        self.pass_ms = _smooth(self.pass_ms, report.pass_ms)
        load = utilization(drafts)
        if load is None:
            self.utilization = None
            return
        before = load[0] if self.utilization is None else self.utilization
        self.utilization = before + SMOOTHING * (load[0] - before)
        self.batch = load[1]

    @property
    def steps_per_pass(self) -> int:
        """Steps that fit into a pass, and two: between passes there is time, too."""
        if not (self.step_ms and self.pass_ms):
            return 1
        return 2 + min(MAX_STEPS_PER_PASS, int(self.pass_ms / self.step_ms))

    def refill_share(self, num_speculative_tokens: int) -> float | None:
        """Of a pass that drafts need for a window and the token behind it; None: unknown."""
        if not (self.step_ms and self.pass_ms):
            return None
        return self.step_ms * (num_speculative_tokens + 1) / self.pass_ms


class CeilingBoard:
    """The ceilings of all targets, by replica id; as many as the registry has targets."""

    def __init__(self, max_draft_utilization: float) -> None:
        self.max_draft_utilization = max_draft_utilization
        self._loads: dict[str, TargetLoad] = {}

    def load_of(self, replica_id: str) -> TargetLoad | None:
        return self._loads.get(replica_id)

    def forget(self, replica_id: str) -> None:
        self._loads.pop(replica_id, None)

    def decide(
        self,
        report: TargetReport,
        drafts: Sequence[DraftReport],
        neighbors: Sequence[str],
        now_s: float,
    ) -> Ceilings:
        """The ceilings of a target from now on. `drafts` are its own, `neighbors` the replica ids
        of targets that share one of them.

        A target that is new here brings its ceilings along: an earlier controller's.
        """
        load = self._loads.get(report.replica_id)
        if load is None or load.boot_id != report.boot_id:
            load = TargetLoad(report.boot_id, report.ceilings, report.wanted, report.missing)
            load.changed_s = now_s
            self._loads[report.replica_id] = load
        load.hear(report, drafts)
        usage, elapsed_s = Usage.of(report, load.steps_per_pass), now_s - load.changed_s
        if self._is_scarce(load, usage, neighbors):
            if elapsed_s >= SHRINK_INTERVAL_S and not self._undo(load, now_s):
                self._shrink(load, usage, now_s)
        elif elapsed_s >= GROW_INTERVAL_S and self._is_calm(load, usage, neighbors):
            load.ceilings, load.changed_s = grow(load.ceilings, usage), now_s
            load.untrimmed = None
        return load.ceilings

    def _shrink(self, load: TargetLoad, usage: Usage, now_s: float) -> None:
        before = load.ceilings
        if now_s < load.keeps_branches_s:
            after = shrink(replace(before, max_fan_out=0), usage)
            after = replace(after, max_fan_out=before.max_fan_out)
        else:
            after = shrink(before, usage)
        if after.max_fan_out != before.max_fan_out and load.untrimmed is None:
            load.untrimmed = (before, load.step_ms)
        load.ceilings, load.changed_s = after, now_s

    def _undo(self, load: TargetLoad, now_s: float) -> bool:
        """The last branches have gone and steps are no shorter: they come back."""
        if load.untrimmed is None or load.ceilings.max_fan_out != 0:
            return False
        (before, step_ms), load.untrimmed = load.untrimmed, None
        if load.step_ms <= (1.0 - MIN_GAIN) * step_ms:
            return False
        load.ceilings, load.changed_s = before, now_s
        load.keeps_branches_s = now_s + RETRY_BRANCHES_S
        return True

    def _is_scarce(self, load: TargetLoad, usage: Usage, neighbors: Sequence[str]) -> bool:
        """At the ceilings of now. What takes how long must be known."""
        num = _least(load.ceilings.max_num_speculative_tokens, usage.num_speculative_tokens)
        refill = load.refill_share(num)
        return (
            refill is not None
            and refill > 1.0
            and load.utilization is not None
            and load.utilization > self.max_draft_utilization
            and load.batch >= MIN_SHARED_BATCH
            and self._starvation(load, neighbors) >= STARVING
        )

    def _is_calm(self, load: TargetLoad, usage: Usage, neighbors: Sequence[str]) -> bool:
        """Also one step up from here."""
        is_at_ease = (
            load.utilization is None
            or load.utilization < CALM_SHARE * self.max_draft_utilization
            or load.batch < MIN_SHARED_BATCH
        )
        if is_at_ease:
            return True
        num, ceiling = usage.num_speculative_tokens, load.ceilings.max_num_speculative_tokens
        if ceiling is not None and num >= ceiling:
            num = ceiling + 1  # it binds; else K is what it would be without
        refill = load.refill_share(num)
        if refill is None or refill < FITS_SHARE:
            return True
        return refill <= 1.0 and self._starvation(load, neighbors) < SATED

    def _starvation(self, load: TargetLoad, neighbors: Sequence[str]) -> float:
        others = (self._loads.get(replica_id) for replica_id in neighbors)
        return max([load.starvation, *(other.starvation for other in others if other)])


def _smooth(mean: float, value: float) -> float:
    """0: unknown; what is not known any more stays as it was."""
    if not (mean and value):
        return value or mean
    return mean + SMOOTHING * (value - mean)


def _least(ceiling: int | None, otherwise: int) -> int:
    return otherwise if ceiling is None else min(ceiling, otherwise)
