"""What Serve's controller knows of a deployment, and what its replicas have said.

Replicas report plain gauges and counts since their start (`record_autoscaling_stats`). Means and
rates over `look_back_period_s` are made here, from the times that Serve gives to each point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Load = TypeVar("Load")
Point = tuple[float, float]  # time in seconds, value


class Context(Protocol):
    """What this module uses of Serve's `AutoscalingContext`. `raw_metrics` has for each name and
    replica the points of the look-back period, each with `timestamp` and `value`."""

    deployment_name: str
    current_num_replicas: int
    target_num_replicas: int
    running_replicas: Sequence[Any]
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    policy_state: Mapping[str, Any]
    current_time: float | None
    config: Any

    @property
    def total_num_requests(self) -> float: ...

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[Any]]] | None: ...


@dataclass(frozen=True)
class TargetLoad:
    """One target. `row_share`: rows computed, of those that its passes could have held, idle time
    included. `num_unserved` of the `num_wanting` sequences that want a draft have none. Rates are
    tokens/s: expected accepted tokens (`wanted`), those of them that had not arrived (`missing`),
    and proposals verified. `pass_ms`: what a pass takes; `window`: K, or, where a target does not
    say it, the accepted tokens expected of a full window, which are fewer (both 0: unknown)."""

    num_running: float
    num_waiting: float
    kv_share: float
    row_share: float
    num_wanting: float
    num_unserved: float
    wanted_rate: float
    missing_rate: float
    verified_rate: float
    pass_ms: float = 0.0
    window: float = 0.0


@dataclass(frozen=True)
class DraftLoad:
    """One draft: share of the time in which it computed, proposals made per second; `step_ms`: what
    one for each of its sequences takes (0: unknown)."""

    num_sessions: float
    max_sessions: float
    busy_share: float
    drafted_rate: float
    step_ms: float = 0.0


class Unknown(Exception):
    """A replica that has not said enough yet."""


def is_number(value: object) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Reports:
    """The metrics of one replica by name."""

    metrics: Mapping[str, Mapping[Any, Sequence[Any]]]
    replica: Any

    def _points(self, name: str) -> list[Point]:
        points = self.metrics.get(name, {}).get(self.replica, ())
        return [(p.timestamp, p.value) for p in points if is_number(p.value)]

    def mean(self, name: str) -> float:
        """Of a gauge, over the look-back period. Raises `Unknown` without a point."""
        points = self._points(name)
        if not points:
            raise Unknown(name)
        return max(0.0, sum(value for _, value in points) / len(points))

    def rate(self, name: str) -> float:
        """Of a count, per second. Raises `Unknown` without two points in time."""
        points = self._points(name)
        if not points or points[-1][0] <= points[0][0]:
            raise Unknown(name)
        (since, first), (until, last) = points[0], points[-1]
        return max(0.0, (last - first) / (until - since))

    def has(self, name: str) -> bool:
        """False for a replica of a release that does not say it."""
        return bool(self._points(name))


def target_load(reports: Reports) -> TargetLoad:
    rows_per_s = reports.rate("num_rows")
    passes_per_s, busy = reports.rate("num_passes"), min(1.0, reports.rate("busy_us") / 1e6)
    max_rows = passes_per_s * reports.mean("max_rows_per_pass")
    num_wanting, wanted_rate = reports.mean("num_wanting_draft"), reports.rate("wanted_tokens")
    windows_per_s = passes_per_s * num_wanting
    window = wanted_rate / windows_per_s if windows_per_s else 0.0
    if reports.has("num_speculative_tokens"):
        window = reports.mean("num_speculative_tokens")
    return TargetLoad(
        num_running=reports.mean("num_running"),
        num_waiting=reports.mean("num_waiting"),
        kv_share=min(1.0, reports.mean("kv_share")),
        row_share=min(1.0, busy * rows_per_s / max_rows) if max_rows else 0.0,
        num_wanting=num_wanting,
        num_unserved=reports.mean("num_without_draft"),
        wanted_rate=wanted_rate,
        missing_rate=reports.rate("missing_tokens"),
        verified_rate=reports.rate("num_verified_tokens"),
        pass_ms=1e3 * busy / passes_per_s if passes_per_s else 0.0,
        window=window,
    )


def draft_load(reports: Reports) -> DraftLoad:
    busy = min(1.0, reports.rate("busy_us") / 1e6)
    steps_per_s = reports.rate("num_passes") if reports.has("num_passes") else 0.0
    return DraftLoad(
        num_sessions=reports.mean("num_sessions"),
        max_sessions=reports.mean("max_sessions"),
        busy_share=busy,
        drafted_rate=reports.rate("num_drafted_tokens"),
        step_ms=1e3 * busy / steps_per_s if steps_per_s else 0.0,
    )


def loads(context: Context, read: Callable[[Reports], Load]) -> list[Load]:
    """Of the replicas that have said enough."""
    found = []
    for replica in context.running_replicas:
        try:
            found.append(read(Reports(context.raw_metrics or {}, replica)))
        except Unknown:
            continue  # it has just started: the decision takes its silence into account
    return found
