"""Services to load: the package's own gateway over scripted targets, and one that misbehaves."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from paceline.generation import TokenOrigin
from tests.unit.gateway.conftest import FakeTargets, Harness, one_round

# A prefill's token, a round with one of two accepted, one with all three, the end.
SCRIPT = (
    one_round("H", num_speculative_tokens=2),
    one_round(
        "el",
        number=1,
        origins=(TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED),
        num_speculative_tokens=2,
        num_draft_tokens=2,
        num_accepted_tokens=1,
    ),
    one_round(
        "lo !",
        "length",
        number=2,
        origins=(TokenOrigin.ACCEPTED,) * 3 + (TokenOrigin.BONUS,),
        num_speculative_tokens=4,
        num_draft_tokens=3,
        num_accepted_tokens=3,
    ),
)
NUM_TOKENS = 7


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The URL of uvicorn with that application."""
    config = uvicorn.Config(
        app, http="h11", lifespan="off", access_log=False, log_level=None, log_config=None
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        # Without its main loop, which looks only every 0.1 s whether it should end.
        await server.startup(sockets=[sock])
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.force_exit = True
            await server.shutdown(sockets=[sock])


class Gateway:
    """The real gateway: `url`, and the fake targets that were asked."""

    def __init__(self, url: str, targets: FakeTargets) -> None:
        self.url = url
        self.targets = targets


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    harness = Harness()
    harness.targets.script = SCRIPT
    async with listening(harness.app) as url:
        yield Gateway(url, harness.targets)


# A request's body to the status and the pieces of an answer's body; None breaks the connection.
Answer = tuple[int, list[bytes | None]]
Handler = Callable[[dict[str, Any]], Awaitable[Answer]]


class ScriptedService:
    """An HTTP application that answers as `handler` says; /v1/models is `models`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.models: Answer = (200, [b'{"data": [{"id": "scripted"}]}'])
        self.handler: Handler = _hello
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        data = b""
        while True:
            message = await receive()
            data += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.headers.append(dict(scope["headers"]))
        if scope["path"] == "/v1/models":
            status, pieces = self.models
        else:
            self.bodies.append(json.loads(data) | {"path": scope["path"]})
            status, pieces = await self.handler(self.bodies[-1])
        await send({"type": "http.response.start", "status": status, "headers": []})
        for piece in pieces:
            if piece is None:
                raise ConnectionAbortedError
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def text_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "delta": {"content": text}}]})


DONE = event(b"[DONE]")


async def _hello(body: dict[str, Any]) -> Answer:
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    return 200, [text_event("Hel"), text_event("lo"), event(usage), DONE]


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedService]:
    service = ScriptedService()
    async with listening(service) as service.url:
        yield service
