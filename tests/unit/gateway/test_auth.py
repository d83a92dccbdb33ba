"""API keys: who is let in, how much, and that a key is never shown."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import BaseRoute, Route

from paceline.config import ApiKeyConfig
from paceline.gateway.auth import PUBLIC_PATHS, TokenBucket, cache_salt
from paceline.generation import RoundDelta
from tests.log_lines import recorded

RoundOf = Callable[..., RoundDelta]
ALICE, BOB = "sk-paceline-alice-SECRET", "sk-paceline-bob-SECRET"
TEXT = "/v1/completions"
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}


def key(name: str, secret: str, **limits: int) -> ApiKeyConfig:
    return ApiKeyConfig(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest(), **limits)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture
def guarded(make_harness: Any, round_of: RoundOf) -> Any:
    harness = make_harness(api_keys=(key("alice", ALICE), key("bob", BOB)))
    harness.targets.script = [round_of("x", "length")]
    return harness


def refusal(answer: httpx.Response) -> str:
    """Its sentence, when it is a 401 as OpenAI's."""
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert {**error, "message": ""} == {
        "message": "", "type": "invalid_request_error", "param": None, "code": "invalid_api_key",
    }  # fmt: skip
    return str(error["message"])


async def test_known_keys_are_let_in(guarded: Any) -> None:
    for secret in (ALICE, BOB):
        for scheme in ("Bearer", "bearer", "BEARER", "Bearer "):
            answer = await guarded.post(TEXT, BODY, headers={"authorization": f"{scheme} {secret}"})
            assert answer.status_code == 200
    assert len(guarded.targets.requests) == 8


NEEDED = "An API key is needed: send the header 'Authorization: Bearer KEY'."
MALFORMED = "The header must read 'Authorization: Bearer KEY', once."
UNKNOWN = "This API key is not known here."


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ([], NEEDED),
        ([("x-api-key", ALICE)], NEEDED),
        ([("authorization", "")], MALFORMED),
        ([("authorization", "Bearer")], MALFORMED),
        ([("authorization", "Bearer ")], MALFORMED),
        ([("authorization", ALICE)], MALFORMED),
        ([("authorization", f"Basic {ALICE}")], MALFORMED),
        ([("authorization", f"Bearer{ALICE}")], MALFORMED),
        ([("authorization", f"Bearer {'x' * 513}")], MALFORMED),
        ([("authorization", f"Bearer {ALICE}"), ("authorization", "Bearer x")], MALFORMED),
        ([("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {ALICE}")], MALFORMED),
        ([("authorization", "Bearer wrong")], UNKNOWN),
        ([("authorization", f"Bearer {'x' * 512}")], UNKNOWN),
        ([("authorization", f"Bearer {ALICE}x")], UNKNOWN),
        ([("authorization", f"Bearer {ALICE[:-1]}")], UNKNOWN),
        ([("authorization", f"Bearer {ALICE.lower()}")], UNKNOWN),
        ([("authorization", f"Bearer {ALICE},{BOB}")], UNKNOWN),
        # What the configuration holds opens nothing.
        ([("authorization", f"Bearer {key('a', ALICE).sha256}")], UNKNOWN),
        ([("authorization", "Bearer ключ")], UNKNOWN),
    ],
)
async def test_everybody_else_is_refused(
    headers: list[tuple[str, str]], sentence: str, guarded: Any
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    async with guarded.client() as client:
        answer = await client.post(TEXT, json=BODY, headers=raw)
    assert refusal(answer) == sentence
    assert guarded.targets.requests == []


def routes_of(app: Any) -> list[tuple[str, str]]:
    """Every (method, path) of the app, placeholders filled in, and some that it has not."""
    found = []
    for route in app.routes:
        assert isinstance(route, BaseRoute)
        assert isinstance(route, Route), f"{route!r}: what would a request without a key get?"
        path = route.path.replace("{model_id:path}", "toy")
        assert "{" not in path
        found += [(method, path) for method in sorted(route.methods or ())]
    return found


async def test_every_route_denies_by_default(guarded: Any) -> None:
    routes = routes_of(guarded.app)
    assert ("POST", TEXT) in routes
    assert ("GET", "/v1/models/toy") in routes
    paths = {path for _, path in routes}
    paths |= {"/", "/nowhere", "/docs/", "/health/", "//health", "/ready/x", "/HEALTH", "/static"}
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
    let_in = set()
    async with guarded.client() as client:
        for path in sorted(paths):
            for method in methods:
                answer = await client.request(method, f"http://gateway{path}")
                if answer.status_code == 401:
                    assert method == "HEAD" or refusal(answer) == NEEDED
                else:
                    let_in.add((method, path, answer.status_code))
    public = {path for path in paths if path.startswith("/static/")} | PUBLIC_PATHS
    public -= {"/"} - {route.path for route in guarded.app.routes}
    assert let_in - {("GET", "/", 404), ("HEAD", "/", 404)} == {
        (method, path, 200) for method in ("GET", "HEAD") for path in public
    }
    assert {"/", "/docs", "/openapi.json", "/health", "/ready", "/version"} == PUBLIC_PATHS
    for path in ("/static/", "/static/x", "/static/../v1/models", "/static//v1/models"):
        assert (await guarded.get(path)).status_code in (401, 404)
    # With a key the same paths are what they are without any configured.
    assert (await guarded.client().get("/nowhere", headers=bearer(ALICE))).status_code == 404


async def test_websockets_are_closed(guarded: Any) -> None:
    sent = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/health", "headers": [], "subprotocols": []}
    await guarded.app(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1000}]


async def test_public_paths_under_a_prefix(guarded: Any) -> None:
    for root, path, is_public in (
        ("/llm", "/llm/health", True),
        ("/llm", "/health", True),
        ("/llm", "/llm/v1/models", False),
        ("/llm", "/llmx/health", False),
        ("/health", "/health/nowhere", False),
    ):
        transport = httpx.ASGITransport(guarded.app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            assert ((await client.get(path)).status_code == 401) == (not is_public)


async def test_refused_before_the_body_is_read(guarded: Any) -> None:
    """The body never comes; the answer does."""
    exchange = guarded.begin(TEXT, BODY, is_whole=False)
    await exchange.task
    assert exchange.status == 401
    assert (b"www-authenticate", b"Bearer") in exchange.sent[0]["headers"]


async def test_no_keys_no_questions(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("x", "length")]
    for headers in ({}, bearer("anything"), {"authorization": "nonsense"}):
        assert (await harness.post(TEXT, BODY, headers=headers)).status_code == 200
    assert {request.cache_salt for request in harness.targets.requests} == {0}


@pytest.mark.parametrize("path", [TEXT, "/v1/models", "/nowhere"])
async def test_keys_are_never_logged(
    path: str, guarded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    guarded.targets.script = [ValueError(f"a bug that quotes {ALICE}")]
    with recorded() as lines:
        for secret in (ALICE, "sk-paceline-wrong-SECRET"):
            answer = await guarded.post(path, BODY, headers=bearer(secret))
            assert answer.status_code >= 400
            assert "SECRET" not in answer.text + str(answer.headers)
    assert "SECRET" not in caplog.text + lines.everything
    assert [line["outcome"] for line in lines.of_requests()].count("invalid_api_key") == 1
    assert "SECRET" not in repr(guarded.service.config)


# How many


async def test_rate_limit_refills_all_the_time(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(
        api_keys=(key("alice", ALICE, max_requests_per_minute=3), key("bob", BOB))
    )
    harness.targets.script = [round_of("x", "length")]

    async def ask(secret: str = ALICE) -> httpx.Response:
        return await harness.post(TEXT, BODY, headers=bearer(secret))

    assert [(await ask()).status_code for _ in range(3)] == [200] * 3
    refused = await ask()
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "20"
    assert refused.json()["error"] == {
        "message": "This API key may send 3 requests per minute. Try again later.",
        "type": "overloaded_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert (await ask(BOB)).status_code == 200
    harness.monotonic_s += 12.5
    assert (await ask()).headers["retry-after"] == "8"
    harness.monotonic_s += 7.5
    # Refusals cost nothing, not even time.
    assert [(await ask()).status_code for _ in range(2)] == [200, 429]
    harness.monotonic_s += 1e6
    assert [(await ask()).status_code for _ in range(4)] == [200, 200, 200, 429]
    harness.monotonic_s -= 1e6  # a clock that goes back gives nothing and takes nothing
    assert (await ask()).headers["retry-after"] == "20"
    assert len(harness.targets.requests) == 8


async def test_whatever_a_key_sends_counts(make_harness: Any) -> None:
    harness = make_harness(api_keys=(key("alice", ALICE, max_requests_per_minute=4),))
    async with harness.client() as client:
        statuses = [
            (await client.get(path, headers=bearer(ALICE))).status_code
            for path in ("/v1/models", "/nowhere", TEXT, "/health", "/v1/models", "/v1/models")
        ]
        assert statuses == [200, 404, 405, 200, 200, 429]
        # A wrong key is no key: it neither costs a token nor is told about limits.
        assert (await client.get("/v1/models", headers=bearer("x"))).status_code == 401


def test_bucket_at_its_borders() -> None:
    bucket = TokenBucket(2, now_s=0.0)
    assert [bucket.take(0.0), bucket.take(0.0)] == [0.0, 0.0]
    assert bucket.take(0.0) == 30.0
    assert bucket.take(29.0) == pytest.approx(1.0)
    assert bucket.take(30.0) == 0.0
    assert bucket.take(30.0) == 30.0
    busy = TokenBucket(600, now_s=0.0)
    taken = sum(busy.take(step / 100) == 0.0 for step in range(6000))
    # One minute at 100/s: what was in the bucket, and what came in meanwhile.
    assert 600 + 599 <= taken <= 1200


async def test_concurrency_of_one_key(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(
        api_keys=(key("alice", ALICE, max_concurrent_requests=3), key("bob", BOB))
    )
    gate = asyncio.Event()
    running_script = [gate, round_of("x", "length"), round_of("x", "length", choice=1)]
    harness.targets.first_scripts = [running_script]
    running = harness.begin(TEXT, BODY | {"n": 2}, headers=bearer(ALICE))
    await harness.targets.begun.get()
    harness.targets.script = [round_of("x", "length")]

    async def ask(secret: str, **fields: Any) -> httpx.Response:
        return await harness.post(TEXT, BODY | fields, headers=bearer(secret))

    refused = await ask(ALICE, n=2)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "too_many_requests"
    assert "This API key has 2 requests in progress, of 3 at most" in refused.text
    assert [(await ask(ALICE)).status_code for _ in range(2)] == [200, 200]
    assert (await ask(BOB)).status_code == 200
    never = await ask(ALICE, n=4)
    assert never.status_code == 400
    assert never.json()["error"] == {
        "message": "With this API key 'n' may be at most 3, all prompts together.",
        "type": "invalid_request_error",
        "param": "n",
        "code": "too_many",
    }
    gate.set()
    await running.task
    assert running.status == 200
    assert (await ask(ALICE)).status_code == 200
    assert await harness.is_idle()


async def test_a_full_key_is_refused_before_the_body_is_read(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(api_keys=(key("alice", ALICE, max_concurrent_requests=1),))
    gate = asyncio.Event()
    harness.targets.script = [gate, round_of("x", "length")]
    running = harness.begin(TEXT, BODY, headers=bearer(ALICE))
    await harness.targets.begun.get()
    late = harness.begin(TEXT, BODY, is_whole=False, headers=bearer(ALICE))
    await late.task
    assert late.status == 429
    gate.set()
    await running.task
    assert running.status == 200


@pytest.mark.parametrize("end", ["leave", "cancel", "error", "bad body", "full gateway"])
async def test_every_end_frees_the_keys_places(
    end: str, make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(
        api_keys=(key("alice", ALICE, max_concurrent_requests=1),),
        max_concurrent_requests=1,
    )
    gate = asyncio.Event()
    harness.targets.first_scripts = [[round_of("a"), gate, ValueError()]]
    if end == "full gateway":
        harness.service.room.num_taken += 1
    body = BODY | ({"n": "x"} if end == "bad body" else {})
    exchange = harness.begin(TEXT, body, headers=bearer(ALICE))
    if end in ("leave", "cancel", "error"):
        stream = await harness.targets.begun.get()
        await stream.is_waiting.wait()
    if end == "leave":
        exchange.leave.set()
    elif end == "cancel":
        exchange.task.cancel()
    else:
        gate.set()
    await asyncio.gather(exchange.task, return_exceptions=True)
    if end == "full gateway":
        harness.service.room.num_taken -= 1
    harness.targets.first_scripts = []
    harness.targets.script = [round_of("x", "length")]
    assert await harness.is_idle()
    assert (await harness.post(TEXT, BODY, headers=bearer(ALICE))).status_code == 200


# The prefix cache


async def test_keys_salt_the_prefix_cache(make_harness: Any, round_of: RoundOf) -> None:
    keys = (key("alice", ALICE), key("bob", BOB))
    for isolates in (True, False):
        harness = make_harness(api_keys=keys, isolates_prefix_cache=isolates)
        harness.targets.script = [round_of("x", "length")]
        for secret in (ALICE, BOB, ALICE):
            assert (await harness.post(TEXT, BODY, headers=bearer(secret))).status_code == 200
        salts = [request.cache_salt for request in harness.targets.requests]
        alice, bob = cache_salt("alice"), cache_salt("bob")
        assert salts == ([alice, bob, alice] if isolates else [0, 0, 0])


def test_salts_are_known_u64s() -> None:
    """The same in every process and release: another salt would empty the caches."""
    assert cache_salt("alice") == 16857788757930356578
    salts = {cache_salt(f"key-{number}") for number in range(10_000)}
    assert len(salts) == 10_000
    assert all(0 < salt < 2**64 for salt in salts)


# OpenAI's own client


async def test_errors_of_the_sdk(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(api_keys=(key("alice", ALICE, max_requests_per_minute=1),))
    harness.targets.script = [round_of("x", "length")]

    def sdk(secret: str) -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(harness.app)
        return openai.AsyncOpenAI(
            api_key=secret,
            base_url="http://gateway/v1",
            http_client=httpx.AsyncClient(transport=transport),
            max_retries=0,
        )

    with pytest.raises(openai.AuthenticationError) as unknown:
        await sdk("sk-wrong").completions.create(model="toy", prompt="x")
    assert (unknown.value.status_code, unknown.value.code) == (401, "invalid_api_key")
    answer = await sdk(ALICE).completions.create(model="toy", prompt="x")
    assert answer.choices[0].text == "x"
    with pytest.raises(openai.RateLimitError) as limited:
        await sdk(ALICE).completions.create(model="toy", prompt="x")
    assert limited.value.code == "rate_limit_exceeded"
    assert limited.value.response.headers["retry-after"] == "60"
