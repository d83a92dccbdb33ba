"""The `openai` package itself, over the real routes in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from paceline.errors import OverloadedError
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def sdk(harness: Any) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(harness.app)
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://gateway/v1",
        http_client=httpx.AsyncClient(transport=transport),
        max_retries=0,
    )


async def test_answers(harness: Any, round_of: RoundOf) -> None:
    # U+2028 is a line break to some event readers.
    harness.targets.script = [round_of("héllo "), round_of("w\u2028\n", "length", 1)]
    client = sdk(harness)
    chat = await client.chat.completions.create(model="toy", messages=MESSAGES)
    assert chat.choices[0].message.content == "héllo w\u2028\n"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 12
    text = await client.completions.create(model="toy", prompt="x")
    assert text.choices[0].text == "héllo w\u2028\n"
    assert [model.id async for model in client.models.list()] == ["toy"]

    # An answer goes back as history just as it came.
    history = [*MESSAGES, chat.choices[0].message, *MESSAGES]
    await client.chat.completions.create(model="toy", messages=history)


async def test_streams(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("héllo "), round_of("w\u2028\n", "length", 1)]
    stream = await sdk(harness).chat.completions.create(
        model="toy",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"include_rounds": True}},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == "héllo w\u2028\n"
    assert deltas[0].role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 20 + 12


async def test_errors(harness: Any, round_of: RoundOf) -> None:
    client = sdk(harness)
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="'n' may be at most 16 here"):
        await client.completions.create(model="toy", prompt="x", n=17)
    with pytest.raises(openai.BadRequestError, match="'suffix' is not supported"):
        await client.completions.create(model="toy", prompt="x", suffix="y")
    harness.targets.script = [OverloadedError("full", None, "overloaded", 429, 3)]
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="toy", prompt="x")

    harness.targets.script = [round_of("ab"), OverloadedError("gone")]
    stream = await client.completions.create(model="toy", prompt="x", stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].text == "ab"
    with pytest.raises(openai.APIError, match="gone"):
        await anext(chunks)


async def test_logprobs_and_choices(harness: Any, score: Callable[..., RoundDelta]) -> None:
    """What the package reads from the fields that this release adds."""
    script = [
        score(b"hi", "a😀"[:1]), score(b"", "b", None, 0, choice=1),
        score(b"", "😀".encode()[:2], None, 1), score(b"", "Xz", "stop", 1, choice=1),
        score(b"", "😀".encode()[2:], "length", 2),
    ]  # fmt: skip
    harness.targets.script = script
    client = sdk(harness)
    chat = await client.chat.completions.create(
        model="toy", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, logit_bias={"5": -100},
        presence_penalty=0.5, frequency_penalty=-0.5, stop="X", seed=3,
        extra_body={"min_p": 0.1, "min_tokens": 1, "repetition_penalty": 1.2,
                    "stop_token_ids": [7], "speculation": {"mode": "block"}},
    )  # fmt: skip
    assert [choice.message.content for choice in chat.choices] == ["a😀", "b"]
    assert [choice.finish_reason for choice in chat.choices] == ["length", "stop"]
    contents = [choice.logprobs.content for choice in chat.choices if choice.logprobs]
    assert bytes(byte for entry in contents[0] or [] for byte in entry.bytes or []) == (
        "a😀".encode()
    )
    assert [len(entry.top_logprobs) for entry in contents[1] or []] == [2, 2]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == sum(len(content or []) for content in contents)
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 0

    stream = await client.chat.completions.create(
        model="toy", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, stop="X", stream=True
    )
    seen: list[list[Any]] = [[], []]
    async for chunk in stream:
        for choice in chunk.choices:
            seen[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
    assert [[(t.token, t.logprob, t.bytes) for t in content] for content in seen] == [
        [(t.token, t.logprob, t.bytes) for t in content or []] for content in contents
    ]

    text = await client.completions.create(
        model="toy", prompt="hi", n=2, best_of=2, logprobs=2, echo=True, stop="X",
        extra_body={"prompt_logprobs": 1},
    )  # fmt: skip
    first = text.choices[0]
    assert first.text == "hia😀"
    assert first.logprobs is not None
    assert first.logprobs.text_offset == [0, 1, 2, 3, 3, 3, 3]
    assert first.logprobs.token_logprobs is not None
    assert len(first.logprobs.token_logprobs) == 7
    assert text.choices[1].stop_reason == "X"  # type: ignore[attr-defined]
