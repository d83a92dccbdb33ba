"""Several choices of one request: mixed rounds, own ends, one usage, places and aborts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.generation import RoundDelta, TokenOrigin

Score = Callable[..., RoundDelta]
EventsOf = Callable[[str], list[Any]]
ACC, REC = TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}


def texts(score: Score) -> list[list[RoundDelta]]:
    """Three choices: one ends by a stop string in its second round (and goes on, as the target
    does not know it), one by an EOS, one by its length."""
    counts = {"num_draft_tokens": 2, "num_accepted_tokens": 1, "num_speculative_tokens": 4}
    return [
        [
            score(b"hi", "aE", None, 0, origins=[ACC, REC], num_cached_tokens=1, **counts),
            score(b"", "NDb", None, 1, **counts),
            score(b"", "late", None, 2, **counts),
            score(b"", "r", "length", 3, **counts),
        ],
        [score(b"", "😀"[:1], None, 0, choice=1, num_cached_tokens=2),
         score(b"", b"x\x00", "stop", 1, choice=1)],
        [score(b"", "E", None, 0, choice=2), score(b"", "", None, 1, choice=2),
         score(b"", "N", "length", 2, choice=2)],
    ]  # fmt: skip


EXPECTED = [("a", "stop", "END", 4), ("😀x", "stop", None, 6), ("EN", "length", None, 2)]


def mixed(rounds: Sequence[Sequence[RoundDelta]], seed: int) -> list[RoundDelta]:
    """Some order in which every choice's own rounds keep theirs."""
    order = [choice for choice, items in enumerate(rounds) for _ in items]
    random.Random(seed).shuffle(order)
    queues = [iter(items) for items in rounds]
    return [next(queues[choice]) for choice in order]


def by_choice(chunks: Sequence[Any]) -> list[list[Any]]:
    found: list[list[Any]] = [[], [], []]
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]].append(choice)
    return found


@pytest.mark.parametrize("seed", range(30))
async def test_any_order_of_rounds(
    seed: int, harness: Any, score: Score, events_of: EventsOf
) -> None:
    harness.targets.script = mixed(texts(score), seed)
    fields = {"n": 3, "stop": "END", "logprobs": 2, "echo": True}
    whole = (await harness.complete(**fields)).json()
    answer = await harness.complete(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events_of(answer.text)
    assert done == "[DONE]"
    assert usage["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["completion_tokens"] == sum(num for *_, num in EXPECTED)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}

    streamed = by_choice(chunks)
    for index, (text, finish_reason, stop_reason, num_tokens) in enumerate(EXPECTED):
        choice = whole["choices"][index]
        assert choice["index"] == index
        assert choice["text"] == f"hi{text}"
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)
        assert {len(values) for values in choice["logprobs"].values()} == {2 + num_tokens}

        parts = streamed[index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (
            finish_reason,
            stop_reason,
        )
        for name, values in choice["logprobs"].items():
            shown = [part["logprobs"][name] for part in parts if part["logprobs"]]
            assert [value for part in shown for value in part] == values
    assert await harness.is_idle()


@pytest.mark.parametrize("seed", range(5))
async def test_a_choice_is_what_it_is_alone(seed: int, harness: Any, score: Score) -> None:
    harness.targets.script = mixed(texts(score), seed)
    fields = {"stop": "END", "logprobs": True, "top_logprobs": 1}
    together = (await harness.chat(n=3, **fields)).json()["choices"]
    for index, rounds in enumerate(texts(score)):
        harness.targets.script = [replace(delta, choice=0) for delta in rounds]
        (alone,) = (await harness.chat(**fields)).json()["choices"]
        assert alone | {"index": index} == together[index]


async def test_a_streamed_chat_of_two(harness: Any, score: Score, events_of: EventsOf) -> None:
    harness.targets.script = [
        score(b"", "b", None, 0, choice=1), score(b"", "a", "length", 0),
        score(b"", "c", "length", 1, choice=1),
    ]  # fmt: skip
    *chunks, done = events_of((await harness.chat(n=2, stream=True)).text)
    assert done == "[DONE]"
    seen = [
        (choice["index"], choice["delta"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    assert seen == [
        (0, {"role": "assistant", "content": ""}, None),
        (1, {"role": "assistant", "content": ""}, None),
        (1, {"content": "b"}, None),
        (0, {"content": "a"}, None),
        (0, {}, "length"),
        (1, {"content": "c"}, None),
        (1, {}, "length"),
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_rounds_say_whose_they_are(harness: Any, score: Score, events_of: EventsOf) -> None:
    harness.targets.script = mixed(texts(score), 3)
    fields = {"n": 3, "stop": "END", "speculation": {"include_rounds": True}}
    whole = (await harness.complete(**fields)).json()
    chunks = events_of((await harness.complete(**fields, stream=True)).text)[:-1]
    for key in ("rounds", "pieces"):
        shown = [item for c in chunks for item in c.get("speculation", {}).get(key, [])]
        assert shown == whole["speculation"][key]
    for index, (text, *_) in enumerate(EXPECTED):
        pieces = [p["text"] for p in whole["speculation"]["pieces"] if p["choice"] == index]
        assert "".join(pieces) == text
    rounds = whole["speculation"]["rounds"]
    assert [[r["round"] for r in rounds if r["choice"] == i] for i in range(3)] == [
        [0, 1], [0, 1], [0, 1, 2],
    ]  # fmt: skip
    # Rounds that came after the stop string count nowhere.
    assert whole["usage"]["speculation"]["rounds"] == 7
    assert whole["usage"]["speculation"]["proposed"] == 4


async def test_a_stop_string_frees_its_choice_only(harness: Any, score: Score) -> None:
    gate = asyncio.Event()
    harness.targets.script = [
        score(b"", "aXb", None, 0), score(b"", "c", None, 0, choice=1), gate,
        score(b"", "late", None, 1), score(b"", "d", "length", 1, choice=1),
    ]  # fmt: skip
    exchange = harness.begin("/v1/completions", BODY | {"n": 2, "stop": "X"})
    stream = await harness.targets.begun.get()
    await stream.is_waiting.wait()
    await harness.service.drain()
    assert harness.targets.choice_aborts == [("cmpl-0", 0)]
    assert (harness.targets.aborts, stream.num_cancels) == ([], 0)
    assert harness.service.num_in_progress == 2
    gate.set()
    await exchange.task
    assert exchange.status == 200
    # The target never said that choice 0 is over there: it is told to let go of all.
    assert await harness.is_idle()
    assert (harness.targets.aborts, stream.num_cancels) == (["cmpl-0"], 1)


async def test_all_choices_ended_by_stop_strings(harness: Any, score: Score) -> None:
    harness.targets.script = [
        score(b"", "aX", None, 0), score(b"", "bX", None, 0, choice=1), asyncio.Event(),
    ]  # fmt: skip
    answer = (await harness.complete(n=2, stop="X")).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b"]
    assert await harness.is_idle()
    assert harness.targets.choice_aborts == [("cmpl-0", 0)]
    assert harness.targets.aborts == ["cmpl-0"]


async def test_ends_of_the_target_need_no_abort(harness: Any, score: Score) -> None:
    """A stop string in the very round in which the target ended the choice, too."""
    harness.targets.script = [
        score(b"", "aXb", "length", 0), score(b"", "b", "length", 0, choice=1),
    ]  # fmt: skip
    answer = (await harness.complete(n=2, stop="X")).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "b"]
    assert harness.targets.choice_aborts == harness.targets.aborts == []
    assert harness.targets.streams[0].is_exhausted


async def test_client_leaves_while_some_choices_have_ended(harness: Any, score: Score) -> None:
    harness.targets.script = [score(b"", "a", "length", 0), asyncio.Event()]
    exchange = harness.begin("/v1/completions", BODY | {"n": 2})
    stream = await harness.targets.begun.get()
    await stream.is_waiting.wait()
    exchange.leave.set()
    await exchange.task
    assert await harness.is_idle()
    assert (harness.targets.aborts, stream.num_cancels) == (["cmpl-0"], 1)


@pytest.mark.parametrize("choice", [-1, 2])
async def test_a_choice_that_was_not_asked_for(choice: int, harness: Any, score: Score) -> None:
    harness.targets.script = [score(b"", "a", "length", 0, choice=choice)]
    assert (await harness.complete(n=2)).status_code == 500
    assert await harness.is_idle()


async def test_a_choice_that_goes_on_after_its_end(harness: Any, score: Score) -> None:
    harness.targets.script = [score(b"", "a", "length", 0), score(b"", "b", "length", 1)]
    assert (await harness.complete(n=2)).status_code == 500
    assert harness.targets.aborts == ["cmpl-0"]


async def test_target_lost_with_one_choice_unfinished(
    make_harness: Any, score: Score, events_of: EventsOf
) -> None:
    harness = make_harness(max_retries=0)
    lost = RequestError("lost", None, "target_lost", 503, 1)
    for end in ([lost], []):
        harness.targets.script = [score(b"", "a", "length", 0), *end]
        assert (await harness.complete(n=2)).status_code == 503
        events = events_of((await harness.complete(n=2, stream=True)).text)
        assert events[-1]["error"]["code"] == "target_lost"
    assert len(harness.targets.requests) == 4
    assert await harness.is_idle()


async def test_each_choice_takes_a_place(make_harness: Any, score: Score) -> None:
    harness = make_harness(max_concurrent_requests=3)
    gate = asyncio.Event()
    harness.targets.script = [
        gate, score(b"", "a", "length", 0), score(b"", "b", "length", 0, choice=1),
    ]  # fmt: skip
    running = harness.begin("/v1/completions", BODY | {"n": 2})
    await harness.targets.begun.get()
    assert harness.service.num_in_progress == 2
    refused = await harness.complete(n=2)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "too_many_requests"
    harness.targets.first_scripts = [[score(b"", "x", "length")]]
    assert (await harness.complete()).status_code == 200
    gate.set()
    await running.task
    assert running.status == 200
    assert (await harness.complete(n=2)).status_code == 200
    assert await harness.is_idle()
