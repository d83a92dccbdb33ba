"""A real gateway over toy models in this process, and a real browser."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from paceline.config import ApiKeyConfig, GatewayConfig
from paceline.gateway.api import build_api
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from tests.fuzz.http import LoopbackTargets

MAX_LEN = 160


class Site:
    """One gateway on a port of its own. The draft errs in a fifth of all contexts."""

    def __init__(self, keys: tuple[ApiKeyConfig, ...] = ()) -> None:
        numbers = itertools.count()
        service = GatewayService(
            GatewayConfig(api_keys=keys),
            [ServedModel("toy", ToyTokenizer(), LoopbackTargets(True, MAX_LEN), MAX_LEN)],
            clock=lambda: 1_700_000_000.0,
            random_hex=lambda: f"{next(numbers):x}",
            random_seed=lambda: 7,
        )
        config = uvicorn.Config(
            build_api(service), host="127.0.0.1", port=0, log_level="warning", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        startup = self._server.startup

        async def told(sockets: Any = None) -> None:
            await startup(sockets)
            self._started.set()

        self._server.startup = told  # type: ignore[method-assign]
        await self._server.serve()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._started.wait(20), "the server did not start"
        [socket, *_] = self._server.servers[0].sockets
        return f"http://127.0.0.1:{socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
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
    """A page, and everything that went wrong on it."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.strangers: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._ask(request.url, url))
        self.page.goto(url)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _ask(self, asked: str, url: str) -> None:
        if not asked.startswith((url, "data:")):
            self.strangers.append(asked)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    opened: list[Watched] = []

    def open_(url: str, **options: Any) -> Watched:
        opened.append(Watched(browser, url, **options))
        return opened[-1]

    yield open_
    for watched in opened:
        watched.context.close()
