"""A real gateway over toy models in this process, and a real browser."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from paceline.config import (
    ApiKeyConfig,
    GatewayConfig,
    ModelConfig,
    Offer,
    SpeculationConfig,
    TargetConfig,
)
from paceline.engine.loader import load_engine
from paceline.errors import RequestError
from paceline.gateway.api import build_api
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta
from paceline.testing.loopback import Loopback
from tests.fuzz.http import LoopbackStream, LoopbackTargets

MAX_LEN = 160


class StagedTargets(LoopbackTargets):
    """The toy target and draft, several requests at a time. Every stream waits before its round
    `holds_at` until `go` is set, and fails there if `failure` says how."""

    def __init__(self, max_model_len: int, has_heads: bool = False) -> None:
        super().__init__(True, max_model_len)
        if has_heads:
            self._add_heads()
        self.holds_at: int | None = None
        self.failure: RequestError | None = None
        self.go = asyncio.Event()
        self.aborted = threading.Event()
        self.requests: list[GenerateRequest] = []

    def _add_heads(self) -> None:
        """The toy's heads, which propose trees."""
        model = ModelConfig(max_model_len=self.engine.info.max_model_len, num_kv_blocks=256)
        draft = load_engine(model.model_copy(update={"toy_error_rate": 0.2}))
        self.engine = load_engine(model, medusa="toy")
        config = TargetConfig(model=model, medusa="toy")
        self.loopback = Loopback(self.engine, draft, SpeculationConfig(), config)

    def generate(self, request: GenerateRequest) -> StagedStream:
        self.requests.append(request)
        stream = StagedStream(self, LoopbackStream(self.loopback, request))
        self._streams[request.request_id] = stream.inner
        return stream

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        await super().abort(request_id, choice)
        self.aborted.set()

    async def pass_round(self, number: int) -> None:
        if number == self.holds_at:
            await self.go.wait()
            if self.failure is not None:
                raise self.failure


class StagedStream:
    def __init__(self, targets: StagedTargets, inner: LoopbackStream) -> None:
        self._targets = targets
        self.inner = inner

    async def __aiter__(self) -> AsyncIterator[RoundDelta]:
        number = 0
        async for delta in self.inner:
            await self._targets.pass_round(number)
            yield timed(delta)
            number += 1

    def cancel(self) -> None:
        self.inner.cancel()


def timed(delta: RoundDelta) -> RoundDelta:
    """With times, which toys in one process do not have; each round has its own."""
    times: dict[str, Any] = {
        "wire_back_ms": 0.5,
        "rewind_ms": 0.4,
        "draft_ms": 2.0 * delta.num_draft_tokens,
        "wire_out_ms": 1.5,
        "window_ms": 0.8,
        "queue_ms": 1.0 + delta.round % 3,
        "verify_ms": 20.0,
        "sample_ms": 0.5,
    }
    return replace(delta, wall_ms=sum(times.values()), **times)


class Site:
    """One gateway on a port of its own. The draft errs in a fifth of all contexts. `offers`: what
    each served model is said to have; all are one target, which has what any of them needs."""

    def __init__(
        self,
        keys: tuple[ApiKeyConfig, ...] = (),
        max_len: int | None = None,
        offers: Mapping[str, Offer] | None = None,
        **config: Any,
    ) -> None:
        numbers = itertools.count()
        max_len = max_len or MAX_LEN
        offers = offers or {"toy": Offer()}
        has_heads = any(offer.has_heads for offer in offers.values())
        self.targets = StagedTargets(max_len, has_heads)
        # Held streams are silent for as long as a test likes.
        settings = {"target_silence_s": 60.0, "api_keys": keys} | config
        self.service = GatewayService(
            GatewayConfig(**settings),
            [
                ServedModel(name, ToyTokenizer(), self.targets, max_len, offer=offer)
                for name, offer in offers.items()
            ],
            clock=lambda: 1_700_000_000.0,
            random_hex=lambda: f"{next(numbers):x}",
            random_seed=lambda: 7,
        )
        self._app = build_api(self.service)
        self.commented = threading.Event()
        server_config = uvicorn.Config(
            self._watched,
            host="127.0.0.1",
            port=0,
            log_level="warning",
            ws="none",
            interface="asgi3",
        )
        self._server = uvicorn.Server(server_config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.url = ""

    async def _watched(self, scope: Any, receive: Any, send: Any) -> None:
        """The app; tells when it has sent a comment."""

        async def told(message: Any) -> None:
            await send(message)
            if message.get("body", b"").startswith(b":"):
                self.commented.set()

        await self._app(scope, receive, told)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        startup = self._server.startup

        async def told(sockets: Any = None) -> None:
            await startup(sockets)
            self._started.set()

        self._server.startup = told  # type: ignore[method-assign]
        await self._server.serve()

    def release(self) -> None:
        """Let the held streams go on."""
        self._loop.call_soon_threadsafe(self.targets.go.set)

    def break_connections(self) -> None:
        """As when the machine goes away: not even an end of the stream is sent."""

        def cut() -> None:
            for connection in self._server.server_state.connections:
                connection.transport.abort()

        self._loop.call_soon_threadsafe(cut)

    def __enter__(self) -> str:
        self._thread.start()
        assert self._started.wait(20), "the server did not start"
        [socket, *_] = self._server.servers[0].sockets
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        return self.url

    def __exit__(self, *_: object) -> None:
        self.release()
        self._server.should_exit = True
        self._thread.join(20)


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    with Site() as url:
        yield url


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        if os.environ.get("PACELINE_BROWSER") == "required":
            pytest.fail("no Chromium: run `make browser`")
        pytest.skip("no Chromium: run `make browser`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


class Watched:
    """A page, its streams, and everything that went wrong on it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.strangers: list[str] = []
        self.answers: list[Any] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._ask(request.url, url))
        self.page.on("response", self._keep)
        self.page.goto(url)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _ask(self, asked: str, url: str) -> None:
        if not asked.startswith((url, "data:")):
            self.strangers.append(asked)

    def _keep(self, response: Any) -> None:
        if response.url.endswith("/v1/chat/completions"):
            self.answers.append(response)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    opened: list[Watched] = []

    def open_(url: str, **options: Any) -> Watched:
        opened.append(Watched(browser, url, **options))
        return opened[-1]

    yield open_
    for watched in opened:
        watched.context.close()
