"""One process's tracer: made from the configuration, closed in bounded time.

While tracing is off there is none, and OpenTelemetry is not even imported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.config import TracingConfig
from paceline.metrics.process import COUNTS, SPANS, SPANS_DROPPED
from paceline.tracing.spans import Span

if TYPE_CHECKING:
    from paceline.tracing.lanes import Lane

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 3.0


class ProcessTracer:
    """A `Tracer` over any number of lanes, one for each exporter."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self.unix_offset_us = (time.time_ns() - time.monotonic_ns()) // 1000
        self.num_emitted = 0

    def emit(self, span: Span) -> None:
        self.num_emitted += 1
        for lane in self._lanes:
            lane.put(span)

    @property
    def num_dropped(self) -> int:
        """Spans that did not get to where they should: no room in a queue, or a failed export."""
        return sum(lane.num_dropped for lane in self._lanes)

    def close(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Export what waits, for so long at most. Blocks meanwhile."""
        closing = [
            threading.Thread(target=lane.close, name="paceline-trace-close", daemon=True)
            for lane in self._lanes
        ]
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread, lane in zip(closing, self._lanes, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                lane.abandon()


def span_counts(tracer: ProcessTracer | None) -> dict[str, int]:
    """For a replica's statistics."""
    return {
        "num_spans": 0 if tracer is None else tracer.num_emitted,
        "num_dropped_spans": 0 if tracer is None else tracer.num_dropped,
    }


def open_tracer(
    config: TracingConfig, service_name: str, attributes: Mapping[str, str]
) -> ProcessTracer | None:
    """None while tracing is off. `attributes` are what is the same for all spans of the process.

    A folder that cannot be written costs the file, never the process.
    """
    if not config.is_on:
        return None
    from paceline.tracing.lanes import make_lanes

    tracer = ProcessTracer(make_lanes(config, service_name, attributes))
    COUNTS.watch(SPANS, lambda: tracer.num_emitted)
    COUNTS.watch(SPANS_DROPPED, lambda: tracer.num_dropped)
    return tracer
