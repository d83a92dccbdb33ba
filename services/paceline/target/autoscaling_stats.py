"""What a target tells the autoscaling policy. Makes no rates: the policy has the times."""

from __future__ import annotations

from paceline.target.driver import TargetDriver
from paceline.target.scheduler import Scheduler
from paceline.target.sequence import Sequence


def autoscaling_stats(driver: TargetDriver) -> dict[str, float]:
    """For `record_autoscaling_stats`."""
    return scheduler_stats(driver.scheduler)


def scheduler_stats(scheduler: Scheduler) -> dict[str, float]:
    """Gauges of now, and counts since start.

    `kv_share` is what running texts take, of all blocks; `num_wanting_draft` are the sequences
    that want a draft, `num_without_draft` those of them that have none. `wanted_tokens` and
    `missing_tokens` are the policy's `StarvationCounts`; `num_speculative_tokens` is the mean K of
    those that want a draft.
    """
    stats, starvation = scheduler.stats, scheduler.policy.starvation()
    wanting = _wanting_draft(scheduler)
    num_without = sum(sequence.draft_id is None for sequence in wanting)
    num_tokens = sum(sequence.lookahead.cap for sequence in wanting)
    num_taken = scheduler.info.num_blocks - scheduler.num_free_blocks
    return {
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "kv_share": num_taken / scheduler.info.num_blocks,
        "max_rows_per_pass": scheduler.config.max_rows_per_pass,
        "num_passes": stats.num_passes,
        "num_rows": stats.num_rows,
        "busy_us": stats.busy_us,
        "num_verified_tokens": stats.num_draft_tokens,
        "num_wanting_draft": len(wanting),
        "num_without_draft": num_without,
        "num_speculative_tokens": num_tokens / len(wanting) if wanting else 0.0,
        "wanted_tokens": starvation.wanted,
        "missing_tokens": starvation.missing,
    }


def _wanting_draft(scheduler: Scheduler) -> list[Sequence]:
    """Running sequences to which a draft could bring something."""
    running, may_open = scheduler.running_sequences(), scheduler.drafts.may_open
    return [s for s in running if s.lookahead.cap and may_open(s, s.next_open_us)]
