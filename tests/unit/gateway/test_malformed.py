"""Bodies that must be refused: the right 4xx, one sentence, nothing started, nothing echoed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.gateway.sentences import REASONS, UNKNOWN_REASON
from tests.unit.gateway.malformed_bodies import BIG, BODIES, CHAT, TEXT, chat, text


@pytest.mark.parametrize(("path", "body", "param", "code"), BODIES)
async def test_refused_with_a_sentence(
    path: str, body: Any, param: str | None, code: str, harness: Any
) -> None:
    answer = await harness.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert 10 < len(error["message"]) <= 200
    assert error["message"].endswith(".")
    for word in ("nput", "Value error", "a valid", "instance of", "Options", "Body", "pydantic"):
        assert word not in error["message"], "words of our tools"
    assert UNKNOWN_REASON not in error["message"]
    name = (param or "").split(".")[-1].split("[")[0]
    assert name in error["message"] or "The prompt" in error["message"]
    assert harness.targets.requests == []
    assert await harness.is_idle()


async def test_every_sentence_is_used(harness: Any) -> None:
    answers = [await harness.post(path, body) for path, body, _, _ in BODIES]
    messages = [answer.json()["error"]["message"] for answer in answers]
    for words in REASONS.values():
        assert any(f": {words.split('{')[0]}" in message for message in messages), words


@pytest.mark.parametrize("name", [BIG, "a\nb\x1b[31m", "ключ" * 50, ""])
async def test_echo_is_short_and_printable(name: str, harness: Any) -> None:
    for answer in (
        await harness.post(TEXT, text(**{name: 1})),
        await harness.post(TEXT, text(model=name)),
        await harness.post(TEXT, text(speculation={name: 1})),
    ):
        error = answer.json()["error"]
        assert len(error["message"]) <= 200
        assert error["message"].isprintable()
        assert (error["param"] or "").isprintable()


async def test_other_model_is_404(harness: Any) -> None:
    for path, body in ((TEXT, text(model="gpt-9")), (CHAT, chat(model="gpt-9"))):
        answer = await harness.post(path, body)
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "The model 'gpt-9' does not exist; this deployment serves 'toy'.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_too_large(is_chunked: bool, make_harness: Any) -> None:
    harness = make_harness(max_body_bytes=2048)
    num_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(10):
            num_read += 1
            yield b" " * 1024

    async with harness.client() as client:
        answer = await client.post(
            TEXT,
            content=chunks() if is_chunked else b" " * 2049,
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert num_read <= 3
    fitting = json.dumps(text()).encode()
    fitting += b" " * (2048 - len(fitting))
    harness.targets.script = [ValueError()]
    assert (await harness.post(TEXT, fitting)).status_code == 500  # read, and reached the target


@pytest.mark.parametrize("value", ["text/plain", "application/x-www-form-urlencoded", "x"])
async def test_other_media_types(value: str, harness: Any) -> None:
    answer = await harness.post(TEXT, text(), headers={"content-type": value})
    assert answer.status_code == 415
    assert answer.json()["error"]["message"] == "Content-Type must be application/json."


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_other_routes(method: str, path: str, status: int, code: str, harness: Any) -> None:
    async with harness.client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("abc-1_2.3:4", True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_request_id(sent: str, is_kept: bool, harness: Any) -> None:
    headers = {"x-request-id": sent.encode("latin-1")}
    async with harness.client() as client:
        for path in ("/health", "/nowhere"):
            answer = await client.get(path, headers=headers)
            assert (answer.headers["x-request-id"] == sent) == is_kept
            assert len(answer.headers.get_list("x-request-id")) == 1
