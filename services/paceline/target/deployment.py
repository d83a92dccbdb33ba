"""TargetReplica: a `TargetDriver` inside a Serve replica, reporting to the Controller."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline import serve_logs
from paceline.config import AppConfig, Offer
from paceline.config.live import LiveTargetConfig
from paceline.controller_client import HeartbeatLoop
from paceline.errors import RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.live_config import LiveConfig
from paceline.rank_actors import load_replica_engine
from paceline.ray_metrics import RayExporter
from paceline.target.autoscaling_stats import autoscaling_stats
from paceline.target.driver import TargetDriver
from paceline.target.fleet_reporter import FleetReporter
from paceline.target.rejection_log import open_rejection_log, rejection_counts
from paceline.target.request_log import log_generation
from paceline.tracing.process import open_tracer, span_counts

logger = logging.getLogger(__name__)

WILDCARD_HOSTS = ("0.0.0.0", "::")


class TargetReplica:
    """Owns committed tokens, KV cache, sampler and schedule of its requests."""

    # Serve awaits an async constructor, so that the replica's loop stays alive while it loads.
    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, controller: DeploymentHandle
    ) -> None:
        serve_logs.attach(config.logging)
        self._parts = contextlib.AsyncExitStack()  # what has been started, also if the rest fails
        boot_id = uuid.uuid4().hex
        replica_id = serve.get_replica_context().replica_tag
        self._engine = await load_replica_engine(
            config.target.model,
            max_pass_s=config.target.max_pass_s,
            adapters=config.target.adapters,
            medusa=config.target.medusa,
        )
        self._parts.push_async_callback(self._engine.stop)
        self._tracer = tracer = open_tracer(
            config.tracing, "paceline-target", {"service.instance.id": replica_id}
        )
        if tracer is not None:
            self._parts.push_async_callback(asyncio.to_thread, tracer.close)
        self._driver = TargetDriver(self._engine.worker, config, replica_id, boot_id, tracer)
        await self._driver.start()
        self._parts.push_async_callback(self._driver.stop)
        self._rejections = open_rejection_log(
            config.rejection_log, self._engine.worker.info.model_id
        )
        if self._rejections is not None:
            self._parts.push_async_callback(asyncio.to_thread, self._rejections.file.close)
        self._replica_id = replica_id
        self._host = config.target.host
        self._reporter = FleetReporter(self._driver.scheduler, replica_id, boot_id, self.address)
        model_name = config.gateway.served_model_name
        self._ray_metrics = RayExporter({"model_name": model_name, "replica": replica_id})
        offer = Offer.of(config.target, config.draft, config.speculation)
        self._live = LiveConfig(
            serve.get_replica_context().deployment,
            config.speculation,
            partial(LiveTargetConfig.of, offer=offer),
            self._driver.scheduler.set_speculation,
        )
        self._heartbeats = HeartbeatLoop(
            config.controller.heartbeat_interval_s,
            lambda: self._report(controller),
            lambda: self._goodbye(controller),
        )
        self._parts.push_async_callback(self._heartbeats.stop)
        self._heartbeats.start()
        logger.info("target %s serves drafts at %s", replica_id, self.address)

    @property
    def address(self) -> str:
        """host:port that a draft on another node can dial."""
        server = self._driver.server
        if self._host in WILDCARD_HOSTS:
            return f"{ray.util.get_node_ip_address()}:{server.port}"
        return server.address

    async def reconfigure(self, user_config: Any, rank: Any = None) -> None:
        """Serve calls it after the constructor, and with every change of `user_config`. (It does so
        for one that was taken away only where `rank` is asked for.) Requests in progress go on."""
        self._live.apply(user_config)
        self._reporter.config_error = self._live.error

    async def _report(self, controller: DeploymentHandle) -> None:
        now_s = time.monotonic()
        self._reporter.expire(now_s)
        report = self._reporter.report(self._driver.num_links, now_s, self._driver.rtt_us)
        self._ray_metrics.offer(lambda: self._reporter.snapshot, now_s)
        answer = await controller.heartbeat_target.remote(report)
        self._reporter.hear(answer, time.monotonic())

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncIterator[RoundDelta | RequestError | None]:
        """One item per round; None: nothing new, but the target lives. A refusal is an item, too:
        Serve logs a traceback for what is raised here, and any client could fill the log."""
        try:
            work = self._work(request)
            async with aclosing(log_generation(request, work, time.monotonic)) as deltas:
                async for delta in deltas:
                    yield delta
        except RequestError as refusal:
            yield refusal

    def _work(self, request: GenerateRequest) -> AsyncGenerator[RoundDelta | None, None]:
        if self._rejections is None:
            return self._driver.generate(request)
        return self._rejections.watch(request, self._driver.generate)

    async def abort(self, request_id: str, choice: int | None = None) -> bool:
        return self._driver.abort(request_id, choice)

    async def ready(self) -> bool:
        """True when a request would be answered now."""
        self._driver.check_health()
        return True

    async def _goodbye(self, controller: DeploymentHandle) -> None:
        await controller.goodbye.remote(self._replica_id)

    async def stats(self, check: bool = False) -> dict[str, Any]:
        """Counters and current sizes of this replica; `check` verifies the KV bookkeeping, too."""
        scheduler = self._driver.scheduler
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
            **span_counts(self._tracer),
            **rejection_counts(self._rejections),
            "rank_pids": self._engine.rank_pids,
            "scheduler": dataclasses.asdict(scheduler.stats),
            "drafts": dict(scheduler.drafts.counts),
            "breakers": scheduler.drafts.pool.breaker_states(),
            "num_links": self._driver.num_links,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "num_reserved_blocks": scheduler.info.num_blocks - scheduler.num_free_blocks,
            "num_engine_blocks_used": scheduler.info.num_blocks
            - await self._driver.worker.free_blocks(check=check),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For Serve, which asks in every metrics interval."""
        return autoscaling_stats(self._driver)

    async def check_health(self) -> None:
        self._engine.check_health()  # first: what it raises replaces this replica at once
        self._driver.check_health()

    async def __del__(self) -> None:
        await self._parts.aclose()
