"""Seeded requests, and what became of each: texts, tokens, gaps between events, how it ended.

The promise is about greedy and coupled requests: their text depends on prompt, parameters and
seed alone. So one undisturbed run without drafts is the reference for all others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 60.0
WORDS = ("a", "draft", "ran", "ahead", "of", "the", "target", "and", "came", "back", "late")
TRANSPORT = "connection_lost"  # our word for an answer that just stopped


@dataclass(frozen=True, slots=True)
class Request:
    """One body, and after how many events its client leaves (None: it stays)."""

    index: int
    path: str
    body: dict[str, Any]
    leaves_after: int | None = None

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class Outcome:
    """How one request ended. Invariant: at most one of `is_done`, `has_left`, `error` says so."""

    request: Request
    texts: list[str] = field(default_factory=list)
    tokens: list[list[str]] = field(default_factory=list)  # only with logprobs
    status: int = 0
    error: str = ""
    is_done: bool = False
    has_left: bool = False
    retry_after: str = ""
    gaps: list[float] = field(default_factory=list)  # seconds between events of a choice
    num_tokens: int = 0
    num_accepted: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def has_failed(self) -> bool:
        return not self.is_done and not self.has_left

    @property
    def is_clean(self) -> bool:
        """A failure that said so: an error object, not a connection that stopped."""
        return self.error not in ("", TRANSPORT)


def draw_requests(seed: int, count: int) -> list[Request]:
    """The same ones for the same seed: every kind that the promise covers."""
    rng = random.Random(f"requests/{seed}")
    return [_draw(rng, seed, index) for index in range(count)]


def _draw(rng: random.Random, seed: int, index: int) -> Request:
    prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 20)))
    body: dict[str, Any] = {
        "model": "toy",
        "max_tokens": rng.randrange(30, 100),
        "temperature": 0.0 if index % 3 == 0 else rng.choice((0.5, 0.8, 1.0)),
        "seed": seed * 1000 + index,
        "ignore_eos": rng.random() < 0.7,
    }
    path = "/v1/completions"
    if index % 5 == 4:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
        if rng.random() < 0.5:
            body["logprobs"] = rng.randrange(0, 3)
    if rng.random() < 0.2:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    if rng.random() < 0.2:
        body["n"] = 2
    if rng.random() < 0.2:
        body["stop"] = [chr(rng.randrange(97, 123)) + chr(rng.randrange(97, 123))]
    leaves_after = None
    if index % 4 != 3:
        body |= {"stream": True, "speculation": {"include_rounds": True}}
        leaves_after = rng.randrange(1, 12) if rng.random() < 0.15 else None
    return Request(index, path, body, leaves_after)


def without_drafts(request: Request) -> Request:
    """The same request as its reference is made."""
    options = {**request.body.get("speculation", {}), "method": "off"}
    return Request(request.index, request.path, {**request.body, "speculation": options})


def client(url: str, max_connections: int = 256) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=16)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False, limits=limits)


async def send(http: httpx.AsyncClient, request: Request) -> Outcome:
    """One request to its end; never raises for what the service does."""
    outcome = Outcome(request, started_s=time.monotonic())
    num_choices = request.body.get("n", 1)
    outcome.texts = [""] * num_choices
    outcome.tokens = [[] for _ in range(num_choices)]
    try:
        if request.is_stream:
            await _stream(http, request, outcome)
        else:
            response = await http.post(request.path, json=request.body)
            _take_head(outcome, response)
            _take_whole(outcome, response.json())
    except (httpx.HTTPError, json.JSONDecodeError):
        outcome.error = TRANSPORT
    outcome.ended_s = time.monotonic()
    return outcome


async def _stream(http: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
    async with http.stream("POST", request.path, json=request.body) as response:
        _take_head(outcome, response)
        if response.status_code != httpx.codes.OK:
            _take_whole(outcome, json.loads(await response.aread()))
            return
        last_s: dict[int, float] = {}
        num_events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                outcome.is_done = True
                return
            _take_event(outcome, json.loads(line[6:]), last_s)
            if outcome.error:
                return
            num_events += 1
            if num_events == request.leaves_after:
                outcome.has_left = True
                return
        outcome.error = TRANSPORT  # no [DONE]: the text is not whole


def _take_head(outcome: Outcome, response: httpx.Response) -> None:
    outcome.status = response.status_code
    outcome.retry_after = response.headers.get("retry-after", "")


def _take_event(outcome: Outcome, event: dict[str, Any], last_s: dict[int, float]) -> None:
    if "error" in event:
        outcome.error = event["error"]["code"] or event["error"]["type"]
        return
    for choice in event["choices"]:
        index, now_s = choice["index"], time.monotonic()
        if index in last_s:
            outcome.gaps.append(now_s - last_s[index])
        last_s[index] = now_s
        _take_choice(outcome, choice, choice.get("delta", choice))
    for shown in (event.get("speculation") or {}).get("rounds", ()):
        outcome.num_accepted += shown["accepted"]
        outcome.num_tokens += shown["accepted"] + 1


def _take_choice(outcome: Outcome, choice: dict[str, Any], content: dict[str, Any]) -> None:
    index = choice["index"]
    outcome.texts[index] += content.get("text") or content.get("content") or ""
    logprobs = choice.get("logprobs") or {}
    outcome.tokens[index] += logprobs.get("tokens", ())


def _take_whole(outcome: Outcome, body: dict[str, Any]) -> None:
    if "error" in body:
        outcome.error = body["error"]["code"] or body["error"]["type"]
        return
    for choice in body["choices"]:
        _take_choice(outcome, choice, choice.get("message", choice))
    outcome.num_tokens = body["usage"]["completion_tokens"]
    outcome.num_accepted = body["usage"]["speculation"]["accepted"]
    outcome.is_done = True


async def run_load(
    url: str,
    requests: Sequence[Request],
    concurrency: int,
    is_over: Callable[[], bool] | None = None,
) -> list[Outcome]:
    """So many clients, each with one request at a time: every request once, or, with `is_over`,
    round and round until it says so. All outcomes, in the order of their ends."""
    outcomes: list[Outcome] = []
    queue = iter(requests) if is_over is None else itertools.cycle(requests)

    async def work() -> None:
        for request in queue:
            outcomes.append(await send(http, request))
            if is_over is not None and is_over():
                return

    async with client(url) as http:
        await asyncio.gather(*(work() for _ in range(concurrency)))
    return outcomes
