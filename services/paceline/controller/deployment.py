"""The Controller as a Serve deployment: a clock and a lock-free shell around `Fleet`."""

import time
from typing import Any

from paceline import serve_logs
from paceline.config import ControllerConfig, LoggingConfig
from paceline.config.live import LiveControllerConfig
from paceline.controller.fleet import Fleet
from paceline.controller.metrics import fleet_metrics, fleet_snapshot
from paceline.fleet_reports import DraftReport, TargetReport
from paceline.live_config import LiveConfig
from paceline.ray_metrics import RayExporter


class Controller:
    """If it dies nothing stops: replicas keep their last assignment and report to the next one."""

    def __init__(
        self, config: ControllerConfig, model_name: str, logging_config: LoggingConfig
    ) -> None:
        serve_logs.attach(logging_config)
        self._fleet = Fleet(config)
        self._ray_metrics = RayExporter({"model_name": model_name})
        self._live = LiveConfig(
            "Controller", config, LiveControllerConfig.model_validate, self._fleet.set_config
        )

    async def reconfigure(self, user_config: Any, rank: Any = None) -> None:
        """Serve calls it after the constructor, and with every change of `user_config`. (It does so
        for one that was taken away only where `rank` is asked for.)"""
        self._live.apply(user_config)

    async def heartbeat_target(self, report: dict[str, Any]) -> dict[str, Any]:
        self._export(time.monotonic())
        return self._fleet.hear_target(TargetReport.read(report), time.monotonic())

    async def heartbeat_draft(self, report: dict[str, Any]) -> tuple[str, ...]:
        self._export(time.monotonic())
        return self._fleet.hear_draft(DraftReport.read(report), time.monotonic())

    async def goodbye(self, replica_id: str) -> None:
        self._fleet.leave(replica_id, time.monotonic())

    def _export(self, now_s: float) -> None:
        self._ray_metrics.offer(lambda: fleet_snapshot(self._fleet), now_s)

    async def metrics(self) -> dict[str, Any]:
        """What it and the replicas that it knows count (`fleet_metrics`), for GET /metrics."""
        self._fleet.expire(time.monotonic())
        return fleet_metrics(self._fleet)

    async def status(self) -> dict[str, Any]:
        """The fleet as last reported (`Fleet.status`)."""
        return {**self._fleet.status(), "config_error": self._live.error}
