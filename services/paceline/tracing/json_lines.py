"""Spans as lines of OTLP/JSON in a file of bounded size: one ExportTraceServiceRequest a line.

It knows no OpenTelemetry library, only its format: ids are hexadecimal, times and integers are
decimal strings.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.tracing.spans import Attribute, Span

SCOPE = "paceline"
# Files of one service in a folder: those of processes that are long gone make room.
MAX_FILES = 64
# Spans written in one go: then other threads get their turn.
_SPANS_PER_TURN = 16
_INTERNAL, _SERVER, _ERROR = 1, 2, 2


class JsonLinesFile:
    """Appends to `<folder>/<service_name>-<pid>.jsonl`; at `max_bytes` that becomes
    `<service_name>-<pid>.1.jsonl`, in place of an older one. Raises OSError where it cannot."""

    def __init__(
        self, folder: Path, service_name: str, resource: Mapping[str, Attribute], max_bytes: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove_oldest(folder, service_name)
        self.path = folder / f"{service_name}-{os.getpid()}.jsonl"
        self._old_path = folder / f"{service_name}-{os.getpid()}.1.jsonl"
        self._head = (
            f'{{"resourceSpans":[{{"resource":{{"attributes":{_attributes(resource)}}},'
            f'"scopeSpans":[{{"scope":{{"name":"{SCOPE}"}},"spans":['
        )
        self._max_bytes = max_bytes
        self._file = self.path.open("ab")

    def write(self, spans: Sequence[Span]) -> None:
        parts = []
        for first in range(0, len(spans), _SPANS_PER_TURN):
            parts += [span_json(span) for span in spans[first : first + _SPANS_PER_TURN]]
            time.sleep(0)
        line = f"{self._head}{','.join(parts)}]}}]}}]}}\n".encode()
        if self._file.tell() + len(line) > self._max_bytes and self._file.tell():
            self._file.close()
            self.path.replace(self._old_path)
            self._file = self.path.open("ab")
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def span_json(span: Span) -> str:
    """Put together by hand: it is half the cost of a trace."""
    begin_us, end_us = span.begin_us, max(span.begin_us, span.end_us)
    more = ""
    if span.parent_id:
        more = f',"parentSpanId":"{span.parent_id:016x}"'
    if span.attributes:
        more += f',"attributes":{_attributes(span.attributes)}'
    if span.links:
        links = (f'{{"traceId":"{trace:032x}","spanId":"{one:016x}"}}' for trace, one in span.links)
        more += f',"links":[{",".join(links)}]'
    if span.error:
        more += f',"status":{{"code":{_ERROR},"message":{json.dumps(span.error)}}}'
    return (
        f'{{"traceId":"{span.trace_id:032x}","spanId":"{span.span_id:016x}",'
        f'"name":{json.dumps(span.name)},"kind":{_SERVER if span.is_server else _INTERNAL},'
        f'"startTimeUnixNano":"{begin_us}000","endTimeUnixNano":"{end_us}000"{more}}}'
    )


def _attributes(attributes: Mapping[str, Attribute]) -> str:
    pairs = (f'{{"key":"{key}","value":{_value(one)}}}' for key, one in attributes.items())
    return f"[{','.join(pairs)}]"


def _value(value: Attribute) -> str:
    match value:
        case bool():
            return f'{{"boolValue":{"true" if value else "false"}}}'
        case int():
            return f'{{"intValue":"{value}"}}'
        case float():
            return f'{{"doubleValue":{value!r}}}'
        case str():
            return f'{{"stringValue":{json.dumps(value)}}}'
        case _:
            return f'{{"arrayValue":{{"values":[{_joined(value)}]}}}}'


def _joined(values: Iterable[str]) -> str:
    return ",".join(_value(value) for value in values)


def remove_oldest(folder: Path, service_name: str, host: str = "") -> None:
    """Others may do the same meanwhile. Files of processes that live, so far as this host can
    tell, stay, as do our own. With a `host`, files are `<service_name>-<host>-<pid>`."""
    dated: list[tuple[float, Path, bool]] = []
    for file in folder.glob(f"{service_name}-*.jsonl"):
        name = file.name.removeprefix(f"{service_name}-").partition(".")[0]
        where, _, pid = name.rpartition("-")
        # Else it is of a service whose name begins like this one's.
        if pid.isdecimal() and (host or not where):
            is_alive = where in ("", host) and _is_alive(int(pid))
            with suppress(FileNotFoundError):
                dated.append((file.stat().st_mtime, file, is_alive))
    num_over = len(dated) + 1 - MAX_FILES
    for _, file, is_alive in sorted(dated):
        if num_over <= 0:
            break
        if not is_alive:
            file.unlink(missing_ok=True)
            num_over -= 1


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True  # another user's
    except (OverflowError, ProcessLookupError):
        return False
    return True
