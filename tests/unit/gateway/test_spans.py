"""The gateway's span of each request: what it says, when it ends, and who has one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import TracingConfig
from paceline.errors import RequestError
from paceline.gateway.spans import GatewayTracer
from paceline.generation import RoundDelta
from paceline.tracing.spans import Span

RoundOf = Callable[..., RoundDelta]
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TEXT = "/v1/completions"


class Spans(list[Span]):
    unix_offset_us = 1_700_000_000_000_000

    def emit(self, span: Span) -> None:
        self.append(span)


@pytest.fixture
def spans() -> Spans:
    return Spans()


def trace_into(spans: Spans, harness: Any, **settings: Any) -> Any:
    config = TracingConfig(file_dir="unused", **{"sample_ratio": 1.0} | settings)
    ids = itertools.count(1)
    harness.service.tracer = GatewayTracer(spans, config, lambda bits: next(ids))
    return harness


def client(flags: str) -> dict[str, dict[str, str]]:
    return {"headers": {"traceparent": f"00-{TRACE}-{CLIENT}-{flags}"}}


async def test_a_whole_answer(harness: Any, spans: Spans, round_of: RoundOf) -> None:
    trace_into(spans, harness).targets.script = [round_of("abc"), round_of("d", "length", 1)]
    body = {"model": "toy", "prompt": "hi", "max_tokens": 4, "temperature": 0.5, "seed": 3}
    answer = await harness.post(TEXT, body, **client("01"))
    (span,) = spans
    assert (span.name, span.is_server, span.error) == ("text_completion toy", True, "")
    assert (span.trace_id, span.parent_id, span.span_id) == (int(TRACE, 16), int(CLIENT, 16), 1)
    assert span.begin_us <= span.end_us
    assert (
        span.attributes.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": "toy",
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.seed": 3,
            "gen_ai.request.stream": False,
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.response.id": answer.json()["id"],
            "gen_ai.response.finish_reasons": ("length",),
            "paceline.request_id": answer.json()["id"],
        }.items()
    )
    first_s = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert isinstance(first_s, float)
    assert 0 <= first_s * 1e6 <= span.end_us - span.begin_us + 1
    (request,) = harness.targets.requests
    assert request.traceparent == f"00-{TRACE}-{1:016x}-01"


async def test_a_request_without_a_trace_is_a_root(
    harness: Any, spans: Spans, round_of: RoundOf
) -> None:
    trace_into(spans, harness).targets.script = [round_of("a", "length")]
    answer = await harness.chat()
    (span,) = spans
    assert (span.name, span.parent_id) == ("chat toy", 0)
    assert f"{span.trace_id:032x}" == answer.headers["x-paceline-trace-id"]


async def test_a_streams_span_ends_with_its_answer(
    harness: Any, spans: Spans, round_of: RoundOf
) -> None:
    gate = asyncio.Event()
    script = [round_of("abc"), gate, round_of("d", "length", 1)]
    trace_into(spans, harness).targets.script = script
    body = {"model": "toy", "prompt": "hi", "max_tokens": 4, "stream": True}
    exchange = harness.begin(TEXT, body)
    await (await harness.targets.begun.get()).is_waiting.wait()
    assert exchange.status == 200
    assert spans == []
    gate.set()
    await exchange.task
    (span,) = spans
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.usage.output_tokens"] == 4


async def test_a_client_that_leaves(harness: Any, spans: Spans, round_of: RoundOf) -> None:
    trace_into(spans, harness).targets.script = [round_of("abc"), asyncio.Event()]
    body = {"model": "toy", "prompt": "hi", "max_tokens": 9, "stream": True}
    exchange = harness.begin(TEXT, body)
    await (await harness.targets.begun.get()).is_waiting.wait()
    exchange.leave.set()
    await exchange.task
    (span,) = spans
    assert (span.error, span.attributes["error.type"]) == ("", "client_disconnected")
    assert span.attributes["gen_ai.usage.output_tokens"] == 3


async def test_a_server_that_cancels(harness: Any, spans: Spans, round_of: RoundOf) -> None:
    trace_into(spans, harness).targets.script = [round_of("abc"), asyncio.Event()]
    exchange = harness.begin(TEXT, {"model": "toy", "prompt": "hi", "max_tokens": 9})
    await (await harness.targets.begun.get()).is_waiting.wait()
    exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)
    (span,) = spans
    assert (span.error, span.attributes["error.type"]) == ("", "cancelled")


@pytest.mark.parametrize("has_left", [True, False])
async def test_whoever_has_the_whole_stream_may_go(
    harness: Any, spans: Spans, round_of: RoundOf, has_left: bool
) -> None:
    trace_into(spans, harness).targets.script = [round_of("abc", "length"), asyncio.Event()]
    body = {"model": "toy", "prompt": "hi", "max_tokens": 3, "stream": True}
    exchange = harness.begin(TEXT, body)
    await (await harness.targets.begun.get()).is_waiting.wait()
    assert exchange.body.endswith(b"data: [DONE]\n\n")
    if has_left:
        exchange.leave.set()
    else:
        exchange.task.cancel()
    await asyncio.gather(exchange.task, return_exceptions=True)
    (span,) = spans
    assert "error.type" not in span.attributes
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)


BROKEN = RequestError("gone", None, "engine_broken", 503)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_has_a_span_whatever_the_ratio(
    harness: Any, spans: Spans, is_stream: bool
) -> None:
    trace_into(spans, harness, sample_ratio=0.0).targets.script = [BROKEN]
    await harness.complete(stream=is_stream)
    (span,) = spans
    assert span.error == "engine_broken"
    assert span.attributes["http.response.status_code"] == 503
    assert all(request.traceparent.endswith("-00") for request in harness.targets.requests)


async def test_our_own_bug_is_a_failure(harness: Any, spans: Spans) -> None:
    trace_into(spans, harness, sample_ratio=0.0).targets.script = [ZeroDivisionError("secret")]
    await harness.complete()
    (span,) = spans
    assert span.error == "internal_error"
    assert "secret" not in repr(span)


async def test_what_the_client_did_wrong_is_told_only_when_sampled(
    harness: Any, spans: Spans
) -> None:
    trace_into(spans, harness, sample_ratio=0.0)
    await harness.complete(temperature=9)
    assert spans == []
    trace_into(spans, harness, sample_ratio=1.0)
    await harness.complete(temperature=9)
    (span,) = spans
    assert (span.name, span.error) == ("text_completion", "")
    assert span.attributes["http.response.status_code"] == 400


async def test_a_slow_request_has_a_span_whatever_the_ratio(
    harness: Any, spans: Spans, round_of: RoundOf
) -> None:
    now_s = itertools.count(step=10.0)
    harness.service.monotonic = lambda: next(now_s)
    trace_into(spans, harness, sample_ratio=0.0).targets.script = [round_of("a", "length")]
    await harness.complete()
    (span,) = spans
    assert span.end_us - span.begin_us > 30_000_000
    assert span.error == ""
    trace_into(spans, harness, sample_ratio=0.0, slow_request_s=0.0)
    await harness.complete()
    assert len(spans) == 1


@pytest.mark.parametrize(
    ("ratio", "flags", "is_sampled"),
    [(0.0, "00", False), (0.0, "01", True), (1.0, "00", True), (1.0, "01", True)],
)
async def test_the_ratio_and_the_clients_flag(
    harness: Any, spans: Spans, round_of: RoundOf, ratio: float, flags: str, is_sampled: bool
) -> None:
    trace_into(spans, harness, sample_ratio=ratio).targets.script = [round_of("a", "length")]
    answer = (
        await harness.complete(**{})
        if flags == ""
        else await harness.post(
            TEXT, {"model": "toy", "prompt": "hi", "max_tokens": 4}, **client(flags)
        )
    )
    assert answer.headers["x-paceline-trace-id"] == TRACE
    assert len(spans) == is_sampled
    (request,) = harness.targets.requests
    assert request.traceparent == f"00-{TRACE}-{1:016x}-0{int(is_sampled)}"


async def test_while_tracing_is_off_the_clients_trace_goes_on_as_it_is(
    harness: Any, round_of: RoundOf
) -> None:
    harness.targets.script = [round_of("a", "length")]
    await harness.post(TEXT, {"model": "toy", "prompt": "hi", "max_tokens": 4}, **client("01"))
    (request,) = harness.targets.requests
    assert request.traceparent == f"00-{TRACE}-{CLIENT}-01"
