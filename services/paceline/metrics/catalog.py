"""Every metric that we export under our own prefix: the one list that /metrics, Ray's endpoint,
dashboards, alerts and their tests go by.

A name may be counted by several roles (`process`): then each has a row of its own here.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.metrics.audit_catalog import AUDIT_METRICS
from paceline.metrics.draft_catalog import DRAFT_METRICS
from paceline.metrics.fleet_catalog import FLEET_METRICS
from paceline.metrics.gateway_catalog import GATEWAY_METRICS
from paceline.metrics.metric import Metric, Role
from paceline.metrics.process import process_metrics
from paceline.metrics.target_catalog import TARGET_METRICS

OF_ROLE: Mapping[Role, Mapping[str, Metric]] = {
    role: {metric.name: metric for metric in (*metrics, *process_metrics(role))}
    for role, metrics in (
        (Role.TARGET, TARGET_METRICS),
        (Role.DRAFT, DRAFT_METRICS),
        (Role.CONTROLLER, FLEET_METRICS),
        (Role.GATEWAY, (*GATEWAY_METRICS, *AUDIT_METRICS)),
    )
}
METRICS: tuple[Metric, ...] = tuple(
    metric for metrics in OF_ROLE.values() for metric in metrics.values()
)
