"""The whole service on Ray Serve with toy models: what a client sees, whatever drafts do."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.serve.conftest import WAIT_S, Service, poll

pytestmark = [pytest.mark.serve, pytest.mark.filterwarnings("ignore")]


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text


@pytest.mark.parametrize("draft_tokens", [1, 4, 8])
def test_text_with_the_draft_equals_text_without(service: Service, draft_tokens: int) -> None:
    accepted = 0
    for seed in range(4):
        body: dict[str, Any] = {"temperature": 0.8 if seed else 0.0, "seed": seed}
        off = service.complete(**body, speculation={"method": "off"})
        on = service.complete(**body, speculation={"max_tokens": draft_tokens})
        assert on["choices"] == off["choices"]
        assert off["usage"]["speculation"]["proposed"] == 0
        accepted += on["usage"]["speculation"]["accepted"]
    assert accepted > 0


def test_health_ready_and_models(service: Service) -> None:
    assert httpx.get(f"{service.url}/health").status_code == 200
    assert httpx.get(f"{service.url}/ready").status_code == 200
    models = httpx.get(f"{service.url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["toy"]


def test_openai_client_streams_a_chat(service: Service) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    body: dict[str, Any] = {"model": "toy", "messages": messages, "max_tokens": 24, "seed": 4}
    whole = client.chat.completions.create(**body)
    chunks = list(
        client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.usage
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def stream_rounds(service: Service, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One dict per SSE event that carries text."""
    with httpx.stream(
        "POST", f"{service.url}/v1/completions", json={**body, "stream": True}, timeout=WAIT_S
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


def accepted_in(events: list[dict[str, Any]]) -> int:
    rounds = [r for event in events for r in (event.get("speculation") or {}).get("rounds", [])]
    return sum(r["accepted"] for r in rounds)


def test_kill_9_of_the_draft_mid_stream(service: Service) -> None:
    body: dict[str, Any] = {
        "model": "toy",
        "prompt": "a long story",
        "max_tokens": 400,
        "temperature": 0.8,
        "seed": 11,
    }
    off = service.complete(**{**body, "speculation": {"method": "off"}})
    before = service.wait_for_draft()
    events: list[dict[str, Any]] = []
    stream = stream_rounds(service, {**body, "speculation": {"include_rounds": True}})
    while accepted_in(events) == 0:
        events.append(next(stream))
    os.kill(before["pid"], signal.SIGKILL)
    events.extend(stream)
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == text_of(off)
    after = poll(lambda: new_draft(service, before["pid"]))
    assert after["boot_id"] != before["boot_id"]
    again = service.complete(**body)
    assert text_of(again) == text_of(off)
    assert again["usage"]["speculation"]["accepted"] > 0


def new_draft(service: Service, old_pid: int) -> dict[str, Any] | None:
    fleet = service.fleet()
    wanted = len(fleet["targets"])
    ready = (d for d in fleet["drafts"] if d["pid"] != old_pid and len(d["connected"]) == wanted)
    return next(ready, None)


async def test_8_concurrent_seeded_requests_equal_solo_runs(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:

        async def ask(seed: int) -> str:
            body = {"model": "toy", "prompt": "x", "max_tokens": 48, "temperature": 1.0}
            response = await client.post("/v1/completions", json={**body, "seed": seed})
            return text_of(response.json())

        solo = [await ask(seed) for seed in range(8)]
        together = await asyncio.gather(*(ask(seed) for seed in range(8)))
    assert list(together) == solo
    assert len(set(solo)) == 8


async def test_200_disconnects_leave_nothing_behind(service: Service) -> None:
    rng = random.Random(20261129)

    async def leave(client: httpx.AsyncClient, seed: int) -> None:
        body = {"model": "toy", "prompt": "bye", "max_tokens": 300, "seed": seed, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(rng.randrange(0, 8)):
                await anext(lines)

    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
        for first in range(0, 200, 10):
            await asyncio.gather(*(leave(client, first + i) for i in range(10)))
    await asyncio.to_thread(poll, lambda: is_empty(service))


def is_empty(service: Service) -> bool:
    targets = service.target_stats()
    sizes = [
        target[key]
        for target in targets
        for key in ("num_running", "num_waiting", "num_reserved_blocks", "num_engine_blocks_used")
    ]
    draft = service.draft_stats()
    return not any(sizes) and draft["num_sessions"] == draft["num_engine_blocks_used"] == 0


@pytest.mark.parametrize(("prompt_len", "finish"), [(511, "length"), (510, "length")])
def test_prompts_at_the_context_limit_end_with_length(
    service: Service, prompt_len: int, finish: str
) -> None:
    answer = service.complete(prompt=[65] * prompt_len, max_tokens=None, temperature=0)
    assert answer["choices"][0]["finish_reason"] == finish
    assert answer["usage"]["total_tokens"] == 512


@pytest.mark.parametrize("body", [{"prompt": [65] * 512}, {"prompt": [65] * 510, "max_tokens": 3}])
def test_prompts_over_the_context_limit_are_a_clean_400(
    service: Service, body: dict[str, Any]
) -> None:
    response = httpx.post(f"{service.url}/v1/completions", json={"model": "toy", **body})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
