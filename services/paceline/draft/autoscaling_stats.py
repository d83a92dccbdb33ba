"""What a draft tells the autoscaling policy."""

from __future__ import annotations

from paceline.draft.driver import DraftDriver


def autoscaling_stats(driver: DraftDriver) -> dict[str, float]:
    """Names and figures of `record_autoscaling_stats`, since the last call or current."""
    return {}
