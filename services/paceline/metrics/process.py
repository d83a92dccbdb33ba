"""What parts of a process count that no snapshot function knows of: a tracer's spans.

One table per process, as there is one of each such part; who has a count says how to read it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.metrics.metric import Declare, Metric, Role
from paceline.metrics.snapshot import Snapshot

_ROLES = (Role.TARGET, Role.DRAFT, Role.GATEWAY)


def _of_each_role(name: str, what: str, unit: str) -> dict[Role, Metric]:
    return {role: Declare(role, "process: tracer").counter(name, what, unit) for role in _ROLES}


SPANS = _of_each_role("trace_spans", "Spans that were handed to exporters.", "spans")
SPANS_DROPPED = _of_each_role(
    "trace_spans_dropped",
    "Spans that were never exported: the queue was full, or the exporter failed.",
    "spans",
)


def process_metrics(role: Role) -> tuple[Metric, ...]:
    return tuple(of_role[role] for of_role in (SPANS, SPANS_DROPPED) if role in of_role)


class ProcessCounts:
    """By name. What nobody counts here is 0."""

    def __init__(self) -> None:
        self._read: dict[str, Callable[[], float]] = {}

    def watch(self, metrics: dict[Role, Metric], read: Callable[[], float]) -> None:
        """`read` gives the count since the start, of whatever role this process has."""
        for metric in metrics.values():
            self._read[metric.name] = read

    def fill(self, snapshot: Snapshot) -> None:
        """The rows of the snapshot's role."""
        for metric in process_metrics(snapshot.role):
            read = self._read.get(metric.name)
            snapshot.put(metric, 0.0 if read is None else read())


COUNTS = ProcessCounts()
