"""OTLP/JSON as spans: one line of a trace file is one `ExportTraceServiceRequest`.

Pure. Trusts nothing: whoever wrote the file may have been stopped in the middle of a line. Knows
neither files nor what a span of ours means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cli.values import dicts, listed, mapping

Value = str | int | float | bool

MAX_COUNT = 2**63 - 1
MAX_TIME_NS = 2**64 - 1  # OTLP's type of a time
_TRACE_ID, _SPAN_ID = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")
_WHOLE = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_SERVER_KINDS = (2, "SPAN_KIND_SERVER")
_ERROR_CODES = (2, "STATUS_CODE_ERROR")


@dataclass(frozen=True, slots=True)
class Span:
    """One span; ids in lower case, `parent_id` empty without one.

    Invariant: began_ns <= ended_ns; both are nanoseconds of unix time.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    began_ns: int
    ended_ns: int
    attributes: Mapping[str, Value]
    is_server: bool = False
    is_error: bool = False

    def count(self, name: str) -> int:
        """A whole number >= 0, 0 for what is none; none of ours needs more than 63 bits."""
        value = self.attributes.get(name)
        return min(max(0, value), MAX_COUNT) if isinstance(value, int) else 0

    def text(self, name: str) -> str:
        value = self.attributes.get(name, "")
        return value if isinstance(value, str) else str(value)


def spans_of(line: bytes) -> tuple[list[Span], int]:
    """The spans of one line, and how many made no sense. ValueError: it is no OTLP/JSON at all."""
    try:
        data = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict) or not isinstance(data.get("resourceSpans"), list):
        raise ValueError("no resourceSpans")
    spans, num_bad = [], 0
    for resource in dicts(data["resourceSpans"]):
        service = str(_attributes(mapping(resource.get("resource"))).get("service.name", ""))
        for scope in dicts(resource.get("scopeSpans")):
            for item in listed(scope.get("spans")):
                span = _span(item, service) if isinstance(item, dict) else None
                num_bad += span is None
                spans += [span] if span else []
    return spans, num_bad


def _span(item: dict[str, Any], service: str) -> Span | None:
    trace_id, span_id = _hex(item, "traceId", _TRACE_ID), _hex(item, "spanId", _SPAN_ID)
    began_ns, ended_ns = _time(item, "startTimeUnixNano"), _time(item, "endTimeUnixNano")
    if not trace_id or not span_id or began_ns is None or ended_ns is None or ended_ns < began_ns:
        return None
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=_hex(item, "parentSpanId", _SPAN_ID),
        name=str(item.get("name") or ""),
        service=service,
        began_ns=began_ns,
        ended_ns=ended_ns,
        attributes=_attributes(item),
        is_server=item.get("kind") in _SERVER_KINDS,
        is_error=mapping(item.get("status")).get("code") in _ERROR_CODES,
    )


def _hex(item: dict[str, Any], name: str, form: re.Pattern[str]) -> str:
    """Empty for what is no id; OTLP allows either case."""
    value = item.get(name)
    found = value.lower() if isinstance(value, str) else ""
    return found if form.fullmatch(found) else ""


def _time(item: dict[str, Any], name: str) -> int | None:
    value = _whole(item.get(name))
    return value if value is not None and 0 <= value <= MAX_TIME_NS else None


def _whole(value: Any) -> int | None:
    """Protobuf writes 64-bit numbers as text; a number is understood, too."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _attributes(holder: dict[str, Any]) -> dict[str, Value]:
    return dict(_pairs(holder))


def _pairs(holder: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    for item in dicts(holder.get("attributes")):
        key, value = item.get("key"), _value(mapping(item.get("value")))
        if isinstance(key, str) and value is not None:
            yield key, value


def _value(value: dict[str, Any]) -> Value | None:
    """Of the kinds that our spans use; a list's texts are joined."""
    match value:
        case {"stringValue": str(text)}:
            return text
        case {"boolValue": bool(flag)}:
            return flag
        case {"intValue": number}:
            return _whole(number)
        case {"doubleValue": int() | float() as number} if not isinstance(number, bool):
            return float(number) if abs(number) < 1e300 else None
        case {"arrayValue": {"values": list(values)}}:
            texts = (mapping(item).get("stringValue") for item in values)
            return ", ".join(text for text in texts if isinstance(text, str))
    return None
