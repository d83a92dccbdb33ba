"""Log lines as text and as JSON: whose they are, and that nobody can forge one."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import logs
from paceline.logs import (
    MAX_MESSAGE_CHARS,
    ContextFilter,
    JsonFormatter,
    RequestIds,
    TextFormatter,
    escape,
)
from tests.log_lines import recorded

logger = logging.getLogger("paceline.test")
IDS = RequestIds("req-1", "0af7651916cd43dd8448eb211c80319c", "chatcmpl-1")
NASTY = "a\nb\r\x1b[31mc\x7f\x85\u2028\u202e\ud800\x00\te"


def record(message: str, *args: Any, extra: dict[str, Any] | None = None) -> logging.LogRecord:
    made = logger.makeRecord(
        logger.name, logging.INFO, __file__, 1, message, args, None, extra=extra
    )
    ContextFilter().filter(made)
    return made


def test_a_json_line_has_everything() -> None:
    made = record("hello %s", "you", extra=logs.extra(IDS, tokens=3, reasons=["stop"]))
    made.created = 1_700_000_000.25
    line = json.loads(JsonFormatter("TargetReplica", "t#1").format(made))
    assert line == {
        "ts": "2023-11-14T22:13:20.250000Z",
        "level": "info",
        "logger": "paceline.test",
        "message": "hello you",
        "request_id": "req-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "completion_id": "chatcmpl-1",
        "deployment": "TargetReplica",
        "replica": "t#1",
        "tokens": 3,
        "reasons": ["stop"],
    }


def test_a_line_about_no_request() -> None:
    line = json.loads(JsonFormatter("D", "d#1").format(record("x")))
    assert (line["request_id"], line["trace_id"], "completion_id" in line) == ("", "", False)
    text = TextFormatter("D", "d#1").format(record("x"))
    assert text.endswith(" INFO paceline.test: x replica=d#1")


def test_a_text_line() -> None:
    made = record("POST ok", extra=logs.extra(IDS, n=1, key="a b", none=None, ratio=0.5))
    text = TextFormatter("G", "g#1").format(made)
    assert text.split(": ", 1)[1] == (
        'POST ok n=1 key="a b" none=null ratio=0.5 request_id=req-1 '
        "trace_id=0af7651916cd43dd8448eb211c80319c completion_id=chatcmpl-1 replica=g#1"
    )


def test_fields_cannot_pass_for_what_every_line_has() -> None:
    extra = logs.extra(IDS, level="error", trace_id="another", message="forged")
    line = json.loads(JsonFormatter().format(record("x", extra=extra)))
    assert (line["level"], line["trace_id"], line["message"]) == ("info", IDS.trace_id, "x")


def test_serves_own_lines_keep_their_request_id() -> None:
    made = record("x", extra={"request_id": "of Serve"})
    assert json.loads(JsonFormatter().format(made))["request_id"] == "of Serve"
    known = record("x", extra=logs.extra(IDS) | {"request_id": "of Serve"})
    assert json.loads(JsonFormatter().format(known))["request_id"] == "req-1"


class TestNobodyForgesALine:
    @given(st.text(alphabet=st.characters(), max_size=40) | st.just(NASTY))
    def test_any_text_in_any_place(self, value: str) -> None:
        ids = RequestIds(value, value, value)
        made = record("x %s", value, extra=logs.extra(ids, model=value))
        made.name = "paceline.test"
        raw = JsonFormatter("G", value).format(made)
        text = TextFormatter("G", value).format(made)
        assert raw.isascii()
        assert raw.isprintable()
        assert json.loads(raw)["model"] == value
        assert text.splitlines() == [text]
        assert "\x1b" not in text
        text.encode()

    def test_what_is_escaped_can_be_read(self) -> None:
        shown = "a\\nb\\r\\x1b[31mc\\x7f\\x85\\u2028\\u202e\\ud800\\x00\\te"
        assert escape(NASTY) == shown
        assert escape("Grüße, 世界 \\n") == "Grüße, 世界 \\n"

    def test_long_messages_are_cut(self) -> None:
        assert escape("x" * MAX_MESSAGE_CHARS) == "x" * MAX_MESSAGE_CHARS
        long = escape("x" * (MAX_MESSAGE_CHARS + 1))
        assert long.endswith(f"x... ({MAX_MESSAGE_CHARS + 1} characters)")

    def test_a_value_cannot_pass_for_another_field(self) -> None:
        made = record("x", extra=logs.extra(IDS, model='toy status=200 key="root"'))
        text = TextFormatter().format(made)
        assert ' model="toy status=200 key=\\"root\\"" ' in text

    def test_a_traceback_is_one_record(self) -> None:
        try:
            raise ValueError("a\n2026-01-01T00:00:00Z INFO forged\x1b[31m")
        except ValueError:
            made = record("x")
            made.exc_info = sys.exc_info()
        first, *rest = TextFormatter().format(made).split("\n")
        assert first.endswith(": x")
        assert len(rest) >= 4
        assert all(line.startswith("    ") for line in rest)
        assert "\x1b" not in "".join(rest)
        line = json.loads(JsonFormatter().format(made))
        assert line["exception"].splitlines()[0] == "Traceback (most recent call last):"


async def test_ids_go_where_the_work_goes() -> None:
    """Into tasks and threads that the request starts, and nowhere else."""

    async def work() -> None:
        logger.info("task")
        await asyncio.to_thread(logger.info, "thread")

    with recorded() as lines:
        with logs.about(IDS):
            logger.info("inside")
            await asyncio.create_task(work())
            with logs.about(RequestIds("other")):
                logger.info("inner")
        logger.info("outside")
    found = {line["message"]: line["request_id"] for line in lines.parsed()}
    assert found == {
        **dict.fromkeys(("inside", "task", "thread"), "req-1"),
        **{"inner": "other", "outside": ""},
    }


async def test_requests_side_by_side_keep_their_own() -> None:
    async def work(name: str) -> None:
        with logs.about(RequestIds(name)):
            for _ in range(3):
                await asyncio.sleep(0)
                logger.info("of %s", name)

    with recorded() as lines:
        await asyncio.gather(*(work(f"r{number}") for number in range(5)))
    assert len(lines.raw) == 15
    assert all(line["message"] == f"of {line['request_id']}" for line in lines.parsed())


def test_ids_are_those_of_the_moment_of_logging() -> None:
    """Handlers may format later, when the context is another one."""
    with logs.about(IDS):
        made = record("x")
    assert json.loads(JsonFormatter().format(made))["request_id"] == "req-1"


def test_nothing_is_formatted_for_a_level_that_is_off() -> None:
    class Untouchable:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    with recorded(logging.WARNING) as lines:
        logger.info("%s", Untouchable())
    assert lines.raw == []
    with recorded(logging.INFO), pytest.raises(AssertionError, match="formatted"):
        logger.info("%s", Untouchable())
