"""A target that is lost costs a try, never a token, a place or a leak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import OverloadedError, RequestError
from paceline.generation import Resumption, RoundDelta

RoundOf = Callable[..., RoundDelta]
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}


def lost() -> RequestError:
    return RequestError("The target was lost; try again.", None, "target_lost", 503, 1)


def broken() -> RequestError:
    return RequestError("The model failed under it.", None, "engine_broken", 503, 1)


def died() -> RequestError:
    return RequestError("Its process ended under it.", None, "target_died", 503, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failures", "num_aborts"),
    [
        ([[lost()]], 1), ([[]], 1), ([[lost()], []], 2), ([[broken()]], 0), ([[died()]], 0),
        ([[broken()], [lost()]], 1),
    ],
)  # fmt: skip
async def test_another_target_answers(
    stream: bool, failures: list[Any], num_aborts: int, harness: Any, round_of: RoundOf
) -> None:
    """Lost by an error, or by a stream that ends before it begins. Who is dead, or has ended the
    request by itself, need not be told."""
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
    assert harness.targets.aborts == names[:-1][len(names) - 1 - num_aborts :]
    cancels = [stream.num_cancels for stream in harness.targets.streams]
    assert cancels == [0] * (len(failures) - num_aborts) + [1] * num_aborts + [0]


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
    [
        ([], 2), ([[lost()]], 3), ([[lost()], [lost()]], 4), ([[broken()], [lost()]], 3),
        ([[died()]], 2),
    ],
)  # fmt: skip
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
    num_lost = sum(error.code == "target_lost" for (error,) in failures)
    assert len(harness.targets.aborts) == num_lost


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


@pytest.mark.parametrize("error", [lost(), died(), None])
async def test_another_target_goes_on_in_the_middle(
    error: RequestError | None, harness: Any, round_of: RoundOf, events_of: Any
) -> None:
    harness.targets.first_scripts = [
        [round_of("ab"), round_of("", number=1), *([error] if error else [])],
        [lost()],
        [round_of("c"), lost()],
    ]
    harness.targets.script = [round_of("de", "length")]
    events = events_of((await harness.complete(stream=True, seed=5)).text)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "abcde"
    assert events[-1] == "[DONE]"
    first, *others = harness.targets.requests
    resumptions = [
        Resumption(1, ((97, 98),)),
        Resumption(2, ((97, 98),)),
        Resumption(3, ((97, 98, 99),)),
    ]
    assert others == [
        replace(first, request_id=f"cmpl-0~{number}", resumption=resumption)
        for number, resumption in enumerate(resumptions, start=1)
    ]
    assert harness.pauses == [0.1]
    assert await harness.is_idle()


async def test_what_a_stop_string_ended_is_not_run_again(harness: Any, round_of: RoundOf) -> None:
    harness.targets.first_scripts = [[round_of("aX"), round_of("b", choice=1), lost()]]
    harness.targets.script = [round_of("c", "length", choice=1)]
    answer = await harness.complete(n=2, stop="X")
    assert [choice["text"] for choice in answer.json()["choices"]] == ["a", "bc"]
    assert harness.targets.requests[1].resumption == Resumption(1, (None, (98,)))
    assert await harness.is_idle()
    # The second target has nothing left when its only choice has ended.
    assert harness.targets.choice_aborts == [("cmpl-0", 0)]
    assert harness.targets.aborts == ["cmpl-0"]
    assert [stream.num_cancels for stream in harness.targets.streams] == [1, 0]


async def test_no_target_is_left_to_go_on(
    make_harness: Any, round_of: RoundOf, events_of: Any
) -> None:
    """A whole answer becomes a 503; one that has begun ends in an error, without [DONE]."""
    harness = make_harness(max_retries=2)
    for stream in (False, True):
        harness.targets.first_scripts = [[round_of("ab"), lost()]]
        harness.targets.script = [lost()]
        answer = await harness.complete(stream=stream)
        if stream:
            assert [event.get("error", {}).get("code") for event in events_of(answer.text)] == [
                None, "target_lost",
            ]  # fmt: skip
        else:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "target_lost"
    assert len(harness.targets.requests) == 6
    assert await harness.is_idle()


async def test_a_target_without_a_sign_of_life_is_lost(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(target_silence_s=0.01)
    harness.targets.first_scripts = [[round_of("ab"), None, asyncio.Event()], [asyncio.Event()]]
    harness.targets.script = [None, round_of("c"), None, round_of("d", "length")]
    answer = await harness.complete()
    assert answer.json()["choices"][0]["text"] == "abcd"
    assert [stream.num_cancels for stream in harness.targets.streams] == [1, 1, 0]
    assert await harness.is_idle()
    assert harness.targets.aborts == ["cmpl-0", "cmpl-0~1"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_silence_of_all_targets_is_an_error(make_harness: Any) -> None:
    harness = make_harness(target_silence_s=0.01, max_retries=1)
    harness.targets.script = [asyncio.Event()]
    answer = await harness.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "target_lost")
    assert len(harness.targets.requests) == 2
    assert await harness.is_idle()


async def test_a_timeout_of_the_target_itself_is_no_silence(harness: Any) -> None:
    harness.targets.script = [TimeoutError()]
    assert (await harness.complete()).status_code == 500
    assert len(harness.targets.requests) == 1


async def test_aborts_of_lost_tries_take_no_place(make_harness: Any, round_of: RoundOf) -> None:
    """A silent target delays them; and they are bounded all the same."""
    harness = make_harness(max_concurrent_requests=1)
    harness.targets.abort_gate = asyncio.Event()
    harness.targets.script = [round_of("ab", "length")]
    for _ in range(3):
        harness.targets.first_scripts = [[lost()]]
        assert (await harness.complete()).status_code == 200
        assert harness.service.num_in_progress == 0
    assert [stream.num_cancels for stream in harness.targets.streams] == [1, 0] * 3
    assert harness.targets.aborts == ["cmpl-0"]
    harness.targets.abort_gate.set()
    assert await harness.is_idle()
    harness.targets.first_scripts = [[lost()]]
    assert (await harness.complete()).status_code == 200
    assert len(harness.targets.aborts) == 2


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
    harness = make_harness(request_timeout_s=0.4)
    harness.targets.first_scripts = [[lost()]]
    harness.targets.script = [asyncio.Event()]
    answer = await harness.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")
    assert len(harness.targets.requests) == 2
    assert await harness.is_idle()
