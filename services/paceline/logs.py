"""Log lines: the ids of the request that one is about, as text or as JSON, one record a line.

A record gets its ids from the context that it is logged in (`about`), or explicitly from who logs
it (`extra`). Whatever a client chose is escaped here, in every part of a line, and costs nothing
where the level is off. Knows no handler, no Ray and no configuration.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

# Beyond it a message is cut: the values in it are bounded where they come in, so this is a net.
MAX_MESSAGE_CHARS = 4096
# As attributes of a record.
IDS, FIELDS = "paceline_ids", "paceline_fields"
# What ends a line or moves the cursor somewhere, a terminal's commands, and what makes text
# look different from what it is: C0, DEL, C1, line separators, direction marks.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# A value that needs no quotes to be told from the next one.
_BARE = re.compile(r"[A-Za-z0-9_.:/,~+*@#-]+")
_NEXT_LINE = "\n    "


@dataclass(frozen=True, slots=True)
class RequestIds:
    """`request_id`: the HTTP request's (x-request-id). `completion_id`: its answer's (`id` in the
    body). Empty: not known, or about no request."""

    request_id: str = ""
    trace_id: str = ""
    completion_id: str = ""


_NONE = RequestIds()
_current: ContextVar[RequestIds] = ContextVar("paceline_request_ids", default=_NONE)


@contextmanager
def about(ids: RequestIds) -> Iterator[None]:
    """Lines logged in the block, and in tasks that it starts, are about this request."""
    token = _current.set(ids)
    try:
        yield
    finally:
        _current.reset(token)


def extra(ids: RequestIds | None = None, **fields: Any) -> dict[str, Any]:
    """What a logging call takes as `extra`: ids (None: the context's) and named values."""
    return {IDS: ids, FIELDS: fields}


def without_message(error: Exception) -> Exception:
    """The same traceback; an exception's message may quote the client's text."""
    shown = RuntimeError(f"{type(error).__name__}, message withheld")
    return shown.with_traceback(error.__traceback__)


class ContextFilter(logging.Filter):
    """Drops nothing. Notes the ids where the line is logged: it may be formatted elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, IDS, None) is None:
            setattr(record, IDS, _current.get())
        return True


def escape(text: str) -> str:
    """On one line, and harmless on a terminal; cut where it is longer than any line of ours."""
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}... ({len(text)} characters)"
    return _UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    short = {9: "\\t", 10: "\\n", 13: "\\r"}
    return short.get(code) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


class _Formatter(logging.Formatter):
    """`deployment` and `replica`: where this process's lines come from."""

    def __init__(self, deployment: str = "", replica: str = "") -> None:
        super().__init__()
        self._deployment = deployment
        self._replica = replica

    def _time(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        return at.isoformat(timespec="microseconds").replace("+00:00", "Z")

    def _ids(self, record: logging.LogRecord) -> RequestIds:
        ids: RequestIds = getattr(record, IDS, None) or _NONE
        # Serve notes the request's id in lines of its own.
        served = getattr(record, "request_id", "")
        if ids.request_id or not isinstance(served, str):
            return ids
        return replace(ids, request_id=served)

    def _trouble(self, record: logging.LogRecord) -> str:
        parts = [self.formatException(record.exc_info)] if record.exc_info else []
        parts += [self.formatStack(record.stack_info)] if record.stack_info else []
        lines = "\n".join(parts).split("\n")
        return "\n".join(_UNSAFE.sub(_escaped, line) for line in lines)


class JsonFormatter(_Formatter):
    """`ts`, `level`, `logger`, `message`, `request_id`, `trace_id` and `replica` on every line,
    the ids empty where it is about no request; then what the line has of its own."""

    def format(self, record: logging.LogRecord) -> str:
        ids = self._ids(record)
        line: dict[str, Any] = {
            "ts": self._time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape(record.getMessage()),
            "request_id": ids.request_id,
            "trace_id": ids.trace_id,
            "deployment": self._deployment,
            "replica": self._replica,
        }
        if ids.completion_id:
            line["completion_id"] = ids.completion_id
        for name, value in getattr(record, FIELDS, {}).items():
            line.setdefault(name, value)
        if trouble := self._trouble(record):
            line["exception"] = trouble
        # ASCII: nothing in it ends a line or moves a terminal's cursor, but for DEL.
        return json.dumps(line, allow_nan=False, default=str).replace("\x7f", "\\u007f")


class TextFormatter(_Formatter):
    """`time LEVEL logger: message key=value ...`. What takes several lines, a traceback, is
    indented: no part of it can pass for another record."""

    def format(self, record: logging.LogRecord) -> str:
        ids = self._ids(record)
        shown = dict(getattr(record, FIELDS, {})) | {
            "request_id": ids.request_id,
            "trace_id": ids.trace_id,
            "completion_id": ids.completion_id,
            "replica": self._replica,
        }
        pairs = [f"{name}={_value(value)}" for name, value in shown.items() if value != ""]
        message = escape(record.getMessage())
        head = f"{self._time(record)} {record.levelname} {record.name}: {message}"
        text = " ".join((head, *pairs))
        if trouble := self._trouble(record):
            text += _NEXT_LINE + trouble.replace("\n", _NEXT_LINE)
        return text


def _value(value: object) -> str:
    if isinstance(value, str) and _BARE.fullmatch(value):
        return value
    if type(value) in (int, float):
        return repr(value)
    return escape(json.dumps(value, ensure_ascii=False, default=str))
