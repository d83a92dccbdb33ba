"""What a scheduler counts. Knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerStats:
    """Counts since start. A round is one pass of one sequence that committed tokens;
    `num_rows` were computed, `num_prefix_tokens` found in the prefix cache instead; `busy_us` is
    the time that passes took."""

    num_passes: int = 0
    num_rows: int = 0
    busy_us: int = 0
    num_rounds: int = 0
    num_plain_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_holds: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_prefix_tokens: int = 0
    num_queue_timeouts: int = 0
    num_failed_passes: int = 0

    def count_round(self, num_draft: int, num_accepted: int, num_committed: int) -> None:
        self.num_rounds += 1
        self.num_plain_rounds += num_draft == 0
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        self.num_committed_tokens += num_committed
