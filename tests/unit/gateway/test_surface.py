"""What clients meet besides the answers: methods, slashes, error classes, other origins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

import paceline
from paceline.config import GatewayConfig
from paceline.errors import AuthenticationError, OverloadedError, RequestError
from paceline.gateway.api import CORS_MAX_AGE_S
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


async def test_version(harness: Any) -> None:
    assert (await harness.get("/version")).json() == {"version": paceline.__version__}


async def test_the_playground_can_be_left_out(make_harness: Any) -> None:
    assert (await make_harness().get("/")).status_code == 200
    assert (await make_harness(playground=False).get("/")).status_code == 404


ODD: list[tuple[str, str, int, str | None]] = [
    ("HEAD", "/version", 200, None),
    ("HEAD", "/docs", 200, None),
    ("HEAD", TEXT, 405, "POST"),
    ("GET", CHAT, 405, "POST"),
    ("OPTIONS", CHAT, 405, "POST"),
    ("PUT", "/v1/models", 405, "GET"),
    ("OPTIONS", "/v1/models", 405, "GET"),
    ("POST", "/health", 405, "GET, HEAD"),
    ("DELETE", "/v1/models/toy", 405, "GET"),
    ("GET", "/tokenize", 405, "POST"),
    ("POST", "/metrics", 405, "GET"),
    ("POST", f"{TEXT}/", 404, None),
    ("POST", f"/{TEXT}", 404, None),
    ("POST", TEXT.upper(), 404, None),
    ("POST", "/v1/embeddings", 404, None),
    ("POST", "/v1/responses", 404, None),
    ("GET", "/v1", 404, None),
    ("GET", "/v1/models/", 404, None),
    ("GET", "/metrics/", 404, None),
    ("GET", "/v1/tokenize", 404, None),
    ("GET", "/%2e%2e/etc/passwd", 404, None),
    ("GET", "/static/docs/../../api.py", 404, None),
    ("GET", "/static/docs/swagger-ui.js.map", 404, None),
]


@pytest.mark.parametrize(("method", "path", "status", "allow"), ODD)
async def test_paths_and_methods(
    method: str, path: str, status: int, allow: str | None, harness: Any
) -> None:
    async with harness.client() as client:
        answer = await client.request(method, f"http://gateway{path}")
    assert answer.status_code == status
    shown = answer.headers.get("allow")
    assert sorted((shown or "").split(", ")) == sorted((allow or "").split(", "))
    if status >= 400 and method != "HEAD":
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] in ("unknown_url", "method_not_allowed", "model_not_found")
        assert error["message"].endswith(".")


KINDS: list[tuple[RequestError, type[openai.APIStatusError], str]] = [
    (RequestError("x", "p", "c"), openai.BadRequestError, "invalid_request_error"),
    (AuthenticationError("x", None, "c"), openai.AuthenticationError, "invalid_request_error"),
    (RequestError("x", "p", "c", 403), openai.PermissionDeniedError, "invalid_request_error"),
    (RequestError("x", "p", "c", 404), openai.NotFoundError, "invalid_request_error"),
    (RequestError("x", "p", "c", 422), openai.UnprocessableEntityError, "invalid_request_error"),
    (OverloadedError("x", None, "c"), openai.RateLimitError, "overloaded_error"),
    (RequestError("x", None, "c", 500), openai.InternalServerError, "server_error"),
    (RequestError("x", None, "c", 503), openai.InternalServerError, "server_error"),
    (RequestError("x", None, "c", 504), openai.InternalServerError, "server_error"),
]


@pytest.mark.parametrize(("error", "kind", "type_"), KINDS)
async def test_error_classes(
    error: RequestError, kind: type[openai.APIStatusError], type_: str, make_harness: Any
) -> None:
    harness = make_harness(max_retries=0)
    harness.targets.script = [error]
    client = openai.AsyncOpenAI(
        api_key="none",
        base_url="http://gateway/v1",
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(harness.app)),
        max_retries=0,
    )
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            await client.completions.create(model="toy", prompt="x", stream=stream)
        got = raised.value
        assert type(got) is kind
        assert got.status_code == error.status
        assert (got.code, got.param, got.type) == (error.code, error.param, type_)
        assert got.request_id == got.response.headers["x-request-id"]
        assert got.body == {"message": "x", "type": type_, "param": error.param, "code": "c"}


ORIGIN = "https://app.example.com"


async def preflight(harness: Any, origin: str) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    async with harness.client() as client:
        answer: httpx.Response = await client.options(CHAT, headers=headers)
    return answer


async def test_other_origins_are_refused_by_default(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("x", "length")]
    assert (await preflight(harness, ORIGIN)).status_code == 405
    body = {"model": "toy", "prompt": "x"}
    answer = await harness.post(TEXT, body, headers={"origin": ORIGIN})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", [ORIGIN, "*"])
async def test_allowed_origins(allowed: str, make_harness: Any, round_of: RoundOf) -> None:
    key = {"name": "a", "sha256": "0" * 64}
    harness = make_harness(cors_allow_origins=(allowed,), api_keys=[key])
    answer = await preflight(harness, ORIGIN)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == allowed
    assert answer.headers["access-control-max-age"] == str(CORS_MAX_AGE_S)
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    # The page can read errors too: here it has sent no key.
    answer = await harness.post(TEXT, {}, headers={"origin": ORIGIN})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == allowed
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert set(exposed) == {"x-request-id", "x-paceline-trace-id", "retry-after"}
    other = await preflight(harness, "https://evil.example.com")
    assert other.headers.get("access-control-allow-origin") == ("*" if allowed == "*" else None)


@pytest.mark.parametrize(
    "origins",
    ["https://a.example", ["https://a.example/"], ["a.example"], ["ftp://a.example"], [""], [5],
     ["null"], ["https://*.example"], ["https://A.example"], ["https://a.example:port"],
     ["https://a.example"] * 65],
)  # fmt: skip
def test_origins_that_are_none(origins: Any) -> None:
    with pytest.raises(ValidationError):
        GatewayConfig(cors_allow_origins=origins)


def test_origins_of_every_kind() -> None:
    origins = ("http://localhost:3000", "https://a-b.example", "http://[::1]:8080", "*")
    assert GatewayConfig(cors_allow_origins=origins).cors_allow_origins == origins
    assert len(GatewayConfig(cors_allow_origins=["*"] * 64).cors_allow_origins) == 64
