"""A gateway, a target and a draft at work: whose lines are whose, and nothing of any text."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from paceline.config import GatewayConfig, ModelConfig
from paceline.engine.base import Engine, StepItem, StepResult
from paceline.engine.loader import load_engine
from paceline.engine.timed import TimedEngine
from paceline.engine.worker import EngineWorker
from paceline.errors import RequestError
from paceline.gateway.api import build_api
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta, TokenOrigin
from paceline.target.driver import TargetDriver
from paceline.target.request_log import log_generation
from tests.log_lines import Lines, recorded
from tests.rpc import fleet

MODEL = ModelConfig(max_model_len=128, num_kv_blocks=256)
MARKER = "ZQXMARKER"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Fragile(TimedEngine):
    """Fails whenever it is to read a text that ends in "!!!"."""

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if any(item.token_ids[-3:] == (ord("!"),) * 3 for item in items):
            raise ZeroDivisionError("planted")
        return super().step(items)


class Stream:
    def __init__(self, deltas: AsyncGenerator[RoundDelta | None, None]) -> None:
        self._deltas = deltas

    def __aiter__(self) -> AsyncIterator[RoundDelta | None]:
        return self._deltas

    def cancel(self) -> None:
        """The abort that follows ends it."""


class Targets:
    """The way of `TargetReplica`, without Ray."""

    def __init__(self, driver: TargetDriver) -> None:
        self._driver = driver

    def generate(self, request: GenerateRequest) -> Stream:
        return Stream(log_generation(request, self._driver.generate(request), time.monotonic))

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        self._driver.abort(request_id, choice)

    async def ready(self) -> bool:
        return True


@asynccontextmanager
async def serving() -> AsyncIterator[httpx.AsyncClient]:
    settings = fleet.config()
    toy: Engine = load_engine(MODEL)
    engine = Fragile(toy, base_ms=2.0, row_ms=0.0)
    async with TargetDriver(EngineWorker(engine), settings, "target", "boot") as target:
        info = target.worker.info
        async with fleet.draft(settings, target, error_rate=0.3, info=info):
            numbers = iter(range(1 << 30))
            service = GatewayService(
                GatewayConfig(max_concurrent_requests=4),
                [ServedModel("toy", ToyTokenizer(), Targets(target), MODEL.max_model_len)],
                clock=time.time,
                random_hex=lambda: f"{next(numbers):032x}",
                random_seed=lambda: 7,
            )
            transport = httpx.ASGITransport(build_api(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                yield client
            await service.drain()
            await fleet.until_free(target)


def texts_of(answer: httpx.Response, is_stream: bool) -> list[str]:
    """Of every choice, and piece by piece of a stream's."""
    if not is_stream:
        choices = answer.json()["choices"]
    else:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
    found = [choice.get("message") or choice.get("delta") or choice for choice in choices]
    return [text for one in found if (text := one.get("content") or one.get("text"))]


def threes(text: str) -> set[str]:
    """How three of its tokens in a row look as Python's list."""
    ids = list(text.encode())
    return {", ".join(map(str, ids[start : start + 3])) for start in range(len(ids) - 2)}


def from_target(lines: Lines) -> list[dict[str, Any]]:
    return [line for line in lines.parsed() if line["logger"] == "paceline.target.request_log"]


async def test_no_line_has_anything_of_a_text() -> None:
    """Of every kind of request that a client can send, at the lowest level."""
    texts, num_asked = [MARKER], 0
    with recorded(logging.DEBUG) as lines:
        async with asyncio.timeout(60), serving() as client:
            messages = [{"role": "user", "content": MARKER}]
            bodies: list[tuple[str, dict[str, Any]]] = [
                (TEXT, {"prompt": MARKER, "temperature": 0.8, "seed": 1}),
                (TEXT, {"prompt": MARKER, "n": 2, "logprobs": 2, "echo": True}),
                (TEXT, {"prompt": list(MARKER.encode()), "stop": "e"}),
                (CHAT, {"messages": messages, "logprobs": True}),
                (CHAT, {"messages": messages, "speculation": {"include_rounds": True}}),
                (TEXT, {"prompt": MARKER + "!!!"}),  # the engine fails
                (TEXT, {"prompt": MARKER * 100}),  # too long
                (TEXT, {"prompt": MARKER, "model": MARKER}),
                (TEXT, {"prompt": MARKER, "stop": [MARKER] * 99}),
                (TEXT, {"prompt": MARKER, MARKER: MARKER}),
            ]
            for path, fields in bodies:
                for is_stream in (False, True):
                    body = {"model": "toy", "max_tokens": 24, "stream": is_stream} | fields
                    answer = await client.post(path, json=body)
                    num_asked += 1
                    if answer.status_code == 200:
                        texts += texts_of(answer, is_stream)
                    else:
                        assert answer.status_code in (400, 404, 500)
    assert len(lines.of_requests()) == num_asked
    assert len(from_target(lines)) == 12  # of ten requests and two that broke a pass
    assert len(lines.raw) > 35
    long_texts = [text for text in texts if len(text) > 4]
    assert len(long_texts) > 6
    known = set(long_texts).union(*map(threes, texts))
    assert len(known) > 50
    assert [text for text in known if text in lines.everything] == []
    problems = [
        line for line in lines.parsed("warning", "error") if "a pass over" not in line["message"]
    ]
    assert problems == []


async def test_gateway_and_target_are_joined_by_the_trace() -> None:
    sent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-request-id": "mine"}
    with recorded(logging.INFO) as lines:
        async with asyncio.timeout(60), serving() as client:
            body = {"model": "toy", "prompt": "hi", "max_tokens": 20}
            answer = (await client.post(TEXT, json=body, headers=sent)).json()
            await client.post(TEXT, json=body)
    of_trace = [line for line in lines.parsed() if line["trace_id"] == TRACE]
    gateway, target = sorted(of_trace, key=lambda line: line["message"])
    assert (gateway["message"], target["message"]) == ("POST /v1/completions", "generation")
    for line in (gateway, target):
        assert (line["request_id"], line["completion_id"]) == ("mine", answer["id"])
        assert line["outcome"] == "ok"
        assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    speculation = answer["usage"]["speculation"]
    for name in ("proposed", "accepted", "rounds"):
        assert gateway[name] == target[name] == speculation[name]
    assert gateway["completion_tokens"] == target["output_tokens"] == 20
    assert gateway["accepted"] > 0


async def test_every_line_about_an_answer_has_its_id() -> None:
    with recorded(logging.INFO) as lines:
        async with asyncio.timeout(60), serving() as client:
            body = {"model": "toy", "prompt": ["hi", "ho"], "n": 2, "max_tokens": 8}
            answer = (await client.post(TEXT, json=body)).json()
            again = (await client.post(TEXT, json=body | {"prompt": "hi"})).json()
    (line,) = [line for line in lines.of_requests() if line["completion_id"] == answer["id"]]
    assert line["outcome"] == "ok"
    found = from_target(lines)
    ids = {(line["completion_id"], line["generation_id"]) for line in found}
    one, other = answer["id"], again["id"]
    assert ids == {(one, f"{one}-0"), (one, f"{one}-1"), (other, other)}


async def generation(*deltas: RoundDelta | BaseException | None) -> AsyncGenerator[Any, None]:
    for delta in deltas:
        if isinstance(delta, BaseException):
            raise delta
        yield delta


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (RoundDelta(1, (), (), finish_reason="stop"), "ok"),
        (RequestError("x", None, "queue_timeout", 503), "queue_timeout"),
        (ValueError(MARKER), "internal_error"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
)
async def test_one_line_at_the_target_however_it_ends(last: Any, outcome: str) -> None:
    first = RoundDelta(0, (1, 2), (TokenOrigin.PLAIN,) * 2, 4, 1, 4)
    request = replace(fleet.request("cmpl-1~2", prompt=(1, 2, 3)), answer_id="cmpl-1")
    times = iter((10.0, 10.5, 10.75, 12.0))
    with recorded(logging.INFO) as lines:
        work = generation(None, first, *([] if isinstance(last, GeneratorExit) else [last]))
        logged = log_generation(request, work, lambda: next(times))
        assert await anext(logged) is None
        assert await anext(logged) is first
        if isinstance(last, GeneratorExit):
            await logged.aclose()
        elif isinstance(last, RoundDelta):
            assert [delta async for delta in logged] == [last]
        else:
            with pytest.raises(type(last)):
                await anext(logged)
    (line,) = lines.parsed()
    assert (line["message"], line["completion_id"], line["outcome"]) == (
        *("generation", "cmpl-1"),
        outcome,
    )
    assert line["generation_id"] == "cmpl-1~2"
    assert (line["first_round_ms"], line["output_tokens"], line["prompt_tokens"]) == (500.0, 2, 3)
    assert (line["proposed"], line["accepted"]) == (4, 1)
