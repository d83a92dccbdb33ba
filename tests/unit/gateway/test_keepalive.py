"""Comments in a stream that has nothing to say, and what they change: only the status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from paceline.errors import OverloadedError
from paceline.gateway.http import beside
from paceline.gateway.keepalive import KEEP_ALIVE, EventStream
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
TEXT = "/v1/completions"
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20, "stream": True}


class Time:
    """Moves only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self.is_asleep = asyncio.Event()

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self.now_s + seconds, woken))
        self.is_asleep.set()
        await woken.wait()

    async def move(self, seconds: float) -> None:
        """Until whoever is woken sleeps again."""
        await self.is_asleep.wait()
        self.now_s += seconds
        due = [item for item in self._sleepers if item[0] <= self.now_s]
        self._sleepers = [item for item in self._sleepers if item not in due]
        if due:
            self.is_asleep.clear()
            for _, woken in due:
                woken.set()
            await self.is_asleep.wait()


class Sink:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_reading = asyncio.Event()
        self.is_reading.set()

    async def __call__(self, message: Any) -> None:
        await self.is_reading.wait()
        self.sent.append(message.get("status") or message["body"])


@pytest.fixture
async def parts() -> Any:
    """A stream that is kept alive, its time and what it sent."""
    time, sink = Time(), Sink()
    stream = EventStream(sink, 10.0, time.clock, time.sleep)
    task = asyncio.ensure_future(stream.keep_alive())
    yield stream, time, sink.sent, sink
    task.cancel()
    await asyncio.wait([task])


async def test_comments_come_when_nothing_does(parts: Any) -> None:
    stream, time, sent, _ = parts
    await time.move(9.9)
    assert sent == []
    await time.move(0.1)
    assert sent == [200, KEEP_ALIVE]
    await time.move(10)
    assert sent == [200, KEEP_ALIVE, KEEP_ALIVE]
    await time.move(5)
    await stream.send_part(b"a")
    await time.move(9)  # 14 after the last comment, but 9 after the part
    assert sent[3:] == [b"a"]
    await time.move(1)
    assert sent[3:] == [b"a", KEEP_ALIVE]
    await stream.end()
    await time.move(20)
    assert sent[3:] == [b"a", KEEP_ALIVE, b""]


async def test_no_comment_without_silence(parts: Any) -> None:
    stream, time, sent, _ = parts
    for part in (b"", b"a", b"b"):
        await stream.send_part(part)
        await time.move(6)
    await stream.end()
    assert sent == [200, b"a", b"b", b""]


async def test_a_slow_client_gets_none(parts: Any) -> None:
    """What waits for it already is a sign of life when it is read."""
    stream, time, sent, sink = parts
    sink.is_reading.clear()
    part = asyncio.ensure_future(stream.send_part(b"a"))
    for _ in range(5):
        await time.move(10)
    sink.is_reading.set()
    await part
    assert sent == [200, b"a"]


async def test_a_comment_that_cannot_be_sent_ends_the_work() -> None:
    time = Time()

    async def send(message: Any) -> None:
        raise ConnectionError("gone")

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    started, ended = asyncio.Event(), asyncio.Event()
    stream = EventStream(send, 1.0, time.clock, time.sleep)
    task = asyncio.ensure_future(beside(stream.keep_alive(), work()))
    await started.wait()
    await time.is_asleep.wait()
    time.now_s = 1.0
    for _, woken in time._sleepers:
        woken.set()
    with pytest.raises(ConnectionError):
        await task
    assert ended.is_set()


@pytest.fixture
def hasty(make_harness: Any) -> Any:
    """Its interval is over before anything can come."""
    return make_harness(keepalive_interval_s=1e-6)


async def begin(harness: Any, num_comments: int) -> Any:
    """A stream that has sent so many comments and waits for the target."""
    exchange = harness.begin(TEXT, BODY)
    await comments(exchange, num_comments)
    return exchange


async def comments(exchange: Any, num_more: int) -> None:
    """Until so many more have been sent."""
    wanted = exchange.body.count(KEEP_ALIVE) + num_more
    are_sent = asyncio.Event()

    async def pace() -> None:
        if exchange.body.count(KEEP_ALIVE) >= wanted:
            are_sent.set()

    exchange.pace = pace
    await are_sent.wait()


async def test_before_the_first_round(hasty: Any, round_of: RoundOf) -> None:
    wait = asyncio.Event()
    hasty.targets.script = [wait, round_of("ab"), round_of("c", "length", 1)]
    exchange = await begin(hasty, 3)
    assert exchange.status == 200
    assert exchange.body.replace(KEEP_ALIVE, b"") == b""
    wait.set()
    await exchange.task
    # The same events as ever, comments or not.
    plain = (await hasty.complete(stream=True)).content.replace(KEEP_ALIVE, b"")
    kept = exchange.body.replace(KEEP_ALIVE, b"")
    assert kept.replace(b"cmpl-0", b"cmpl-1") == plain
    assert kept.count(b"data: [DONE]") == 1
    assert kept.count(b'"text":"ab"') == 1
    heads = [message for message in exchange.sent if message["type"] == "http.response.start"]
    assert len(heads) == 1
    assert exchange.sent[-1] == {"type": "http.response.body", "body": b""}
    assert await hasty.is_idle()


async def test_an_error_behind_a_comment_is_an_event(hasty: Any) -> None:
    wait = asyncio.Event()
    hasty.targets.script = [wait, OverloadedError("full", None, "queue_full")]
    exchange = await begin(hasty, 1)
    wait.set()
    await exchange.task
    assert exchange.status == 200
    event = exchange.body.replace(KEEP_ALIVE, b"")
    assert event.startswith(b'data: {"error":{"message":"full"')
    assert b"[DONE]" not in event
    assert await hasty.is_idle()


async def test_an_error_before_any_comment_is_a_status(harness: Any) -> None:
    harness.targets.script = [OverloadedError("full", None, "queue_full")]
    answer = await harness.complete(stream=True)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


async def test_a_client_that_leaves_while_it_waits(hasty: Any) -> None:
    hasty.targets.script = [asyncio.Event()]
    exchange = await begin(hasty, 2)
    exchange.leave.set()
    await exchange.task
    assert hasty.targets.streams[0].num_cancels == 1
    assert await hasty.is_idle()


async def test_answers_that_do_not_stream_have_none(hasty: Any, round_of: RoundOf) -> None:
    hasty.targets.script = [None, round_of("ab"), None, round_of("c", "length", 1)]
    assert (await hasty.complete()).json()["choices"][0]["text"] == "abc"


async def test_openai_reads_over_them(hasty: Any, round_of: RoundOf) -> None:
    """The package itself; before every round there was a comment."""
    waits = [asyncio.Event() for _ in range(3)]
    hasty.targets.script = [
        waits[0], round_of("ab"), waits[1], round_of("c"), waits[2], round_of("d", "length")
    ]  # fmt: skip
    bodies: list[bytes] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        exchange = hasty.begin("/v1/chat/completions", json.loads(request.content))
        for wait in waits:
            await comments(exchange, 1)
            wait.set()
        await exchange.task
        bodies.append(exchange.body)
        headers = exchange.sent[0]["headers"]
        return httpx.Response(200, headers=headers, content=exchange.body)

    client = openai.AsyncOpenAI(
        api_key="none",
        base_url="http://gateway/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=httpx.MockTransport(handle)),
    )
    stream = await client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abcd"
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
    assert bodies[0].count(KEEP_ALIVE) >= 3
