"""DraftReplica: a `DraftDriver` inside a Serve replica; dials the targets it is assigned."""

import asyncio
import contextlib
import dataclasses
import os
import time
import uuid
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline import serve_logs
from paceline.config import AppConfig
from paceline.controller_client import HeartbeatLoop
from paceline.draft.autoscaling_stats import autoscaling_stats
from paceline.draft.driver import DraftDriver
from paceline.draft.fleet_reporter import FleetReporter
from paceline.rank_actors import load_replica_engine
from paceline.ray_metrics import RayExporter
from paceline.tracing.process import open_tracer, span_counts

# Noise only for the draft's most likely tokens: it can cost acceptance, never
# exactness.
DRAFT_TOP_N = 64


class DraftReplica:
    """Disposable: everything it holds can be rebuilt from a target's Open."""

    # Serve awaits an async constructor, so that the replica's loop stays alive while it loads.
    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, controller: DeploymentHandle
    ) -> None:
        serve_logs.attach(config.logging)
        self._parts = contextlib.AsyncExitStack()  # what has been started, also if the rest fails
        boot_id = uuid.uuid4().hex
        self._replica_id = serve.get_replica_context().replica_tag
        self._engine = await load_replica_engine(config.draft.model, draft_top_n=DRAFT_TOP_N)
        self._parts.push_async_callback(self._engine.stop)
        self._tracer = tracer = open_tracer(
            config.tracing, "paceline-draft", {"service.instance.id": self._replica_id}
        )
        if tracer is not None:
            self._parts.push_async_callback(asyncio.to_thread, tracer.close)
        self._driver = DraftDriver(
            self._engine.worker, config.draft, config.rpc, self._replica_id, boot_id, tracer
        )
        await self._driver.start()
        self._parts.push_async_callback(self._driver.stop)
        self._reporter = FleetReporter(self._driver.table, self._replica_id, boot_id)
        model_name = config.gateway.served_model_name
        self._ray_metrics = RayExporter({"model_name": model_name, "replica": self._replica_id})
        self._heartbeats = HeartbeatLoop(
            config.controller.heartbeat_interval_s,
            lambda: self._report(controller),
            lambda: self._goodbye(controller),
        )
        self._parts.push_async_callback(self._heartbeats.stop)
        # Undone in reverse: its sequences leave while heartbeats say that it drains, so that nobody
        # assigns to it; then comes the goodbye.
        self._parts.push_async_callback(self._drain)
        self._heartbeats.start()

    async def _report(self, controller: DeploymentHandle) -> None:
        now_s = time.monotonic()
        report = self._reporter.report(self._driver.connected, now_s)
        self._ray_metrics.offer(lambda: self._reporter.snapshot, now_s)
        addresses = await controller.heartbeat_draft.remote(report)
        if not self._driver.table.is_draining:  # it dials nobody any more
            self._driver.set_targets(addresses)

    async def _drain(self) -> None:
        self._heartbeats.hurry()  # others take its targets over from now on
        await self._driver.drain()

    async def _goodbye(self, controller: DeploymentHandle) -> None:
        await controller.goodbye.remote(self._replica_id)

    async def stats(self, check: bool = False) -> dict[str, Any]:
        """Counters and current sizes of this replica; `check` verifies the KV bookkeeping, too."""
        table = self._driver.table
        info = self._driver.worker.info
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
            **span_counts(self._tracer),
            "rank_pids": self._engine.rank_pids,
            "num_sessions": len(table),
            "connected": self._driver.connected,
            "is_draining": table.is_draining,
            "table": dataclasses.asdict(table.stats),
            "num_engine_blocks_used": info.num_blocks
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
