"""One line per request at info, however it ends, and what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline.config import ApiKeyConfig
from paceline.errors import OverloadedError, RequestError
from paceline.gateway.request_log import RequestLog
from paceline.generation import RoundDelta, TokenOrigin
from paceline.logs import RequestIds
from tests.log_lines import Lines, recorded

RoundOf = Callable[..., RoundDelta]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}
LOST = RequestError("lost", None, "target_lost", 503, 1)
ALICE = "0" * 64


@pytest.fixture
def lines() -> Iterator[Lines]:
    with recorded(logging.INFO) as recording:
        yield recording


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_line_says(
    stream: bool, make_harness: Any, round_of: RoundOf, lines: Lines
) -> None:
    harness = make_harness(max_retries=1)
    kept = round_of(
        "abc",
        origins=(TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED),
        num_draft_tokens=4,
        num_accepted_tokens=2,
        num_speculative_tokens=4,
        source="suffix",
    )
    harness.targets.first_scripts = [[kept, LOST]]
    harness.targets.script = [round_of("d", source="model"), round_of("e", "length")]
    body = BODY | {"stream": stream, "speculation": {"method": "hybrid"}}
    answer = await harness.post(TEXT, body, headers={"x-request-id": "mine-1"})
    assert answer.status_code == 200
    (line,) = lines.of_requests()
    assert line["level"] == "info"
    assert line["message"] == "POST /v1/completions"
    assert line["outcome"] == "ok"
    assert line["request_id"] == "mine-1"
    assert line["completion_id"] == "cmpl-0"
    assert line["trace_id"] == answer.headers["x-paceline-trace-id"]
    assert line["replica"] == "gw#1"
    expected = {
        **{"status": 200, "model": "toy", "stream": stream, "finish_reasons": ["length"]},
        **{"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 5, "rounds": 3},
        **{"method": "hybrid", "sources": ["model", "suffix"]},
        **{"proposed": 4, "accepted": 2, "acceptance": 0.5, "retries": 1},
    }
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["ttft_ms"] <= line["total_ms"]


async def test_every_choice_has_a_finish_reason(
    harness: Any, round_of: RoundOf, lines: Lines
) -> None:
    harness.targets.script = [round_of("aX", choice=1), round_of("b", "length", choice=0)]
    assert (await harness.complete(n=2, stop="X")).status_code == 200
    assert lines.of_requests()[0]["finish_reasons"] == ["length", "stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_line_whatever_happens(
    stream: bool, make_harness: Any, round_of: RoundOf, lines: Lines
) -> None:
    cases: list[tuple[list[Any], str, int]] = [
        ([round_of("x", "length")], "ok", 200),
        ([round_of("x", "length"), LOST], "ok", 200),
        ([LOST], "target_lost", 503),
        ([OverloadedError("full", None, "overloaded")], "overloaded", 429),
        ([ValueError("a bug")], "internal_error", 500),
        ([], "target_lost", 503),
    ]
    harness = make_harness(max_retries=0)
    for script, _, _ in cases:
        harness.targets.script = script
        await harness.complete(stream=stream)
    assert await harness.is_idle()
    found = [(line["outcome"], line["status"]) for line in lines.of_requests()]
    assert found == [(outcome, status) for _, outcome, status in cases]
    assert {line["level"] for line in lines.of_requests()} == {"info"}


async def test_an_error_amid_a_stream(make_harness: Any, round_of: RoundOf, lines: Lines) -> None:
    harness = make_harness(max_retries=0)
    harness.targets.script = [round_of("x"), LOST]
    await harness.complete(stream=True)
    (line,) = lines.of_requests()
    assert (line["outcome"], line["status"]) == ("target_lost", 200)
    assert (line["completion_tokens"], line["finish_reasons"]) == (1, [])


async def test_an_error_without_a_code_amid_a_stream(
    harness: Any, round_of: RoundOf, lines: Lines
) -> None:
    """The target breaks its contract: a round of a choice that it has ended."""
    harness.targets.script = [round_of("x", "length", choice=0), round_of("y", choice=0)]
    await harness.complete(stream=True, n=2)
    (line,) = lines.of_requests()
    assert (line["outcome"], line["status"]) == ("http_500", 200)


async def test_refusals(make_harness: Any, lines: Lines) -> None:
    """Each once, and no more of a model than the name of one that is served."""
    harness = make_harness(max_concurrent_requests=1, max_tokens=30)
    await harness.post(TEXT, b"{")
    await harness.post(TEXT, BODY | {"model": "no such"})
    await harness.post(TEXT, BODY | {"max_tokens": 31})
    await harness.post(TEXT, BODY, headers={"content-type": "text/plain"})
    await harness.get("/v1/models/no-such")
    with harness.service.room.take(1):
        await harness.post(CHAT, BODY)
    found = [(x["message"], x["outcome"], x.get("model"), x["status"]) for x in lines.parsed()]
    assert found == [
        ("POST /v1/completions", "invalid_json", None, 400),
        ("POST /v1/completions", "model_not_found", None, 404),
        ("POST /v1/completions", "too_many", "toy", 400),
        ("POST /v1/completions", "media_type", None, 415),
        ("GET /v1/models/{model_id}", "model_not_found", None, 404),
        ("POST /v1/chat/completions", "too_many_requests", None, 429),
    ]


@pytest.mark.parametrize("num_rounds", [0, 1])
async def test_a_client_that_leaves(
    num_rounds: int, harness: Any, round_of: RoundOf, lines: Lines
) -> None:
    harness.targets.script = [*[round_of("x")] * num_rounds, asyncio.Event()]
    exchange = harness.begin(TEXT, BODY | {"stream": True})
    await (await harness.targets.begun.get()).is_waiting.wait()
    exchange.leave.set()
    await exchange.task
    (line,) = lines.parsed()
    assert line["outcome"] == "client_left"
    assert (line["completion_tokens"], line["rounds"]) == (num_rounds, num_rounds)
    assert (line["ttft_ms"] is None) == (num_rounds == 0)


@pytest.mark.parametrize("has_left", [True, False])
async def test_whoever_has_the_whole_stream_may_go(
    has_left: bool, harness: Any, round_of: RoundOf, lines: Lines
) -> None:
    """`[DONE]` is sent, but the target's stream not yet followed to its end."""
    harness.targets.script = [round_of("x", "length"), asyncio.Event()]
    exchange = harness.begin(TEXT, BODY | {"stream": True})
    await (await harness.targets.begun.get()).is_waiting.wait()
    assert exchange.body.endswith(b"data: [DONE]\n\n")
    if has_left:
        exchange.leave.set()
    else:
        exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)
    (line,) = lines.parsed()
    assert (line["outcome"], line["status"]) == ("ok", 200)


async def test_a_server_that_cancels(harness: Any, lines: Lines) -> None:
    harness.targets.script = [asyncio.Event()]
    exchange = harness.begin(TEXT, BODY)
    await (await harness.targets.begun.get()).is_waiting.wait()
    exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)
    (line,) = lines.parsed()
    assert (line["outcome"], line["status"]) == ("cancelled", 0)


async def test_whose_key_it_was(make_harness: Any, round_of: RoundOf, lines: Lines) -> None:
    harness = make_harness(api_keys=[ApiKeyConfig(name="alice", sha256=ALICE)])
    harness.targets.script = [round_of("x", "length")]
    await harness.complete()
    assert (lines.parsed()[-1]["outcome"], "key" in lines.parsed()[-1]) == (
        "invalid_api_key",
        False,
    )


async def test_looking_is_debug(harness: Any, lines: Lines) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        await harness.get(path)
    assert lines.raw == []
    with recorded(logging.DEBUG) as more:
        await harness.get("/health")
    assert [line["message"] for line in more.parsed()] == ["GET /health"]


def test_nothing_is_worked_out_for_a_level_that_is_off() -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked up")

    log = RequestLog(RequestIds("r", "t"), 0.0)
    log._answers = [Untouchable()]  # type: ignore[list-item]
    with recorded(logging.WARNING) as lines:
        log.write("POST", TEXT, 200, 1.0)
    assert lines.raw == []
    with recorded(logging.INFO), pytest.raises(AssertionError, match="looked up"):
        log.write("POST", TEXT, 200, 1.0)


def test_no_method_that_a_client_made_up() -> None:
    with recorded() as lines:
        RequestLog(RequestIds(), 0.0).write("ZQX\n", "other", 405, 1.0)
    assert [line["message"] for line in lines.parsed()] == ["OTHER other"]
