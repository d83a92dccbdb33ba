"""Every parameter reaches the target as it was sent, up to its limit and not beyond."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.generation import GenerateRequest, RoundDelta, SpeculationRequest
from paceline.sampling.params import SamplingParams, VerificationMode

RoundOf = Callable[..., RoundDelta]

# (fields of the body, fields of the law)
LAWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"presence_penalty": 2}, {"presence_penalty": 2.0}),
    ({"presence_penalty": -2.0}, {"presence_penalty": -2.0}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"frequency_penalty": -0.0}, {}),
    ({"repetition_penalty": 0.01}, {"repetition_penalty": 0.01}),
    ({"repetition_penalty": 10}, {"repetition_penalty": 10.0}),
    ({"min_p": 0}, {}),
    ({"min_p": 1}, {"min_p": 1.0}),
    ({"min_tokens": 0}, {}),
    ({"min_tokens": 20}, {"min_tokens": 20}),
    ({"logit_bias": {}}, {}),
    (
        {"logit_bias": {"256": -100, "0": 100, "31": 0.25}},
        {"logit_bias": ((0, 100.0), (31, 0.25), (256, -100.0))},
    ),
    ({"top_p": 1e-9}, {"top_p": 1e-9}),
]


async def asked(harness: Any, score: RoundOf, **fields: Any) -> GenerateRequest:
    harness.targets.script = [
        score(b"", b"x", "length", choice=i) for i in range(fields.get("n", 1))
    ]
    answer = await harness.complete(**fields)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == fields.get("n", 1)
    request: GenerateRequest = harness.targets.requests[-1]
    return request


@pytest.mark.parametrize(("fields", "law"), LAWS)
async def test_law(
    fields: dict[str, Any], law: dict[str, Any], harness: Any, score: RoundOf
) -> None:
    request = await asked(harness, score, **fields)
    assert request.sampling == SamplingParams(seed=77, **law)
    harness.targets.script = [score(b"", b"x", "length")]
    chat = await harness.chat(max_tokens=20, **fields)
    assert chat.status_code == 200
    assert harness.targets.requests[-1].sampling == request.sampling


async def test_everything_at_once(harness: Any, score: RoundOf) -> None:
    request = await asked(
        harness, score, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=0.25,
        frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias={"5": 1}, seed=3, n=2,
        best_of=2, max_tokens=9, min_tokens=4, stop_token_ids=[7, 5, 7], ignore_eos=True,
        logprobs=2, prompt_logprobs=None, stop=["q"],
        speculation={"mode": "block", "max_tokens": 2},
    )  # fmt: skip
    assert request == GenerateRequest(
        request_id="cmpl-0",
        prompt_token_ids=(104, 105),
        max_tokens=9,
        sampling=SamplingParams(
            temperature=0.5, top_p=0.9, top_k=7, seed=3, min_p=0.1, presence_penalty=0.25,
            frequency_penalty=-0.5, repetition_penalty=1.5, logit_bias=((5, 1.0),), min_tokens=4,
        ),
        stop_token_ids=(7, 5),
        speculation=SpeculationRequest(None, 2, VerificationMode.BLOCK),
        ignore_eos=True,
        n=2,
        num_logprobs=2,
        traceparent=request.traceparent,  # new in every request
        http_request_id=request.http_request_id,
        answer_id="cmpl-0",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "num_logprobs", "num_prompt_logprobs"),
    [
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 20}, 20, None),
        ({"logprobs": False}, None, None),
        ({"echo": True}, None, None),
        ({"echo": False, "logprobs": 3}, 3, None),
        ({"echo": True, "logprobs": 3}, 3, 3),
        ({"prompt_logprobs": 0}, None, 0),
        ({"prompt_logprobs": 20}, None, 20),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 2, 5),
        ({"echo": True, "logprobs": 5, "prompt_logprobs": 2}, 5, 5),
    ],
)
async def test_completion_logprobs_asked(
    fields: dict[str, Any],
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    make_harness: Any,
    score: Any,
) -> None:
    harness = make_harness()
    harness.targets.script = [score(b"hi", b"x", "length")]
    assert (await harness.complete(**fields)).status_code == 200
    request = harness.targets.requests[-1]
    assert (request.num_logprobs, request.num_prompt_logprobs) == (
        num_logprobs,
        num_prompt_logprobs,
    )


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
    ],
)
async def test_chat_logprobs_asked(
    fields: dict[str, Any], num_logprobs: int | None, harness: Any, score: Any
) -> None:
    harness.targets.script = [score(b"", b"x", "length")]
    assert (await harness.chat(**fields)).status_code == 200
    assert harness.targets.requests[-1].num_logprobs == num_logprobs
    assert harness.targets.requests[-1].num_prompt_logprobs is None


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection", "block"])
async def test_every_mode(mode: str, harness: Any, score: RoundOf) -> None:
    temperature = 0 if mode == "greedy" else 0.7
    request = await asked(harness, score, temperature=temperature, speculation={"mode": mode})
    assert request.speculation.mode is VerificationMode(mode)
    assert request.sampling.is_greedy == (mode == "greedy")


async def test_greedy_may_have_choices(harness: Any, score: RoundOf) -> None:
    assert (await asked(harness, score, temperature=0, n=3)).n == 3


LIMITS: list[tuple[dict[str, int], dict[str, Any], str]] = [
    ({"max_n": 2}, {"n": 2}, "n"),
    ({"max_concurrent_requests": 2}, {"n": 2}, "n"),
    ({"max_logprobs": 3}, {"logprobs": 3}, "logprobs"),
    ({"max_logprobs": 3}, {"prompt_logprobs": 3}, "prompt_logprobs"),
    ({"max_logit_biases": 2}, {"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
    ({"max_stop_token_ids": 2}, {"stop_token_ids": [1, 2]}, "stop_token_ids"),
]


@pytest.mark.parametrize(("limits", "fields", "param"), LIMITS)
async def test_limits(
    limits: dict[str, int], fields: dict[str, Any], param: str, make_harness: Any, score: Any
) -> None:
    """The limit itself is allowed; one more names the field, starts nothing, holds no place."""
    harness = make_harness(**limits)
    harness.targets.script = [
        score(b"hi", b"x", "length", choice=i) for i in range(fields.get("n", 1))
    ]
    assert (await harness.complete(**fields)).status_code == 200
    more = {
        name: value + 1 if isinstance(value, int)
        else value | {"3": 1} if isinstance(value, dict) else [*value, 3]
        for name, value in fields.items()
    }  # fmt: skip
    refused = await harness.complete(**more)
    assert refused.status_code == 400
    assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (
        param,
        "too_many",
    )
    assert len(harness.targets.requests) == 1
    assert await harness.is_idle()
