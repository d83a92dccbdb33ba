"""One metric as the catalog declares it. Knows no value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

PREFIX = "paceline_"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Role(StrEnum):
    """Who counts it."""

    TARGET = "target"
    DRAFT = "draft"
    CONTROLLER = "controller"
    GATEWAY = "gateway"


# Labels that who counts does not know or need not repeat: whoever shows the values adds them.
BASE_LABELS: dict[Role, tuple[str, ...]] = {
    Role.TARGET: ("model_name", "replica"),
    Role.DRAFT: ("model_name", "replica"),
    Role.CONTROLLER: ("model_name",),
    Role.GATEWAY: ("replica",),
}


# One object for each name and role: compared and hashed by identity, which is fast.
@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """`labels` are those beside the role's own; `values` lists what a label with a fixed set of
    values may be (None: replica ids, models, paths, ...), and such series start at zero instead of
    being absent. `buckets` are a histogram's upper bounds, ascending, without the last (infinity).
    `source`: where the numbers come from."""

    name: str
    kind: Kind
    role: Role
    help: str
    unit: str
    source: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    buckets: tuple[float, ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        return BASE_LABELS[self.role] + self.labels

    @property
    def help_text(self) -> str:
        """With the unit, where the name does not say it."""
        is_said = f"_{self.unit}" in self.name
        return self.help if is_said else f"{self.help} Unit: {self.unit}."

    @property
    def sample_names(self) -> tuple[str, ...]:
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Declare:
    """Metrics of one role. `source`: of those that name no other."""

    role: Role
    source: str

    def counter(
        self,
        name: str,
        what: str,
        unit: str,
        source: str = "",
        *,
        labels: tuple[str, ...] = (),
        values: tuple[str, ...] | None = None,
    ) -> Metric:
        return self._metric(f"{name}_total", Kind.COUNTER, what, unit, source, labels, values)

    def gauge(
        self,
        name: str,
        what: str,
        unit: str,
        source: str = "",
        *,
        labels: tuple[str, ...] = (),
        values: tuple[str, ...] | None = None,
    ) -> Metric:
        return self._metric(name, Kind.GAUGE, what, unit, source, labels, values)

    def histogram(
        self,
        name: str,
        what: str,
        unit: str,
        buckets: tuple[float, ...],
        source: str = "",
        *,
        labels: tuple[str, ...] = (),
    ) -> Metric:
        return self._metric(name, Kind.HISTOGRAM, what, unit, source, labels, None, buckets)

    def _metric(
        self, name: str, kind: Kind, what: str, unit: str, source: str, *rest: Any
    ) -> Metric:
        return Metric(f"{PREFIX}{name}", kind, self.role, what, unit, source or self.source, *rest)
