"""A bounded queue, a thread and an exporter, once for each place that spans go to.

All of it is OpenTelemetry's but what it leaves out: a count of the spans that were lost, and
silence while a collector is down (one line a minute).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from paceline.config import TracingConfig
from paceline.tracing.guard import OnceInAWhile
from paceline.tracing.json_lines import SCOPE, JsonLinesFile
from paceline.tracing.spans import Span

logger = logging.getLogger(__name__)

EXPORT_DELAY_MS = 500
MAX_BATCH_SPANS = 512
EXPORT_TIMEOUT_S = 5.0

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status()
# Each failed try is a line of theirs.
_CHATTY_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
)


class _Waiting(ReadableSpan):
    """What is in the queue: made in no time, and all that the processor asks is whether it is
    sampled."""

    _context = SpanContext(1, 1, False, _SAMPLED)

    def __init__(self, span: Span) -> None:  # not its parent's: that is what costs
        self.span = span


class Sink(Protocol):
    """Where spans end. Raises for those that it does not take, and may log why itself."""

    def write(self, spans: Sequence[Span]) -> None: ...

    def close(self) -> None: ...


class NotExported(Exception):
    """The collector did not take the spans; the exporter has logged why."""


class OtlpSink:
    """A collector, through an exporter of OpenTelemetry's."""

    def __init__(self, exporter: SpanExporter, resource: Resource) -> None:
        self._exporter = exporter
        self._resource = resource
        self._scope = InstrumentationScope(SCOPE)

    def write(self, spans: Sequence[Span]) -> None:
        result = self._exporter.export([self._readable(span) for span in spans])
        if result is not SpanExportResult.SUCCESS:
            raise NotExported("see the exporter's own line")

    def close(self) -> None:
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        trace_id = span.trace_id
        parent = None
        if span.parent_id:
            parent = SpanContext(trace_id, span.parent_id, False, _SAMPLED)
        links = [Link(SpanContext(*link, False, _SAMPLED)) for link in span.links]
        return ReadableSpan(
            span.name,
            SpanContext(trace_id, span.span_id, False, _SAMPLED),
            parent,
            self._resource,
            span.attributes,
            links=links,
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else _OK,
            start_time=span.begin_us * 1000,
            end_time=max(span.begin_us, span.end_us) * 1000,
            instrumentation_scope=self._scope,
        )


class _CountingExporter(SpanExporter):
    """`num_taken` spans have left the queue; `num_failed` of them were not exported."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self._limit = OnceInAWhile()
        self.num_taken = 0
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        try:
            self._sink.write([waiting.span for waiting in spans if isinstance(waiting, _Waiting)])
        except Exception as error:  # a full disk, a bug of an exporter: spans are all it may cost
            self.num_failed += len(spans)
            if self._limit.is_due():
                logger.warning(
                    "%d spans lost: %s does not take them: %r", self.num_failed, self._name, error
                )
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._sink.close()


class Lane:
    """`put` comes from one thread; the sink has one of its own."""

    def __init__(
        self, sink: Sink, name: str, max_queue_size: int, delay_ms: float = EXPORT_DELAY_MS
    ) -> None:
        self._exporter = _CountingExporter(sink, name)
        self._max_queue_size = max_queue_size
        self._num_put = 0
        self._num_refused = 0
        self._is_closed = False
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=max_queue_size,
            schedule_delay_millis=delay_ms,
            max_export_batch_size=min(MAX_BATCH_SPANS, max_queue_size),
        )

    @property
    def num_dropped(self) -> int:
        return self._num_refused + self._exporter.num_failed

    def put(self, span: Span) -> None:
        # The processor would drop the oldest, and write a line for each.
        is_full = self._num_put - self._exporter.num_taken >= self._max_queue_size
        if is_full or self._is_closed:
            self._num_refused += 1
            return
        self._num_put += 1
        self._processor.on_end(_Waiting(span))

    def close(self) -> None:
        """Export what waits; may take long where nobody answers."""
        self._is_closed = True
        self._processor.shutdown()  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """`close` takes too long: end it."""
        self._exporter.shutdown()


def make_lanes(
    config: TracingConfig, service_name: str, attributes: Mapping[str, str]
) -> list[Lane]:
    resource = {"service.name": service_name, **attributes}
    sinks: list[tuple[str, Sink]] = []
    if config.file_dir:
        folder = Path(config.file_dir).expanduser()
        try:
            file = JsonLinesFile(folder, service_name, resource, config.max_file_bytes)
            sinks.append((str(file.path), file))
        except OSError as error:
            logger.warning("no trace file in %s: %s", folder, error)
    if config.otlp_endpoint:
        sinks.append((config.otlp_endpoint, OtlpSink(_otlp(config), Resource(resource))))
    return [Lane(sink, name, config.max_queue_size) for name, sink in sinks]


def _otlp(config: TracingConfig) -> SpanExporter:
    for name in _CHATTY_LOGGERS:
        chatty = logging.getLogger(name)
        if not any(isinstance(each, OnceInAWhile) for each in chatty.filters):
            chatty.addFilter(OnceInAWhile())
    if config.otlp_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

        return grpc.OTLPSpanExporter(config.otlp_endpoint, timeout=EXPORT_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter(traces_url(config.otlp_endpoint), timeout=EXPORT_TIMEOUT_S)


def traces_url(endpoint: str) -> str:
    """Where OTLP over HTTP posts spans to, if the endpoint names only the collector."""
    path = urlsplit(endpoint).path
    return endpoint if path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
