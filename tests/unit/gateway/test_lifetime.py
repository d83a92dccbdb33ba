"""Who ends a generation, and what is freed: clients, deadlines, limits, lost targets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import ContextLengthError, OverloadedError, RequestError
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_rounds_before", [0, 1])
async def test_client_leaves(
    stream: bool, num_rounds_before: int, harness: Any, round_of: RoundOf
) -> None:
    harness.targets.script = [*[round_of("ab")] * num_rounds_before, asyncio.Event()]
    exchange = harness.begin("/v1/completions", BODY | {"stream": stream})
    stream_of_target = await harness.targets.begun.get()
    await stream_of_target.is_waiting.wait()
    assert exchange.status == (200 if stream and num_rounds_before else None)
    exchange.leave.set()
    await exchange.task
    assert await harness.is_idle()
    assert harness.targets.aborts == ["cmpl-0"]
    assert stream_of_target.num_cancels == 1
    assert b"[DONE]" not in exchange.body


@pytest.mark.parametrize("stream", [False, True])
async def test_server_cancels_the_handler(stream: bool, harness: Any, round_of: RoundOf) -> None:
    """Serve ends a request by cancelling its task."""
    harness.targets.script = [round_of("ab"), asyncio.Event()]
    exchange = harness.begin("/v1/completions", BODY | {"stream": stream})
    stream_of_target = await harness.targets.begun.get()
    await stream_of_target.is_waiting.wait()
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    assert await harness.is_idle()
    assert harness.targets.aborts == ["cmpl-0"]
    assert stream_of_target.num_cancels == 1


async def test_client_that_stops_reading_is_cut_at_the_deadline(
    make_harness: Any, round_of: RoundOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.gateway.http.FAIL_TIMEOUT_S", 0.01)
    harness = make_harness(request_timeout_s=0.4)
    harness.targets.script = [round_of("ab"), round_of("cd", "length")]
    exchange = harness.begin("/v1/completions", BODY | {"stream": True})
    exchange.is_reading.clear()
    await exchange.task
    assert await harness.is_idle()
    assert exchange.sent == []
    assert harness.targets.aborts == ["cmpl-0"]


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline(stream: bool, make_harness: Any, events_of: Any, round_of: RoundOf) -> None:
    harness = make_harness(request_timeout_s=0.4)
    harness.targets.script = [asyncio.Event()]
    answer = await harness.complete(stream=stream)
    assert answer.status_code == 504
    assert answer.json()["error"] == {
        "message": "The request took longer than 0.4 s.",
        "type": "server_error",
        "param": None,
        "code": "request_timeout",
    }
    harness.targets.script = [round_of("ab"), asyncio.Event()]
    answer = await harness.complete(stream=True)
    assert answer.status_code == 200
    first, error = events_of(answer.text)
    assert first["choices"][0]["text"] == "ab"
    assert error["error"]["code"] == "request_timeout"
    assert len(harness.targets.aborts) == 2


async def test_too_many_requests(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_concurrent_requests=2)
    gate = asyncio.Event()
    harness.targets.script = [gate, round_of("x", "length")]
    running = [harness.begin("/v1/completions", BODY) for _ in range(2)]
    for _ in running:
        await harness.targets.begun.get()
    refused = await harness.complete()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "too_many_requests"
    assert refused.json()["error"]["type"] == "overloaded_error"
    gate.set()
    await asyncio.gather(*(exchange.task for exchange in running))
    assert [exchange.status for exchange in running] == [200, 200]
    assert (await harness.complete()).status_code == 200
    assert len(harness.targets.requests) == 3


async def test_an_abort_under_way_keeps_its_place(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_concurrent_requests=1)
    harness.targets.script = [round_of("aXb"), asyncio.Event()]
    harness.targets.abort_gate = asyncio.Event()
    assert (await harness.complete(stop="X")).json()["choices"][0]["text"] == "a"
    assert (await harness.complete()).status_code == 429
    harness.targets.abort_gate.set()
    assert await harness.is_idle()
    assert (await harness.complete(stop="X")).status_code == 200


REFUSALS = [
    (OverloadedError("full", None, "overloaded", 429, 3), 429, "overloaded_error", "3"),
    (ContextLengthError("too long", "max_tokens", "c"), 400, "invalid_request_error", None),
    (RequestError("lost", None, "target_lost", 503, 1), 503, "server_error", "1"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "retry_after"), REFUSALS)
async def test_target_refuses_before_the_first_round(
    stream: bool, error: RequestError, status: int, kind: str, retry_after: Any, harness: Any
) -> None:
    harness.targets.script = [error]
    answer = await harness.complete(stream=stream)
    assert answer.status_code == status
    assert answer.headers.get("retry-after") == retry_after
    assert answer.json() == {
        "error": {
            "message": str(error), "type": kind, "param": error.param, "code": error.code,
        }
    }  # fmt: skip
    assert await harness.is_idle()


async def test_no_target_is_left_in_the_middle(
    make_harness: Any, round_of: RoundOf, events_of: Any
) -> None:
    harness = make_harness(max_retries=0)
    lost = RequestError("The target was lost; try again.", None, "target_lost", 503, 1)
    for script in ([round_of("ab"), lost], [round_of("ab")]):
        harness.targets.script = script
        first, error = events_of((await harness.complete(stream=True)).text)
        assert first["choices"][0]["text"] == "ab"
        assert error["error"]["code"] == "target_lost"  # and no [DONE]
        whole = await harness.complete()
        assert whole.status_code == 503
        assert whole.json()["error"]["code"] == "target_lost"


async def test_target_lost_after_the_end_harms_nobody(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("ab", "length"), RequestError("lost", status=503)]
    assert (await harness.complete()).json()["choices"][0]["text"] == "ab"
    assert (await harness.complete(stream=True)).text.endswith("data: [DONE]\n\n")
    assert harness.targets.aborts == []


async def test_bug_is_a_500_without_details(
    harness: Any, round_of: RoundOf, caplog: pytest.LogCaptureFixture, events_of: Any
) -> None:
    caplog.set_level(logging.INFO)
    harness.targets.script = [ValueError("SECRET prompt text")]
    answer = await harness.complete("SECRET")
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "Internal error; the server's log has it.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    harness.targets.script = [round_of("ab"), ValueError("SECRET prompt text")]
    events = events_of((await harness.complete("SECRET", stream=True)).text)
    assert events[-1]["error"]["code"] == "internal_error"
    assert "ValueError, message withheld" in caplog.text
    assert "SECRET" not in caplog.text


async def test_ready_and_health(make_harness: Any) -> None:
    harness = make_harness(ready_timeout_s=0.01)
    assert (await harness.get("/health")).json() == {"status": "ok"}
    assert (await harness.get("/ready")).status_code == 200
    for unready in (False, asyncio.Event()):
        harness.targets.readiness = unready
        answer = await harness.get("/ready")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "not_ready"
        assert (await harness.get("/health")).status_code == 200


async def test_all_who_ask_share_one_probe(harness: Any) -> None:
    """Anybody may ask, so asking often must not be work for the targets. Who leaves takes nobody
    else's answer along; the next one asks anew."""
    gate = harness.targets.readiness = asyncio.Event()
    asking = [asyncio.ensure_future(harness.get("/ready")) for _ in range(20)]
    async with asyncio.timeout(60):
        while not harness.targets.num_probes:  # noqa: ASYNC110
            await asyncio.sleep(0)
        asking.append(asyncio.ensure_future(harness.get("/ready")))
        asking.pop(0).cancel()
        await asyncio.sleep(0)
        gate.set()
        answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 20
    assert harness.targets.num_probes == 1
    harness.targets.readiness = False
    assert (await harness.get("/ready")).status_code == 503
    assert harness.targets.num_probes == 2


async def test_ready_says_no_while_no_place_is_free(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_concurrent_requests=1)
    gate = asyncio.Event()
    harness.targets.script = [gate, round_of("x", "length")]
    running = harness.begin("/v1/completions", BODY)
    await harness.targets.begun.get()
    answer = await harness.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "not_ready"
    assert "1 requests are in progress" in answer.json()["error"]["message"]
    gate.set()
    await running.task
    assert (await harness.get("/ready")).status_code == 200


async def test_bodies_that_never_come_take_no_place(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_concurrent_requests=1, body_timeout_s=0.2)
    harness.targets.script = [round_of("x", "length")]
    slow = [harness.begin("/v1/completions", BODY, is_whole=False) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(exchange.task.done() for exchange in slow)
    assert (await harness.get("/ready")).status_code == 200
    assert (await harness.complete()).status_code == 200
    await asyncio.gather(*(exchange.task for exchange in slow))
    for exchange in slow:
        assert exchange.status == 408
        assert (b"connection", b"close") in exchange.sent[0]["headers"]
        assert json.loads(exchange.body)["error"] == {
            "message": "The body did not arrive within 0.2 s.",
            "type": "invalid_request_error",
            "param": None,
            "code": "body_timeout",
        }
    assert len(harness.targets.requests) == 1
    assert await harness.is_idle()


async def test_places_taken_while_a_body_came_refuse_it(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(max_concurrent_requests=1)
    gate = asyncio.Event()
    harness.targets.script = [gate, round_of("x", "length")]
    late = harness.begin("/v1/completions", BODY, is_whole=False)
    await asyncio.sleep(0)
    running = harness.begin("/v1/completions", BODY)
    await harness.targets.begun.get()
    late.finish_body()
    await late.task
    assert late.status == 429
    gate.set()
    await running.task
    assert running.status == 200


async def test_concurrent_requests_do_not_mix(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("ab"), round_of("c", "length")]
    answers = await asyncio.gather(*(harness.complete() for _ in range(20)))
    assert {json.dumps(answer.json()["choices"]) for answer in answers} == {
        '[{"index": 0, "logprobs": null, "finish_reason": "length", "stop_reason": null, '
        '"text": "abc"}]'
    }
    assert await harness.is_idle()
