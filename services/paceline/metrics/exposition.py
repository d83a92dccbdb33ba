"""The text that Prometheus reads (format 0.0.4), from snapshots of many processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from paceline.metrics.metric import BASE_LABELS, Metric
from paceline.metrics.snapshot import Labels, Snapshot, Value

INFINITY = "+Inf"


@dataclass(slots=True)
class Exposition:
    """Add snapshots, then `render`. Rows of a metric stand together, whoever counted them."""

    _rows: dict[str, list[tuple[Metric, Labels, Value]]] = field(default_factory=dict)

    def add(self, snapshot: Snapshot, base: Mapping[str, str]) -> None:
        """`base`: the values of the role's own labels."""
        own = tuple(base[name] for name in BASE_LABELS[snapshot.role])
        for metric, labels, value in snapshot:
            self._rows.setdefault(metric.name, []).append((metric, own + labels, value))

    def render(self) -> bytes:
        return "".join(self._lines()).encode()

    def _lines(self) -> Iterator[str]:
        for name, rows in self._rows.items():
            first = rows[0][0]
            yield f"# HELP {name} {_escape_help(first.help_text)}\n"
            yield f"# TYPE {name} {first.kind}\n"
            for metric, labels, value in rows:
                for sample, extra, number in samples_of(metric, value):
                    pairs = zip(metric.all_labels, labels, strict=True)
                    shown = ",".join(f'{k}="{_escape(v)}"' for k, v in (*pairs, *extra))
                    yield f"{sample}{{{shown}}} {_number(number)}\n"


def samples_of(
    metric: Metric, value: Value
) -> Iterator[tuple[str, tuple[tuple[str, str], ...], float]]:
    """(sample's name, labels beside the metric's, value): several for a histogram."""
    if not isinstance(value, tuple):
        yield metric.name, (), value
        return
    total, *counts = value
    cumulative = 0.0
    for bound, count in zip((*metric.buckets, None), counts, strict=True):
        cumulative += count
        le = INFINITY if bound is None else repr(float(bound))
        yield f"{metric.name}_bucket", (("le", le),), cumulative
    yield f"{metric.name}_sum", (), total
    yield f"{metric.name}_count", (), cumulative


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
