"""DraftReplica: a `DraftDriver` inside a Serve replica; dials the targets it is assigned."""

import contextlib
import dataclasses
import os
import uuid
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.config import AppConfig
from paceline.controller_client import HeartbeatLoop
from paceline.draft.autoscaling_stats import autoscaling_stats
from paceline.draft.driver import DraftDriver
from paceline.rank_actors import load_replica_engine

# Noise only for the draft's most likely tokens: it can cost acceptance, never
# exactness.
DRAFT_TOP_N = 64


class DraftReplica:
    """Disposable: everything it holds can be rebuilt from a target's Open."""

    # Serve awaits an async constructor, so that the replica's loop stays alive while it loads.
    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, controller: DeploymentHandle
    ) -> None:
        self._parts = contextlib.AsyncExitStack()  # what has been started, also if the rest fails
        boot_id = uuid.uuid4().hex
        self._replica_id = serve.get_replica_context().replica_tag
        self._boot_id = boot_id
        self._engine = await load_replica_engine(config.draft.model, draft_top_n=DRAFT_TOP_N)
        self._parts.push_async_callback(self._engine.stop)
        self._driver = DraftDriver(
            self._engine.worker, config.draft, config.rpc, self._replica_id, boot_id
        )
        await self._driver.start()
        self._parts.push_async_callback(self._driver.stop)
        # Undone in reverse: the goodbye, so that nobody assigns to it; then its sequences leave.
        self._parts.push_async_callback(self._driver.drain)
        self._heartbeats = HeartbeatLoop(
            config.controller.heartbeat_interval_s,
            lambda: self._report(controller),
            lambda: self._goodbye(controller),
        )
        self._parts.push_async_callback(self._heartbeats.stop)
        self._heartbeats.start()

    async def _report(self, controller: DeploymentHandle) -> None:
        addresses = await controller.heartbeat_draft.remote(
            {
                "replica_id": self._replica_id,
                "boot_id": self._boot_id,
                "pid": os.getpid(),
                "max_sessions": self._driver.table.max_sessions,
                "num_sessions": len(self._driver.table),
                "connected": self._driver.connected,
            }
        )
        self._driver.set_targets(addresses)

    async def _goodbye(self, controller: DeploymentHandle) -> None:
        await controller.goodbye.remote(self._replica_id)

    async def stats(self, check: bool = False) -> dict[str, Any]:
        """Counters and current sizes of this replica; `check` verifies the KV bookkeeping, too."""
        table = self._driver.table
        info = self._driver.worker.info
        return {
            "replica_id": self._replica_id,
            "pid": os.getpid(),
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
