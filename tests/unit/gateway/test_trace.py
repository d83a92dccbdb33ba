"""W3C Trace Context: what is read, what every answer says, and what targets and logs get."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import OverloadedError, RequestError
from paceline.gateway.trace import (
    MAX_TRACEPARENT_BYTES,
    Trace,
    begin_trace,
    parse_traceparent,
)
from paceline.generation import RoundDelta
from tests.log_lines import recorded

RoundOf = Callable[..., RoundDelta]
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"
HEADER = "x-paceline-trace-id"
TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"00-{TRACE}-{SPAN}-ff", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what the future brings", True),
        (f"01-{TRACE}-{SPAN}-01-", True),
    ],
)
def test_valid(value: str, is_sampled: bool) -> None:
    trace = parse_traceparent([value.encode()])
    assert trace == Trace(TRACE, SPAN, is_sampled)
    assert trace.traceparent == f"00-{TRACE}-{SPAN}-0{int(is_sampled)}"


LATER = f"cc-{TRACE}-{SPAN}-01-"


@pytest.mark.parametrize(
    "values",
    [
        [],
        [GOOD, GOOD],
        [""],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [GOOD.upper()],
        [f"00-{TRACE}-{SPAN}-01-more"],
        [f"00-{TRACE}-{SPAN}-01-"],
        [f"cc-{TRACE}-{SPAN}-01more"],
        [f"cc-{TRACE}-{SPAN}-01.more"],
        [f" {GOOD}"],
        [f"{GOOD}\n"],
        [GOOD[:-1]],
        [f"0-{TRACE}-{SPAN}-01"],
        [f"00-{TRACE[:-1]}-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN}g-01"],
        [f"00-{TRACE}-{SPAN}-0g"],
        [f"00_{TRACE}_{SPAN}_01"],
        [LATER + "x" * (MAX_TRACEPARENT_BYTES + 1 - len(LATER))],
    ],
)
def test_everything_else_is_no_header(values: list[str]) -> None:
    raw = [value.encode() for value in values]
    assert parse_traceparent(raw) is None
    digits = iter(["1" * 32, "2" * 32])
    assert begin_trace(raw, lambda: next(digits)) == Trace("1" * 32, "2" * 16, False)


def test_the_longest_header() -> None:
    value = LATER + "x" * (MAX_TRACEPARENT_BYTES - len(LATER))
    assert parse_traceparent([value.encode()]) == Trace(TRACE, SPAN, True)


async def test_it_reaches_the_target_and_the_answer(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("x", "length")]
    for stream in (False, True):
        answer = await harness.complete(stream=stream)
        assert answer.headers.get_list(HEADER) == [harness.targets.requests[-1].traceparent[3:35]]
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", made := made_of(harness))
        body = {"model": "toy", "prompt": "hi", "stream": stream}
        answer = await harness.post(TEXT, body, headers={"traceparent": GOOD})
        assert answer.headers.get_list(HEADER) == [TRACE]
        assert made_of(harness) == GOOD != made
    assert len({request.traceparent for request in harness.targets.requests}) == 3


def made_of(harness: Any) -> str:
    return str(harness.targets.requests[-1].traceparent)


async def test_every_answer_has_one(harness: Any) -> None:
    """Errors of every kind too, those of the framework included."""
    sent = {"traceparent": GOOD}
    async with harness.client() as client:
        for method, path, status in (
            ("GET", "/health", 200),
            ("HEAD", "/health", 200),
            ("GET", "/ready", 200),
            ("GET", "/nowhere", 404),
            ("GET", "/v1/models/other", 404),
            ("DELETE", "/v1/models", 405),
            ("POST", TEXT, 400),
            ("POST", "/tokenize", 400),
        ):
            answer = await client.request(method, path, headers=sent)
            assert (answer.status_code, answer.headers.get_list(HEADER)) == (status, [TRACE])
    for script in ([OverloadedError("full")], [ValueError("x")], [RequestError("x", status=503)]):
        harness.targets.script = script
        for stream in (False, True):
            body = {"model": "toy", "prompt": "hi", "stream": stream}
            answer = await harness.post(TEXT, body, headers=sent)
            assert answer.status_code >= 400
            assert answer.headers.get_list(HEADER) == [TRACE]


async def test_log_lines_have_it(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_retries=1)
    lost = RequestError("lost", None, "target_lost", 503, 1)
    harness.targets.first_scripts = [[lost], [lost], [ValueError("x")], [round_of("x")]]
    harness.targets.script = [asyncio.Event()]
    body, sent = {"model": "toy", "prompt": "hi"}, {"traceparent": GOOD, "x-request-id": "mine"}
    with recorded() as lines:
        for _ in range(3):
            await harness.post(TEXT, body, headers=sent)
        exchange = harness.begin(TEXT, body, headers=sent)
        (await harness.targets.begun.get())
        exchange.leave.set()
        await exchange.task
        assert await harness.is_idle()
    assert [line["level"] for line in lines.parsed() if line["level"] != "info"] == (
        ["warning", "error", "warning"]
    )
    assert {(line["trace_id"], line["request_id"]) for line in lines.parsed()} == {(TRACE, "mine")}
    assert [line for line in lines.text if TRACE not in line] == []
    assert {request.trace_id for request in harness.targets.requests} == {TRACE}
    assert {request.http_request_id for request in harness.targets.requests} == {"mine"}
