"""Spans as lines of OTLP/JSON in a file of bounded size: one ExportTraceServiceRequest a line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

SCOPE = "paceline"
# Files of one service in a folder: those of processes that are long gone make room.
MAX_FILES = 64
_KINDS = {SpanKind.INTERNAL: 1, SpanKind.SERVER: 2}
_ERROR = 2

Json = dict[str, Any]


class JsonLinesExporter(SpanExporter):
    """Appends to `<folder>/<service_name>-<pid>.jsonl`; at `max_bytes` that becomes
    `<service_name>-<pid>.1.jsonl`, in place of an older one. Raises OSError where it cannot."""

    def __init__(
        self, folder: Path, service_name: str, resource: Mapping[str, Any], max_bytes: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_oldest(folder, service_name)
        self.path = folder / f"{service_name}-{os.getpid()}.jsonl"
        self._old_path = folder / f"{service_name}-{os.getpid()}.1.jsonl"
        self._resource = {"attributes": attributes_json(resource)}
        self._max_bytes = max_bytes
        self._file = self.path.open("ab")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        scope = {"scope": {"name": SCOPE}, "spans": [span_json(span) for span in spans]}
        request = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        line = json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        if self._file.tell() + len(line) > self._max_bytes and self._file.tell():
            self._file.close()
            self.path.replace(self._old_path)
            self._file = self.path.open("ab")
        self._file.write(line)
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def span_json(span: ReadableSpan) -> Json:
    context, parent = span.context, span.parent
    assert context is not None
    found: Json = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": attributes_json(span.attributes or {}),
    }
    if parent is not None:
        found["parentSpanId"] = f"{parent.span_id:016x}"
    if span.links:
        found["links"] = [
            {
                "traceId": f"{link.context.trace_id:032x}",
                "spanId": f"{link.context.span_id:016x}",
            }
            for link in span.links
        ]
    if not span.status.is_ok:
        found["status"] = {"code": _ERROR, "message": span.status.description or ""}
    return found


def attributes_json(attributes: Mapping[str, Any]) -> list[Json]:
    return [{"key": key, "value": value_json(value)} for key, value in attributes.items()]


def value_json(value: Any) -> Json:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [value_json(each) for each in value]}}


def _remove_oldest(folder: Path, service_name: str) -> None:
    files = sorted(folder.glob(f"{service_name}-*.jsonl"), key=lambda file: file.stat().st_mtime)
    for file in files[: max(0, len(files) + 1 - MAX_FILES)]:
        file.unlink(missing_ok=True)
