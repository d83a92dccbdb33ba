"""A finished span as a value, and where such spans go. Knows no exporter and no OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

Attribute = str | bool | int | float | tuple[str, ...]
# OTLP's integers are signed.
MAX_INT_ATTRIBUTE = 2**63 - 1


def int_attribute(number: int) -> int | str:
    """As text where it is too large for an attribute's integer."""
    return number if number <= MAX_INT_ATTRIBUTE else str(number)


# Up to a dozen of them for every round: not frozen only because that makes them slower to build.
@dataclass(slots=True)
class Span:
    """Times are unix time in microseconds. `parent_id` 0: a root. `links` are pairs of a trace's
    and a span's id. `error`: a sentence, empty for success."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    begin_us: int
    end_us: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    links: tuple[tuple[int, int], ...] = ()
    is_server: bool = False
    error: str = ""


class Tracer(Protocol):
    """Where one process's spans go. All calls come from one thread."""

    @property
    def unix_offset_us(self) -> int:
        """Unix time minus the process's monotonic clock, always the same."""

    def emit(self, span: Span) -> None:
        """Never waits and never raises: what does not fit is dropped."""
