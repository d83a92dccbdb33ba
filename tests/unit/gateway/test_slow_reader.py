"""Clients that stop reading: nothing is made for them, nothing piles up, and they are dropped."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import ApiKeyConfig
from paceline.generation import GenerateRequest, RoundDelta
from tests.log_lines import recorded

RoundOf = Callable[..., RoundDelta]
TEXT = "/v1/completions"
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 50, "stream": True}
WRITE_TIMEOUT_S = 100.0
TOO_LONG_S = 101.0
Skip = Callable[[float], None]


class Talker:
    """A target that always has another round, and counts those that were taken from it."""

    def __init__(self, round_of: RoundOf) -> None:
        self._round_of = round_of
        self.num_pulled = 0
        self.num_cancels = 0
        self.aborts: list[str] = []

    def generate(self, request: GenerateRequest) -> Talker:
        return self

    async def __aiter__(self) -> AsyncIterator[RoundDelta]:
        for number in range(50):
            self.num_pulled += 1
            yield self._round_of("x", "length" if number == 49 else None, number)

    def cancel(self) -> None:
        self.num_cancels += 1

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        assert choice is None
        self.aborts.append(request_id)

    async def ready(self) -> bool:
        return True


@pytest.fixture
def talking(make_harness: Any, round_of: RoundOf) -> Callable[..., Any]:
    def make(**limits: Any) -> Any:
        harness = make_harness(**limits)
        model = harness.service.models["toy"]
        harness.service.models["toy"] = replace(model, targets=Talker(round_of))
        return harness

    return make


@pytest.fixture
async def skip(monkeypatch: pytest.MonkeyPatch) -> Skip:
    """Moves the event loop's clock on; nobody waits for real."""
    loop = asyncio.get_running_loop()
    real_time, skipped_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real_time() + skipped_s)

    def move(seconds: float) -> None:
        nonlocal skipped_s
        skipped_s += seconds

    return move


def begin_slow(harness: Any, num_taken: int, body: Any = BODY, **kwargs: Any) -> Any:
    exchange = harness.begin(TEXT, body, **kwargs)
    exchange.stops_after = num_taken
    return exchange


async def turns() -> None:
    """Whoever could run, did."""
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_taken", [0, 1, 2, 7])
async def test_no_round_is_made_that_nobody_takes(
    num_taken: int, talking: Callable[..., Any], skip: Skip
) -> None:
    """The client takes so many messages (the head, then rounds) and stops."""
    harness = talking(write_timeout_s=WRITE_TIMEOUT_S)
    talker = harness.service.models["toy"].targets
    exchange = begin_slow(harness, num_taken)
    await exchange.is_stuck.wait()
    await turns()
    # What the client has, and the one that waits for it.
    assert talker.num_pulled == max(num_taken, 1)
    skip(TOO_LONG_S)
    with recorded(logging.INFO) as lines:
        await exchange.task
    assert talker.num_pulled == max(num_taken, 1)
    assert len(exchange.sent) == num_taken
    assert (talker.num_cancels, talker.aborts) == (1, ["cmpl-0"])
    assert await harness.is_idle()
    assert [line["outcome"] for line in lines.of_requests()] == ["client_stalled"]


async def test_a_reader_that_goes_on_misses_nothing(
    talking: Callable[..., Any], events_of: Callable[[str], list[Any]]
) -> None:
    harness = talking()
    exchange = begin_slow(harness, 3)
    await exchange.is_stuck.wait()
    await turns()
    assert harness.service.models["toy"].targets.num_pulled == 3
    exchange.is_reading.set()
    await exchange.task
    events = events_of(exchange.body.decode())
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "x" * 50
    assert events[-1] == "[DONE]"
    assert harness.service.models["toy"].targets.aborts == []


async def test_slow_is_not_stalled(talking: Callable[..., Any], skip: Skip) -> None:
    """The time is that of one chunk: a reader that takes each in time may take long in all."""

    async def pace() -> None:
        skip(WRITE_TIMEOUT_S * 0.6)
        await turns()

    harness = talking(write_timeout_s=WRITE_TIMEOUT_S, request_timeout_s=1e9)
    exchange = harness.begin(TEXT, BODY)
    exchange.pace = pace
    await exchange.task
    assert len(exchange.sent) == 1 + 50 + 1 + 1  # head, rounds, [DONE], end
    assert exchange.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (BODY | {"stream": False}, 200),
        (BODY | {"model": "other"}, 404),
        (BODY | {"n": 99}, 400),
    ],
)
async def test_every_answer_has_a_limit(
    body: dict[str, Any], status: int, talking: Callable[..., Any], skip: Skip
) -> None:
    """Not only streams: whoever sends an answer does not wait for its reader for ever."""
    harness = talking(write_timeout_s=WRITE_TIMEOUT_S)
    for num_taken in (0, 1):
        exchange = begin_slow(harness, num_taken, body)
        await exchange.is_stuck.wait()
        skip(TOO_LONG_S)
        await exchange.task
        assert exchange.status == (status if num_taken else None)
        assert await harness.is_idle()


async def test_the_places_are_free_again(talking: Callable[..., Any], skip: Skip) -> None:
    secret = "sk-paceline-test"
    sha256 = hashlib.sha256(secret.encode()).hexdigest()
    harness = talking(
        write_timeout_s=WRITE_TIMEOUT_S,
        max_concurrent_requests=1,
        api_keys=(ApiKeyConfig(name="a", sha256=sha256, max_concurrent_requests=1),),
    )
    headers = {"authorization": f"Bearer {secret}"}
    exchange = begin_slow(harness, 3, headers=headers)
    await exchange.is_stuck.wait()
    assert (await harness.post(TEXT, BODY, headers=headers)).status_code == 429
    skip(TOO_LONG_S)
    await exchange.task
    assert await harness.is_idle()
    assert (await harness.post(TEXT, BODY, headers=headers)).status_code == 200


async def test_others_go_on_meanwhile(talking: Callable[..., Any]) -> None:
    harness = talking(max_concurrent_requests=12)
    stuck = [begin_slow(harness, 2) for _ in range(10)]
    for exchange in stuck:
        await exchange.is_stuck.wait()
    answer = await harness.post(TEXT, BODY)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    assert [len(exchange.sent) for exchange in stuck] == [2] * 10
    for exchange in stuck:
        exchange.leave.set()
    await asyncio.gather(*(exchange.task for exchange in stuck))
    assert await harness.is_idle()
