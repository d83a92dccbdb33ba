"""What a target tells the autoscaling policy."""

from __future__ import annotations

from paceline.target.driver import TargetDriver


def autoscaling_stats(driver: TargetDriver) -> dict[str, float]:
    """Names and figures of `record_autoscaling_stats`, since the last call or current."""
    return {}
