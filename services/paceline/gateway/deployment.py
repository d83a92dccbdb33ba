"""client -> Gateway (this ingress) -> TargetReplica: the Serve deployment around the service.

Wires and starts; decides nothing.
"""

# No `from __future__ import annotations` here: Serve looks at constructor annotations as classes.

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from paceline import models, serve_logs
from paceline.config import (
    AuditConfig,
    GatewayConfig,
    LoggingConfig,
    Offer,
    SpeculationConfig,
    TargetConfig,
    TracingConfig,
)
from paceline.gateway.api import build_api
from paceline.gateway.fleet import FleetView, add_fleet_route
from paceline.gateway.metrics_page import MetricsPage
from paceline.gateway.responses import Json
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.spans import GatewayTracer
from paceline.gateway.target_client import ServeTargetClient
from paceline.gateway.tokenizer import load_tokenizer
from paceline.gateway.tools import ToolFormat
from paceline.ray_metrics import RayExporter
from paceline.tracing.process import open_tracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolHandles:
    """One served model: its names and settings, and handles of its deployments. `draft` is never
    called: that it is bound here is what makes Serve deploy it."""

    gateway: GatewayConfig
    config: TargetConfig
    target: Any
    controller: Any
    draft: Any = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    offer: Offer = field(default_factory=Offer)


@serve.ingress()
class Gateway:
    """OpenAI's HTTP API over the targets of one application.

    `config` holds for requests to every model; what a model has for itself (its name, its chat
    template) is in its own `pools` entry. Controllers are asked for GET /fleet
    and GET /metrics only.
    """

    def __init__(
        self,
        config: GatewayConfig,
        pools: Sequence[PoolHandles],
        tracing: TracingConfig,
        audit: AuditConfig,
        logging_config: LoggingConfig,
    ) -> None:
        serve_logs.attach(logging_config)
        replica = serve.get_replica_context().replica_tag
        self._tracer = open_tracer(tracing, "paceline-gateway", {"service.instance.id": replica})
        clients = {
            pool.gateway.served_model_name: ServeFleetClient(pool.controller) for pool in pools
        }
        self._fleet = FleetView(clients)
        self._service = GatewayService(
            config,
            [model for pool in pools for model in served_models(pool)],
            clock=time.time,
            random_hex=lambda: uuid.uuid4().hex,
            random_seed=lambda: secrets.randbits(64),
            tracer=None if self._tracer is None else GatewayTracer(self._tracer, tracing),
            audit=audit,
        )
        self._page = MetricsPage(self._service.metrics, replica, clients)
        self._ray_metrics = RayExporter({"replica": replica})

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve's own HTTP server puts x-request-id on every answer.
        app = build_api(self._service, adds_request_id=False, metrics_page=self._page)
        add_fleet_route(app, self._fleet)
        lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def exporting(app: FastAPI) -> AsyncIterator[Any]:
            async with lifespan(app) as state, self._ray_metrics.running(self._page.snapshot):
                yield state

        app.router.lifespan_context = exporting
        return app

    async def __del__(self) -> None:
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def served_models(pool: PoolHandles) -> list[ServedModel]:
    """The pool's model and its adapters, which share its targets."""
    name, model = pool.gateway.served_model_name, pool.config.model
    is_builtin = model.source in models.BUILTIN_SOURCES
    source = model.source if is_builtin else str(models.resolve(model.source))
    config = pool.gateway
    named = config.tool_call_format
    tool_format = None if named == "auto" else ToolFormat(named)
    has_reasoning = {"auto": None, "think": True, "none": False}[config.reasoning_format]
    tokenizer = load_tokenizer(source, config.chat_template, tool_format, has_reasoning)
    targets = ServeTargetClient(pool.target)
    base = ServedModel(
        name,
        tokenizer,
        targets,
        model.max_model_len,
        speculation=pool.speculation,
        offer=pool.offer,
    )
    adapters = [replace(base, name=a, adapter=a, parent=name) for a in pool.config.adapters]
    return [base, *adapters]


class ServeFleetClient:
    """A `FleetClient` over `handle.status`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def status(self) -> Json | None:
        return await self._answer(self._handle.status.remote())

    async def metrics(self) -> Json | None:
        return await self._answer(self._handle.metrics.remote())

    async def _answer(self, response: Awaitable[Json]) -> Json | None:
        try:
            return await response
        except (RayError, RayServeException) as error:
            logger.info("no answer from the controller: %s", type(error).__name__)
            return None
