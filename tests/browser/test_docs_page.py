"""/docs in a real browser: it asks nobody else, and one can try the API in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn

from paceline.config import GatewayConfig
from paceline.gateway.api import build_api
from paceline.gateway.service import GatewayService, ServedModel, TargetStream
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Where a person may lack a browser, CI may not.
IS_REQUIRED = os.environ.get("PACELINE_BROWSER") == "required"


class NoTargets:
    def generate(self, request: GenerateRequest) -> TargetStream:
        raise AssertionError("nobody generates here")

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        pass

    async def ready(self) -> bool:
        return True


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    """A gateway whose targets nobody asks."""
    service = GatewayService(
        GatewayConfig(),
        [ServedModel("toy", ToyTokenizer(), NoTargets(), 64)],
        clock=lambda: 0.0,
        random_hex=lambda: "1",
        random_seed=lambda: 1,
    )
    config = uvicorn.Config(
        build_api(service), lifespan="off", access_log=False, log_level=None, log_config=None
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        task = asyncio.ensure_future(server.serve(sockets=[sock]))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task


@pytest.mark.skipif(CHROMIUM is None and not IS_REQUIRED, reason="no Chromium (make browser)")
async def test_the_page() -> None:
    from playwright.async_api import async_playwright

    asked: list[str] = []
    complaints: list[str] = []
    async with served() as base, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 390, "height": 800})
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        await page.goto(f"{base}/docs")
        await page.locator(".opblock").first.wait_for()
        assert await page.locator(".opblock").count() >= 12
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390
        # By keyboard alone.
        tokenize = page.locator("#operations-Tokens-post_tokenize")
        await tokenize.locator(".opblock-summary-control").press("Enter")
        await tokenize.locator(".try-out__btn").press("Enter")
        await tokenize.locator(".execute").press("Enter")
        live = tokenize.locator(".live-responses-table")
        await live.locator(".response-col_status").last.wait_for()
        assert '"count": 5' in await live.inner_text()
        await browser.close()
    assert complaints == []
    assert asked[-1] == f"{base}/tokenize"
    assert [url for url in asked if not url.startswith((base, "data:"))] == []
