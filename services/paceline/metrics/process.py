"""What parts of a process count that no snapshot function knows of: spans dropped, for one.

One table per process, as there is one of each such part. Only bumped: safe to call anywhere in the
event loop's thread, and cheap.
"""

from __future__ import annotations

from paceline.metrics.metric import Declare, Metric, Role
from paceline.metrics.snapshot import Snapshot

SPANS_DROPPED_NAME = "trace_spans_dropped"
_WHAT = "Spans that were never exported: the queue was full, or the exporter failed."

SPANS_DROPPED: dict[Role, Metric] = {
    role: Declare(role, "process: exporter").counter(SPANS_DROPPED_NAME, _WHAT, "spans")
    for role in (Role.TARGET, Role.DRAFT, Role.GATEWAY)
}


class ProcessCounters:
    """By name, without labels. What was never bumped is 0."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, metric: Metric, number: float = 1.0) -> None:
        self._values[metric.name] = self._values.get(metric.name, 0.0) + number

    def fill(self, snapshot: Snapshot) -> None:
        """The rows of the snapshot's role."""
        for metric in process_metrics(snapshot.role):
            snapshot.put(metric, self._values.get(metric.name, 0.0))


def process_metrics(role: Role) -> tuple[Metric, ...]:
    return (SPANS_DROPPED[role],) if role in SPANS_DROPPED else ()


COUNTERS = ProcessCounters()
