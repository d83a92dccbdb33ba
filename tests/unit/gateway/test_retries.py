"""A target that is lost before its first round costs a try, never a token and never a leak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import OverloadedError, RequestError
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}


def lost() -> RequestError:
    return RequestError("The target was lost; try again.", None, "target_lost", 503, 1)


def broken() -> RequestError:
    return RequestError("The model failed under it.", None, "engine_broken", 503, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "failures", [[[lost()]], [[]], [[lost()], []], [[broken()]], [[broken()], [lost()]]]
)
async def test_another_target_answers(
    stream: bool, failures: list[Any], harness: Any, round_of: RoundOf
) -> None:
    """Lost by an error, or by a stream that ends before it begins."""
    harness.targets.first_scripts = list(failures)
    harness.targets.script = [round_of("ab", "length")]
    answer = await harness.complete(stream=stream, seed=5)
    assert answer.status_code == 200
    if stream:
        assert '"text":"ab"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["text"] == "ab"
        assert answer.json()["id"] == "cmpl-0"
        assert answer.json()["usage"]["completion_tokens"] == 2
    # Each try has a name of its own, so that the abort of one cannot hit the next.
    tries = harness.targets.requests
    names = ["cmpl-0", "cmpl-0~1", "cmpl-0~2"][: len(tries)]
    assert [request.request_id for request in tries] == names
    assert len(tries) == len(failures) + 1
    assert {replace(request, request_id="") for request in tries} == {
        replace(tries[0], request_id="")
    }
    assert await harness.is_idle()
    assert harness.targets.aborts == names[:-1]
    assert [stream.num_cancels for stream in harness.targets.streams] == [1] * len(failures) + [0]


@pytest.mark.parametrize(
    ("max_retries", "pauses"),
    [(0, []), (1, []), (2, [0.1]), (3, [0.1, 0.3]), (6, [0.1, 0.3, 1.0, 1.0, 1.0])],
)
async def test_tries_end(max_retries: int, pauses: list[float], make_harness: Any) -> None:
    """The first other try is made at once, later ones after bounded pauses."""
    harness = make_harness(max_retries=max_retries)
    harness.targets.script = [lost()]
    answer = await harness.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "target_lost"
    assert len(harness.targets.requests) == max_retries + 1
    assert harness.pauses == pauses
    assert await harness.is_idle()
    assert len(harness.targets.aborts) == max_retries + 1


@pytest.mark.parametrize(
    ("failures", "num_tries"),
    [([], 2), ([[lost()]], 3), ([[lost()], [lost()]], 4), ([[broken()], [lost()]], 3)],
)
async def test_no_more_than_two_targets_break_under_it(
    failures: list[Any], num_tries: int, make_harness: Any
) -> None:
    """Who was merely on a target that is lost cannot have broken it: those tries do not count."""
    harness = make_harness(max_retries=5)
    harness.targets.first_scripts = list(failures)
    harness.targets.script = [broken()]
    answer = await harness.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "engine_broken"
    assert len(harness.targets.requests) == num_tries
    assert await harness.is_idle()
    assert len(harness.targets.aborts) == num_tries


async def test_a_broken_target_counts_as_a_lost_one_too(make_harness: Any) -> None:
    harness = make_harness(max_retries=1)
    harness.targets.first_scripts = [[broken()]]
    harness.targets.script = [lost()]
    assert (await harness.complete()).json()["error"]["code"] == "target_lost"
    assert len(harness.targets.requests) == 2


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full", None, "overloaded", 429, 3),
        RequestError("no", "prompt", "x", 400),
        RequestError("down", None, "engine_error", 500),
        RequestError("aborted", None, "aborted", 499),
        ValueError("a bug"),
    ],
)
async def test_other_errors_are_not_tried_again(error: Exception, harness: Any) -> None:
    harness.targets.script = [error]
    status = error.status if isinstance(error, RequestError) else 500
    assert (await harness.complete()).status_code == status
    assert len(harness.targets.requests) == 1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("text", ["ab", ""])
@pytest.mark.parametrize("error", [lost, broken])
async def test_never_after_something_came(
    n: int, text: str, error: Callable[[], RequestError], harness: Any, round_of: RoundOf
) -> None:
    """Not even after a round that shows nothing, and whichever choice it was for."""
    harness.targets.script = [round_of(text, choice=n - 1), error()]
    assert (await harness.complete(n=n)).status_code == 503
    assert len(harness.targets.requests) == 1


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_client_leaves_between_tries(is_cancelled: bool, harness: Any) -> None:
    harness.targets.script = [lost()]
    pausing = asyncio.Event()

    async def forever(_: float) -> None:
        pausing.set()
        await asyncio.Event().wait()

    harness.service._sleep = forever
    exchange = harness.begin("/v1/completions", BODY)
    await pausing.wait()
    if is_cancelled:
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
    else:
        exchange.leave.set()
        await exchange.task
    assert len(harness.targets.requests) == 2
    assert await harness.is_idle()
    assert harness.targets.aborts == ["cmpl-0", "cmpl-0~1"]


async def test_client_leaves_during_the_second_try(harness: Any) -> None:
    harness.targets.first_scripts = [[lost()]]
    harness.targets.script = [asyncio.Event()]
    exchange = harness.begin("/v1/completions", BODY)
    await harness.targets.begun.get()
    second = await harness.targets.begun.get()
    await second.is_waiting.wait()
    exchange.leave.set()
    await exchange.task
    assert await harness.is_idle()
    assert harness.targets.aborts == ["cmpl-0", "cmpl-0~1"]
    assert second.num_cancels == 1


async def test_the_deadline_covers_all_tries(make_harness: Any) -> None:
    harness = make_harness(request_timeout_s=0.05)
    harness.targets.first_scripts = [[lost()]]
    harness.targets.script = [asyncio.Event()]
    answer = await harness.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    assert len(harness.targets.requests) == 2
    assert await harness.is_idle()
