"""Bodies that must be refused: the right 4xx, one sentence, nothing started, nothing echoed."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.gateway.sentences import REASONS, UNKNOWN_REASON
from tests.unit.gateway.malformed_bodies import BIG, BODIES, CHAT, TEXT, chat, text


@pytest.mark.parametrize(("path", "body", "param", "code"), BODIES)
async def test_refused_with_a_sentence(
    path: str,
    body: Any,
    param: str | None,
    code: str,
    harness: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await harness.post(path, body)
    assert answer.status_code == 400
    assert_no_traceback(answer.text, caplog)
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


def assert_no_traceback(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither for the client nor for whoever reads the log."""
    assert "Traceback" not in answer
    traced = [record for record in caplog.records if record.exc_info or record.stack_info]
    assert traced == []
    assert "Traceback" not in caplog.text


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


TEN_MB = 10 * 1000 * 1000
LARGE = {
    "a prompt": (TEXT, json.dumps(text(prompt="x" * TEN_MB)).encode()),
    "messages": (CHAT, json.dumps(chat(messages=[{"role": "user"}] * (TEN_MB // 16))).encode()),
    "numbers": (TEXT, b'{"prompt":[' + b"1," * (TEN_MB // 2) + b"1]}"),
    "names": (TEXT, b"{" + b",".join(b'"%x":1' % i for i in range(TEN_MB // 10)) + b"}"),
    "brackets": (TEXT, b"[" * TEN_MB),
    "no UTF-8": (TEXT, b"\xff" * TEN_MB),
    "no number": (TEXT, b'{"seed":' + b"9" * TEN_MB + b"}"),
}


@pytest.mark.parametrize("is_allowed", [False, True])
@pytest.mark.parametrize("name", LARGE)
async def test_ten_megabytes(
    name: str, is_allowed: bool, make_harness: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Too large by default; where it is allowed, it is as wrong as a small one."""
    caplog.set_level(logging.DEBUG)
    harness = make_harness(**{"max_body_bytes": 2 * TEN_MB} if is_allowed else {})
    path, body = LARGE[name]
    assert len(body) > 0.9 * TEN_MB
    answer = await harness.post(path, body)
    assert answer.status_code == (400 if is_allowed else 413)
    error = answer.json()["error"]
    assert is_allowed or error["code"] == "body_too_large"
    assert 10 < len(error["message"]) <= 200
    assert error["message"].endswith(".")
    assert_no_traceback(answer.text, caplog)
    assert harness.targets.requests == []
    assert await harness.is_idle()


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
