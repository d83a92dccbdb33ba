"""What a draft table counts. Knows nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.metrics.buckets import Buckets
from paceline.metrics.target_catalog import PASS_S_BUCKETS


@dataclass
class DraftTableStats:
    """Counts since start. Tokens of branches are no drafted tokens; a promotion is a rewind, too.

    `num_branches` counts those of which something was computed; `busy_us` is the time of passes.
    """

    num_passes: int = 0
    num_opened: int = 0
    num_busy: int = 0
    num_unsupported: int = 0
    num_rewinds: int = 0
    num_dropped_tokens: int = 0
    num_expired: int = 0
    num_evicted: int = 0
    num_poisoned: int = 0
    num_nacks: int = 0
    num_drafted_tokens: int = 0
    num_branches: int = 0
    num_branch_tokens: int = 0
    num_promoted: int = 0
    busy_us: int = 0
    pass_s: Buckets = field(default_factory=lambda: Buckets(PASS_S_BUCKETS))

    def end_pass(self, num_items: int, pass_us: int) -> None:
        """One of no items only freed something."""
        self.busy_us += pass_us
        if num_items:
            self.num_passes += 1
            self.pass_s.observe(pass_us / 1e6)
