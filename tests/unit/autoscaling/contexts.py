"""What Serve's controller hands to the policy, as far as the policy looks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.serve._private.common import TimeStampedValue

from paceline.autoscaling.policy import DRAFTS

TARGET_METRICS = {
    **{"num_running": 4, "num_waiting": 0, "kv_share": 0.1, "max_rows_per_pass": 512},
    **{"num_passes": 0, "num_rows": 0, "busy_us": 0, "num_verified_tokens": 0},
    **{"num_wanting_draft": 4, "num_without_draft": 4, "wanted_tokens": 0, "missing_tokens": 0},
}
DRAFT_METRICS = {
    **{"num_sessions": 0, "max_sessions": 64, "num_passes": 0},
    **{"busy_us": 0, "num_drafted_tokens": 0},
}


@dataclass
class Ctx:
    """The fields of Serve's context that the policy uses."""

    deployment_name: str = DRAFTS
    target_num_replicas: int = 2
    current_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 0
    capacity_adjusted_max_replicas: int = 10
    current_time: float | None = 1000.0
    total_num_requests: float = 0.0
    raw_metrics: Any = None
    policy_state: dict[str, Any] = field(default_factory=dict)
    look_back_period_s: float = 5.0
    upscale_delay_s: float = 4.0
    target_ongoing_requests: float = 8.0

    @property
    def config(self) -> Ctx:
        return self

    @property
    def running_replicas(self) -> list[int]:
        return list(range(self.current_num_replicas))


def series(metrics: dict[str, Any], num_replicas: int = 1) -> dict[str, Any]:
    """Two points of each metric."""
    points = {k: [TimeStampedValue(t, v) for t in (998.0, 999.0)] for k, v in metrics.items()}
    return {name: dict.fromkeys(range(num_replicas), two) for name, two in points.items()}
