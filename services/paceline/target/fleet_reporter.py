"""A target's side of its heartbeats: what it says of itself, and what it does with the answer.

It knows the scheduler and its policy, no Ray and no clock.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from paceline.fleet_reports import (
    Ceilings,
    Plain,
    TargetReport,
    guidance,
    read_guidance,
)
from paceline.methods import ProposalSource
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot
from paceline.protocol.lookahead import Explanation, Guidance
from paceline.protocol.messages import OpenStatus
from paceline.target.metrics import kv_usage, target_snapshot
from paceline.target.scheduler import Scheduler
from paceline.target.stats import SchedulerStats

# Its candidates are most of a heartbeat, and a person looks at them.
EXPLAIN_EVERY_BEATS = 5
# Without a word of the controller for so long nobody knows what is scarce: ceilings fall. What the
# fleet knows of acceptance stays.
CEILINGS_EXPIRE_S = 30.0


class FleetReporter:
    """`config_error`: why this replica's last `user_config` was not taken. `snapshot`: what the
    last report said that it counts."""

    def __init__(self, scheduler: Scheduler, replica_id: str, boot_id: str, address: str) -> None:
        self._scheduler = scheduler
        self._empty = TargetReport(replica_id, boot_id, address, os.getpid())
        self._guidance = guidance({}, Ceilings())
        self._ceilings = Ceilings()
        self._heard_s = 0.0
        self._num_beats = 0
        self._before = _Counts()
        self._before_s: float | None = None
        self._proposed: dict[ProposalSource, int] = {}
        self.config_error = ""
        self.snapshot = Snapshot(Role.TARGET)

    def report(
        self, num_drafts: int, now_s: float, rtt_us: Mapping[str, int] | None = None
    ) -> Plain:
        """The next heartbeat. `num_drafts` are attached; `rtt_us` by draft replica."""
        scheduler, rtt_us = self._scheduler, rtt_us or {}
        policy, limits = scheduler.policy, scheduler.policy.limits
        now = _Counts.of(scheduler.stats)
        since = now.since(self._before)
        elapsed_s = 0.0 if self._before_s is None else now_s - self._before_s
        self._before, self._before_s = now, now_s
        explanation = policy.explain()
        self.snapshot = target_snapshot(scheduler, rtt_us, explanation)
        is_due = self._num_beats % EXPLAIN_EVERY_BEATS == 0
        self._num_beats += 1
        starvation = policy.starvation()
        return dataclasses.replace(
            self._empty,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_drafts=num_drafts,
            batch=_ratio(since.num_rounds, since.num_passes) or 0.0,
            num_speculative_tokens=self._num_speculative_tokens(explanation),
            max_num_speculative_tokens=limits.max_num_speculative_tokens,
            max_draft_ahead=limits.max_draft_ahead,
            max_fan_out=limits.max_fan_out,
            wanted=starvation.wanted,
            missing=starvation.missing,
            num_busy=scheduler.drafts.counts[OpenStatus.BUSY],
            class_counts=policy.class_counts(),
            ceilings=self._ceilings,
            explanation=explanation if is_due else None,
            config_error=self.config_error,
            pass_ms=_ratio(since.busy_us / 1e3, since.num_passes) or 0.0,
            kv_cache_usage=kv_usage(scheduler),
            busy_share=_share(since.busy_us / 1e6, elapsed_s),
            tokens_per_s=_ratio(since.num_committed_tokens, elapsed_s),
            acceptance_rate=_ratio(since.num_accepted_tokens, since.num_draft_tokens),
            window=self._window(),
            rtt_ms=max(rtt_us.values()) / 1e3 if rtt_us else None,
            speculation_state=policy.profit.deal.state.value,
            breakers=scheduler.drafts.pool.breaker_states(),
            metrics=self.snapshot,
            sources=self._sources(),
        ).plain()

    def _sources(self) -> dict[str, float]:
        """Shares of the proposals since the last beat."""
        now = {s: c.num_draft_tokens for s, c in self._scheduler.stats.by_source.items()}
        since = {source: count - self._proposed.get(source, 0) for source, count in now.items()}
        self._proposed, num = now, sum(since.values())
        return {source: count / num for source, count in since.items() if count}

    def _window(self) -> float:
        """Mean number of proposals that wait for a pass, over the running sequences."""
        running = self._scheduler.running_sequences()
        return _ratio(sum(s.session.window_len for s in running), len(running)) or 0.0

    def _num_speculative_tokens(self, explanation: Explanation | None) -> float:
        """The K in force: the last decision's; where it is fixed, or before there is one, the
        configured."""
        limits = self._scheduler.policy.limits
        if limits.is_adaptive and explanation is not None:
            chosen = explanation.choices[explanation.chosen : explanation.chosen + 1]
            if chosen:
                return chosen[0].num_speculative_tokens
        return min(limits.num_speculative_tokens, limits.max_num_speculative_tokens)

    def hear(self, answer: object, now_s: float) -> None:
        """The controller's word. The last one holds until there is another, ceilings only for
        CEILINGS_EXPIRE_S. Raises ReportError."""
        priors, ceilings = read_guidance(answer)
        self._heard_s = now_s
        self._guide(guidance(priors, ceilings), ceilings)

    def expire(self, now_s: float) -> None:
        """Asked before every heartbeat, answered or not."""
        if self._ceilings != Ceilings() and now_s - self._heard_s >= CEILINGS_EXPIRE_S:
            self._guide(guidance(self._guidance.priors, Ceilings()), Ceilings())

    def _guide(self, word: Guidance, ceilings: Ceilings) -> None:
        self._guidance, self._ceilings = word, ceilings
        self._scheduler.policy.guide(word)


@dataclasses.dataclass(frozen=True, slots=True)
class _Counts:
    """Those of the scheduler's that rates are made of."""

    num_passes: int = 0
    num_rounds: int = 0
    busy_us: int = 0
    num_committed_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @staticmethod
    def of(stats: SchedulerStats) -> _Counts:
        return _Counts(*(getattr(stats, f.name) for f in dataclasses.fields(_Counts)))

    def since(self, before: _Counts) -> _Counts:
        names = [f.name for f in dataclasses.fields(_Counts)]
        return _Counts(*(getattr(self, name) - getattr(before, name) for name in names))


def _ratio(count: float, of: float) -> float | None:
    return count / of if of > 0 else None


def _share(count: float, of: float) -> float | None:
    share = _ratio(count, of)
    return None if share is None else min(1.0, share)
