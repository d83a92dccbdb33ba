"""A whole service in this process but for Ray: gateway, controller, and replicas on real gRPC.

Heartbeats are given by hand, so that a test knows what was reported when."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from paceline.config import AppConfig, GatewayConfig
from paceline.controller.fleet import Fleet
from paceline.controller.metrics import fleet_metrics
from paceline.draft.driver import DraftDriver
from paceline.draft.fleet_reporter import FleetReporter as DraftReporter
from paceline.engine.base import EngineInfo
from paceline.fleet_reports import DraftReport, TargetReport
from paceline.gateway.api import build_api
from paceline.gateway.metrics_page import MetricsPage
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta
from paceline.target.driver import TargetDriver
from paceline.target.fleet_reporter import FleetReporter as TargetReporter
from tests.rpc import fleet

INFO = EngineInfo("toy", 257, 512, 16, 512, tokenizer_hash="toy", eos_token_ids=())
MODEL = "toy"


class Stream:
    def __init__(self, rounds: AsyncIterator[RoundDelta]) -> None:
        self._rounds = rounds

    def __aiter__(self) -> AsyncIterator[RoundDelta]:
        return self._rounds

    def cancel(self) -> None:
        """Closing the iterator is enough here."""


class Targets:
    """The drivers in turn."""

    def __init__(self, drivers: list[TargetDriver]) -> None:
        self._drivers = drivers
        self._num_requests = 0

    def generate(self, request: GenerateRequest) -> Stream:
        self._num_requests += 1
        driver = self._drivers[self._num_requests % len(self._drivers)]
        return Stream(fleet.rounds(driver, request))

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        for driver in self._drivers:
            driver.abort(request_id, choice)

    async def ready(self) -> bool:
        return True


class Service:
    """`targets` and `drafts` are running; `beat` has each of them report."""

    def __init__(
        self, config: AppConfig, targets: list[TargetDriver], drafts: list[DraftDriver]
    ) -> None:
        self.targets, self.drafts = targets, drafts
        self.fleet = Fleet(config.controller)
        self.is_controller_up = True
        self._target_reporters = [
            TargetReporter(t.scheduler, t.welcome.replica_id, "boot", t.server.address)
            for t in targets
        ]
        self._draft_reporters = [DraftReporter(d.table, d.hello.replica_id, "boot") for d in drafts]
        model = ServedModel(MODEL, ToyTokenizer(), Targets(targets), INFO.max_model_len)
        self.gateway = GatewayService(
            GatewayConfig(served_model_name=MODEL, max_concurrent_requests=64),
            [model],
            clock=time.time,
            random_hex=lambda: f"{time.monotonic_ns():x}",
            random_seed=lambda: 1,
        )
        self.page = MetricsPage(self.gateway.metrics, "gateway-1", {MODEL: self})
        app = build_api(self.gateway, metrics_page=self.page)
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60)

    async def metrics(self) -> dict[str, Any] | None:
        """The controller's answer."""
        return fleet_metrics(self.fleet) if self.is_controller_up else None

    def beat(self, now_s: float) -> None:
        for target, reporter in zip(self.targets, self._target_reporters, strict=True):
            plain = reporter.report(target.num_links, now_s, target.rtt_us)
            reporter.hear(self.fleet.hear_target(TargetReport.read(plain), now_s), now_s)
        for draft, of_draft in zip(self.drafts, self._draft_reporters, strict=True):
            plain = of_draft.report(draft.connected, now_s)
            self.fleet.hear_draft(DraftReport.read(plain), now_s)

    async def complete(self, **body: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "hello there", "max_tokens": 32, **body}
        return await self.http.post("/v1/completions", json=body)

    async def scrape(self) -> str:
        answer = await self.http.get("/metrics")
        assert answer.status_code == 200
        return answer.text


@asynccontextmanager
async def serving(
    num_targets: int = 2, num_drafts: int = 2, step_ms: float = 10.0, error_rate: float = 0.2
) -> AsyncIterator[Service]:
    config = fleet.config()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        targets = [
            await enter(fleet.target(config, step_ms=step_ms, info=INFO, name=f"target-{i}"))
            for i in range(num_targets)
        ]
        drafts = [
            await enter(
                fleet.draft(config, *targets, error_rate=error_rate, info=INFO, name=f"draft-{i}")
            )
            for i in range(num_drafts)
        ]
        service = Service(config, targets, drafts)
        await enter(service.http)
        yield service
        await service.gateway.drain()
