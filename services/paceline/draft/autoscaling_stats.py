"""What a draft tells the autoscaling policy. Makes no rates: the policy has the times."""

from __future__ import annotations

from paceline.draft.driver import DraftDriver
from paceline.protocol.draft_table import DraftTable


def autoscaling_stats(driver: DraftDriver) -> dict[str, float]:
    """For `record_autoscaling_stats`."""
    return table_stats(driver.table)


def table_stats(table: DraftTable) -> dict[str, float]:
    """Places taken and given, and counts since start."""
    return {
        "num_sessions": len(table),
        "max_sessions": table.max_sessions,
        "num_passes": table.stats.num_passes,
        "busy_us": table.stats.busy_us,
        "num_drafted_tokens": table.stats.num_drafted_tokens,
    }
