"""A draft's side of its heartbeats: what it says of itself. Knows no Ray and no clock."""

from __future__ import annotations

import os

from paceline.draft.metrics import draft_snapshot
from paceline.fleet_reports import DraftReport, Plain
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot
from paceline.protocol.draft_table import DraftTable

_US = 1e6


class FleetReporter:
    """Figures of one heartbeat are those since the one before. `snapshot`: what the last one said
    that the draft counts."""

    def __init__(self, table: DraftTable, replica_id: str, boot_id: str) -> None:
        self._table = table
        self._replica_id = replica_id
        self._boot_id = boot_id
        self._before = (0, 0, 0)
        self._before_s: float | None = None
        self.snapshot = Snapshot(Role.DRAFT)

    def report(self, connected: tuple[str, ...], now_s: float) -> Plain:
        """The next heartbeat; `connected` are the targets with a live stream. Nothing is said of
        the busy share before the second one."""
        stats = self._table.stats
        now = (
            stats.busy_us,
            stats.num_passes,
            stats.num_drafted_tokens,
        )
        busy_us, num_passes, num_tokens = (
            new - old for new, old in zip(now, self._before, strict=True)
        )
        elapsed_s = 0.0 if self._before_s is None else now_s - self._before_s
        self._before, self._before_s = now, now_s
        self.snapshot = draft_snapshot(self._table, len(connected))
        return DraftReport(
            replica_id=self._replica_id,
            boot_id=self._boot_id,
            pid=os.getpid(),
            max_sessions=self._table.max_sessions,
            num_sessions=len(self._table),
            connected=connected,
            is_draining=self._table.is_draining,
            busy_share=min(1.0, busy_us / _US / elapsed_s) if elapsed_s > 0 else None,
            num_drafted_tokens=num_tokens,
            step_ms=busy_us / num_passes / 1e3 if num_passes else 0.0,
            batch=num_tokens / num_passes if num_passes else 0.0,
            tokens_per_s=num_tokens / elapsed_s if elapsed_s > 0 else None,
            metrics=self.snapshot,
        ).plain()
