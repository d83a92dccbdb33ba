"""The values of one process's metrics at one time, and their plain form on the way to others.

Values are cumulative, so a lost report loses nothing. The plain form is a dict of lists of plain
values: what another release does not know, or has with other labels or buckets, is left out there
and the rest is taken. It does not know who counts or who shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.metrics.buckets import Buckets
from paceline.metrics.metric import Kind, Metric, Role

Labels = tuple[str, ...]
# A number, or a histogram's sum and counts (`Buckets.value`).
Value = float | tuple[float, ...]
Plain = dict[str, list[list[Any]]]

# Series of one metric of one replica; an honest one stays below, the rest is cut.
MAX_SERIES = 1024
MAX_LABEL_CHARS = 256
MAX_VALUE = 1e18


class Snapshot:
    """What one process of `role` counts. Every metric must be one of that role's."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._values: dict[Metric, dict[Labels, Value]] = {}

    def put(self, metric: Metric, value: float | Buckets, *labels: str) -> None:
        """`labels` as the metric declares them, without those of its role."""
        if metric.role is not self.role or len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} of a {self.role} has no labels {labels}")
        rows = self._values.setdefault(metric, {})
        rows[labels] = value.value if isinstance(value, Buckets) else float(value)

    def put_histogram(
        self, metric: Metric, total: float, counts: Sequence[float], *labels: str
    ) -> None:
        self.put(metric, Buckets(metric.buckets, list(counts), total), *labels)

    def put_each(self, metric: Metric, values: Mapping[str, float], *labels: str) -> None:
        """One series for each value that the last label may have; those without one are 0."""
        for name in metric.values or values:
            self.put(metric, values.get(name, 0.0), *labels, name)

    def put_state(self, metric: Metric, state: str, *labels: str) -> None:
        """1 for the state that it is in, 0 for the others."""
        self.put_each(metric, {state: 1.0}, *labels)

    def __iter__(self) -> Iterator[tuple[Metric, Labels, Value]]:
        for metric, rows in self._values.items():
            for labels, value in rows.items():
                yield metric, labels, value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Snapshot):
            return NotImplemented
        return (self.role, self._values) == (other.role, other._values)

    def __contains__(self, metric: Metric) -> bool:
        return metric in self._values

    def get(self, metric: Metric, *labels: str) -> Value | None:
        return self._values.get(metric, {}).get(labels)

    def plain(self) -> Plain:
        return {
            metric.name: [
                [list(labels), list(value) if isinstance(value, tuple) else value]
                for labels, value in rows.items()
            ]
            for metric, rows in self._values.items()
        }


def read_snapshot(data: object, role: Role, known: Mapping[str, Metric]) -> Snapshot:
    """From another process; never raises. What does not fit `known` is left out."""
    snapshot = Snapshot(role)
    for name, rows in data.items() if isinstance(data, Mapping) else ():
        metric = known.get(name) if isinstance(name, str) else None
        if metric is None or not isinstance(rows, list | tuple):
            continue
        if read := _read_rows(metric, rows[:MAX_SERIES]):
            snapshot._values[metric] = read
    return snapshot


def _read_rows(metric: Metric, rows: Sequence[object]) -> dict[Labels, Value]:
    num_labels = len(metric.labels)
    num_values = len(metric.buckets) + 2 if metric.kind is Kind.HISTOGRAM else None
    found: dict[Labels, Value] = {}
    for row in rows:
        if not isinstance(row, _LISTS) or len(row) != 2:
            continue
        labels, value = row
        if not isinstance(labels, _LISTS) or len(labels) != num_labels:
            continue
        if labels and not all(map(_is_label, labels)):
            continue
        if num_values is None:
            if _is_value(value):
                found[tuple(labels)] = float(value)
        elif isinstance(value, _LISTS) and len(value) == num_values and all(map(_is_value, value)):
            found[tuple(labels)] = tuple(map(float, value))
    return found


_LISTS = (list, tuple)


def _is_label(label: object) -> bool:
    return isinstance(label, str) and len(label) <= MAX_LABEL_CHARS


def _is_value(value: object) -> bool:
    """A number from 0 to the limit: neither NaN nor infinity is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= MAX_VALUE
