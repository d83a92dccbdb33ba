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
    with pytest.raises(openai.BadRequestError, match="'n' is not supported"):
        await client.completions.create(model="toy", prompt="x", n=2)
    harness.targets.script = [OverloadedError("full", None, "overloaded", 429, 3)]
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="toy", prompt="x")

    harness.targets.script = [round_of("ab"), OverloadedError("gone")]
    stream = await client.completions.create(model="toy", prompt="x", stream=True)
    chunks = aiter(stream)
    assert (await anext(chunks)).choices[0].text == "ab"
    with pytest.raises(openai.APIError, match="gone"):
        await anext(chunks)
