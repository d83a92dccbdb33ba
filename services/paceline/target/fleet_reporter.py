"""A target's side of its heartbeats: what it says of itself, and what it does with the answer.

It knows the scheduler and its policy, no Ray and no clock.
"""

from __future__ import annotations

import dataclasses
import os

from paceline.fleet_reports import (
    Ceilings,
    Plain,
    TargetReport,
    guidance,
    read_guidance,
)
from paceline.protocol.lookahead import Explanation, Guidance
from paceline.protocol.messages import OpenStatus
from paceline.target.scheduler import Scheduler

# Its candidates are most of a heartbeat, and a person looks at them.
EXPLAIN_EVERY_BEATS = 5
# Without a word of the controller for so long nobody knows what is scarce: ceilings fall. What the
# fleet knows of acceptance stays.
CEILINGS_EXPIRE_S = 30.0


class FleetReporter:
    """`config_error`: why this replica's last `user_config` was not taken."""

    def __init__(self, scheduler: Scheduler, replica_id: str, boot_id: str, address: str) -> None:
        self._scheduler = scheduler
        self._empty = TargetReport(replica_id, boot_id, address, os.getpid())
        self._guidance = guidance({}, Ceilings())
        self._ceilings = Ceilings()
        self._heard_s = 0.0
        self._num_beats = 0
        self._num_passes = 0
        self._num_rounds = 0
        self._busy_us = 0
        self.config_error = ""

    def report(self, num_drafts: int) -> Plain:
        """The next heartbeat. `num_drafts` are attached."""
        scheduler = self._scheduler
        policy, limits, stats = scheduler.policy, scheduler.policy.limits, scheduler.stats
        num_passes = stats.num_passes - self._num_passes
        num_rounds = stats.num_rounds - self._num_rounds
        busy_us = stats.busy_us - self._busy_us
        self._num_passes, self._num_rounds = stats.num_passes, stats.num_rounds
        self._busy_us = stats.busy_us
        explanation = policy.explain()
        is_due = self._num_beats % EXPLAIN_EVERY_BEATS == 0
        self._num_beats += 1
        starvation = policy.starvation()
        return dataclasses.replace(
            self._empty,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_drafts=num_drafts,
            batch=num_rounds / num_passes if num_passes else 0.0,
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
            pass_ms=busy_us / num_passes / 1e3 if num_passes else 0.0,
        ).plain()

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
