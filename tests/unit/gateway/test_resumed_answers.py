"""An answer that several targets wrote is, byte for byte, the one of an undisturbed target."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.generation import RoundDelta

Score = Callable[..., RoundDelta]
LOST = RequestError("The target was lost; try again.", None, "target_lost", 503, 1)
STOP = "XY"


def left_to_do(rounds: list[RoundDelta], done: int) -> list[RoundDelta]:
    """What a target sends that goes on after the first `done` rounds: it counts its own rounds
    from 0, and runs no choice that a stop string has ended."""
    counted = Counter(delta.choice for delta in rounds[:done])
    texts = {
        choice: b"".join(bytes(d.token_ids) for d in rounds[:done] if d.choice == choice)
        for choice in range(2)
    }
    return [
        replace(delta, round=delta.round - counted[delta.choice])
        for delta in rounds[done:]
        if STOP.encode() not in texts[delta.choice]
    ]


def plain(score: Score) -> list[RoundDelta]:
    return [
        score(b"hi", "he", num_draft_tokens=3, num_accepted_tokens=1, num_cached_tokens=1),
        score(b"", "l", number=1),
        score(b"", "", number=2),
        score(b"", "lo", "length", number=3, num_draft_tokens=1, num_accepted_tokens=1),
    ]


def split_character(score: Score) -> list[RoundDelta]:
    first, second, third, fourth = "😀".encode()
    return [
        score(b"hi", [97, first]),
        score(b"", [second], number=1),
        score(b"", [third], number=2),
        score(b"", [fourth, 98], "stop", number=3),
    ]


def two_choices(score: Score) -> list[RoundDelta]:
    """Choice 0 ends by a stop string that rounds cut in two, choice 1 almost does."""
    return [
        score(b"", "aX", choice=1),
        score(b"hi", "bX", num_cached_tokens=2),
        score(b"", "Yc", number=1),
        score(b"", "Z", number=1, choice=1),
        score(b"", "X", number=2, choice=1),
        score(b"", "é".encode()[:1], number=3, choice=1),
        score(b"", "é".encode()[1:], "length", number=4, choice=1),
    ]


CASES: list[tuple[Callable[[Score], list[RoundDelta]], dict[str, Any]]] = [
    (plain, {}),
    (plain, {"speculation": {"include_rounds": True}}),
    (plain, {"echo": True}),
    (plain, {"echo": True, "logprobs": 2}),
    (split_character, {}),
    (split_character, {"logprobs": 0, "stop": ["b"]}),
    (two_choices, {"n": 2, "stop": [STOP], "speculation": {"include_rounds": True}}),
    (two_choices, {"n": 2, "stop": [STOP, "é"], "include_stop_str_in_output": True}),
    (two_choices, {"n": 2, "stop": [STOP], "logprobs": 3, "echo": True}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("script", "fields"), CASES)
async def test_wherever_targets_are_lost(
    script: Callable[[Score], list[RoundDelta]],
    fields: dict[str, Any],
    stream: bool,
    make_harness: Any,
    score: Score,
) -> None:
    rounds = script(score)
    body = dict(fields, stream=stream, seed=3)
    if stream:
        body["stream_options"] = {"include_usage": True}

    async def answer(*scripts: list[Any]) -> tuple[bytes, Any]:
        harness = make_harness()
        harness.targets.first_scripts = list(scripts)
        response = await harness.complete(**body)
        assert response.status_code == 200
        assert await harness.is_idle()
        assert len(asyncio.all_tasks()) == 1
        return response.content, harness.targets.requests

    undisturbed, _ = await answer(rounds)
    num_resumed = 0
    for first in range(len(rounds) + 1):
        for second in range(first, len(rounds) + 1):
            resumed = left_to_do(rounds, first)
            left = left_to_do(rounds, second)
            received = resumed[: len(resumed) - len(left)]
            content, requests = await answer([*rounds[:first], LOST], [*received, LOST], left)
            assert content == undisturbed, (first, second)
            num_resumed += sum(request.resumption is not None for request in requests)
    assert num_resumed > len(rounds)
