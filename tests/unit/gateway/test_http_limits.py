"""What a client may send at all: raw bytes to a real server, then every limit of the edge."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn

from paceline.config import GatewayConfig
from paceline.errors import OverloadedError, RequestError
from paceline.gateway.http import RETRY_AFTER_S, error_response
from paceline.gateway.openai import MAX_NAMES
from paceline.gateway.sentences import UNKNOWN_REASON, reason
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = b'{"model":"toy","prompt":"hi"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": "hi"} | fields


def said(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": list(messages)} | fields


def chat(**fields: Any) -> dict[str, Any]:
    return said({"role": "user", "content": "hi"}, **fields)


@contextlib.asynccontextmanager
async def listening(app: Any, http: Any) -> AsyncIterator[int]:
    """The port of uvicorn, set up as Serve sets it up."""
    config = uvicorn.Config(
        app, http=http, lifespan="off", access_log=False, log_level=None, log_config=None
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.ensure_future(server.serve(sockets=[sock]))
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task


async def exchange(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """One request's status, headers and body; the connection is closed after them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
        body = b""
        if not data.startswith(b"HEAD") and "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body
    finally:
        writer.close()


def with_length(body: bytes, num_bytes: int | None = None) -> bytes:
    length = len(body) if num_bytes is None else num_bytes
    return HEAD + b"Content-Length: %d\r\n\r\n" % length + body


def in_chunks(*chunks: bytes) -> bytes:
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + coded


RAW: list[tuple[str, bytes, int, str | None]] = [
    ("whole", with_length(BODY), 200, None),
    ("in chunks", in_chunks(BODY[:5], BODY[5:], b""), 200, None),
    ("chunks beyond the limit, no end", in_chunks(*[b" " * 1024] * 3), 413, "body_too_large"),
    ("a length beyond the limit, no body", with_length(b"", 2049), 413, "body_too_large"),
    ("an absurd length", with_length(b"", 10**15), 413, "body_too_large"),
    ("less than its length", with_length(BODY, len(BODY) + 1), 408, "body_timeout"),
    ("chunks without an end", in_chunks(BODY), 408, "body_timeout"),
    ("headers too large", HEAD + b"X-A: " + b"y" * 2048 + b"\r\n\r\n", 431, "headers_too_large"),
    ("many headers", HEAD + b"X: y\r\n" * 1024 + b"\r\n", 431, "headers_too_large"),
]


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_raw_requests(http: str, make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_body_bytes=2048, max_header_bytes=2048, body_timeout_s=0.5)
    harness.targets.script = [round_of("x", "length")]
    async with listening(harness.app, http) as port:
        for name, data, status, code in RAW:
            got, headers, body = await asyncio.wait_for(exchange(port, data), 30)
            assert got == status, name
            assert headers["content-type"] == "application/json", name
            if code:
                assert json.loads(body)["error"]["code"] == code, name
        # What the server itself refuses: never a 5xx, and nothing reaches us.
        for data in (
            HEAD + b"Content-Length: -5\r\n\r\n",
            HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
            HEAD + b"Content-Length: x\r\n\r\n" + BODY,
            b"garbage\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        ):
            got, headers, _ = await asyncio.wait_for(exchange(port, data), 30)
            assert (got, headers["connection"]) == (400, "close"), data
        for path in (b"/health", b"/ready"):
            got, headers, _ = await exchange(port, b"HEAD %s HTTP/1.1\r\nHost: x\r\n\r\n" % path)
            assert (got, headers["content-type"]) == (200, "application/json")
        got, headers, _ = await exchange(port, b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (got, headers["allow"]) == (405, "get")
        assert len(harness.targets.requests) == 2
    assert await harness.is_idle()


async def test_header_limit_is_exact(make_harness: Any) -> None:
    harness = make_harness(max_header_bytes=1024)
    async with harness.client() as client:
        client.headers.clear()
        request = client.build_request("GET", "/health")
        used = sum(len(name) + len(value) for name, value in request.headers.raw)
        for extra, status in ((1024 - used, 200), (1025 - used, 431)):
            answer = await client.get("/health", headers={"x": "y" * (extra - 1)})
            assert answer.status_code == status
    assert answer.json()["error"] == {
        "message": "The request's headers are larger than 1024 bytes.",
        "type": "invalid_request_error",
        "param": None,
        "code": "headers_too_large",
    }


# Bodies

DUPLICATES = [
    (TEXT, b'{"model":"toy","prompt":"a","prompt":"b"}', "prompt"),
    (TEXT, b'{"model":"toy","prompt":"a","temperature":0,"temperature":0}', "temperature"),
    (TEXT, b'{"model":"toy","prompt":"a","\\u006dodel":"toy"}', "model"),
    (TEXT, b'{"model":"toy","prompt":"a","logit_bias":{"5":1,"5":2}}', "5"),
    (TEXT, b'{"model":"toy","prompt":"a","speculation":{"mode":null,"mode":null}}', "mode"),
    (CHAT, b'{"model":"toy","messages":[{"role":"user","content":"a","role":"user"}]}', "role"),
    (CHAT, b'{"model":"toy","messages":[],"metadata":{"a":1,"a":1}}', "a"),
    (TEXT, b'{"model":"toy","prompt":"a","' + b"x" * 99 + b'":1,"' + b"x" * 99 + b'":2}',
     "x" * 61 + "..."),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "name"), DUPLICATES)
async def test_duplicate_names(path: str, body: bytes, name: str, harness: Any) -> None:
    answer = await harness.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": f"The body has '{name}' twice in one object.",
        "type": "invalid_request_error",
        "param": name,
        "code": "invalid_json",
    }


async def test_the_same_name_in_two_objects(harness: Any, round_of: RoundOf) -> None:
    harness.targets.script = [round_of("x", "length")]
    turns = [{"role": "user", "content": str(number)} for number in range(3)]
    assert (await harness.post(CHAT, said(*turns))).status_code == 200


async def test_many_names(harness: Any) -> None:
    for num, code in ((MAX_NAMES, "unknown_parameter"), (MAX_NAMES + 1, "too_many")):
        body = {str(number): 0 for number in range(num - 2)} | text()
        answer = await harness.post(TEXT, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


async def test_only_the_first_bad_message_is_looked_at(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a million complaints about one body would take seconds."""
    seen = []
    for module in ("openai", "chat"):
        monkeypatch.setattr(
            f"paceline.gateway.{module}.drop_neutral", lambda body, _: seen.append(body) or body
        )
    answer = await harness.post(CHAT, said(*[0] * 100_000))
    assert answer.json()["error"]["param"] == "messages[0]"
    assert len(seen) == 2  # the body, one message


@pytest.mark.parametrize("num_bytes", [1000, 70_000])
async def test_long_bodies_are_parsed_like_short_ones(num_bytes: int, harness: Any) -> None:
    answer = await harness.post(TEXT, text(prompt="x" * num_bytes))
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = await harness.post(TEXT, text(user="x" * num_bytes, prompt=5))
    assert answer.json()["error"]["code"] in ("unsupported_parameter", "invalid_value")
    assert await harness.is_idle()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, text(max_tokens=11), "max_tokens"),
        (CHAT, chat(max_tokens=11), "max_tokens"),
        (CHAT, chat(max_completion_tokens=11), "max_completion_tokens"),
        (CHAT, chat(max_tokens=11, max_completion_tokens=11), "max_completion_tokens"),
        (TEXT, text(max_tokens=2**31 - 1), "max_tokens"),
    ],
)
async def test_max_tokens(path: str, body: Any, param: str, make_harness: Any) -> None:
    harness = make_harness(max_tokens=10)
    answer = await harness.post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": f"'{param}' may be at most 10 here.",
        "type": "invalid_request_error",
        "param": param,
        "code": "too_many",
    }
    assert harness.targets.requests == []


async def test_max_tokens_at_the_limit(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_tokens=10)
    harness.targets.script = [round_of("x", "length")]
    for path, body in (
        (TEXT, text(max_tokens=10)),
        (TEXT, text()),
        (CHAT, chat(max_completion_tokens=10)),
        (CHAT, chat()),
    ):
        assert (await harness.post(path, body)).status_code == 200
    assert [request.max_tokens for request in harness.targets.requests] == [10] * 4


# Words


def test_kinds_that_nobody_thought_of() -> None:
    details: Any = {"type": "url_parsing", "loc": ("x",), "msg": "Input should be a valid URL"}
    assert reason(details) == UNKNOWN_REASON
    assert reason(details | {"type": "ours", "msg": "It must rhyme."}) == "It must rhyme"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (text(speculation="off"), "Invalid 'speculation': It must be an object."),
        (text(temperature="1"), "Invalid 'temperature': It must be a number."),
        (text(temperature=3), "Invalid 'temperature': It must be at most 2."),
        (text(top_p=0), "Invalid 'top_p': It must be greater than 0."),
        (text(seed=2**63), "Invalid 'seed': It must be at most 9223372036854775807."),
        (text(stream=1), "Invalid 'stream': It must be true or false."),
        (text(stop=5), "Invalid 'stop': It must be a string or a list of strings."),
        (text(speculation={"mode": "lossy"}), "Invalid 'speculation.mode': It must be 'greedy', "
         "'coupled', 'rejection' or 'block'."),
    ],
)  # fmt: skip
async def test_sentences(body: Any, message: str, harness: Any) -> None:
    assert (await harness.post(TEXT, body)).json()["error"]["message"] == message


@pytest.mark.parametrize("where", ["name", "value", "model", "nested", "path"])
async def test_what_a_client_sent_is_hardly_repeated(where: str, harness: Any) -> None:
    marker = "ZQ" * 500
    bodies = {
        "name": text(**{marker: 1}),
        "value": text(temperature=marker, user=marker, stop=[marker] * 9),
        "model": text(model=marker),
        "nested": text(speculation={marker: 1}),
    }
    if where == "path":
        answer = await harness.get(f"/v1/models/{marker}")
    else:
        answer = await harness.post(TEXT, bodies[where])
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    for shown in (error["message"], error["param"] or ""):
        assert shown.count("ZQ") * 2 <= 64


# When to come back


@pytest.mark.parametrize("status", [429, 503])
def test_every_429_and_503_says_when(status: int) -> None:
    unsaid = error_response(RequestError("no", None, None, status))
    assert unsaid.headers["retry-after"] == str(RETRY_AFTER_S)
    said_it = error_response(RequestError("no", None, None, status, 7))
    assert said_it.headers["retry-after"] == "7"
    assert "retry-after" not in error_response(RequestError("no")).headers


async def test_whoever_refuses_says_when(make_harness: Any, round_of: RoundOf) -> None:
    """All ways to a 429 or 503 through the gateway; those of targets may have forgotten it."""
    harness = make_harness(max_concurrent_requests=1, max_retries=0, ready_timeout_s=0.01)
    answers = []
    for error in (
        OverloadedError("full"),
        RequestError("lost", None, "target_lost", 503),
        RequestError("stopping", None, "stopping", 503, 3),
    ):
        harness.targets.script = [error]
        answers += [await harness.complete(), await harness.complete(stream=True)]
        await harness.service.drain()
    harness.targets.script = []  # ends without a word
    answers.append(await harness.complete())
    await harness.service.drain()
    harness.targets.readiness = False
    answers.append(await harness.get("/ready"))
    harness.service.room.num_taken += 1
    answers += [await harness.get("/ready"), await harness.complete()]
    for answer in answers:
        assert answer.status_code in (429, 503)
        assert int(answer.headers["retry-after"]) >= 1
    assert len(answers) == 10


def test_defaults_are_those_of_the_documents() -> None:
    config = GatewayConfig()
    assert (config.max_body_bytes, config.max_header_bytes) == (1 << 20, 16 << 10)
