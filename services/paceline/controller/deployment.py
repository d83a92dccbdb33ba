"""The Controller as a Serve deployment: a clock and a lock-free shell around `Registry`."""

import dataclasses
import time
from typing import Any

from paceline.config import ControllerConfig
from paceline.controller.registry import DraftReport, Registry, TargetReport


class Controller:
    """If it dies nothing stops: replicas keep their last assignment and report to the next one."""

    def __init__(self, config: ControllerConfig) -> None:
        self._registry = Registry(config.heartbeat_timeout_s, config.targets_per_draft)

    async def heartbeat_target(self, report: dict[str, Any]) -> None:
        self._registry.report_target(TargetReport(**report), time.monotonic())

    async def heartbeat_draft(self, report: dict[str, Any]) -> tuple[str, ...]:
        return self._registry.report_draft(DraftReport(**report), time.monotonic())

    async def goodbye(self, replica_id: str) -> None:
        self._registry.remove(replica_id, time.monotonic())

    async def status(self) -> dict[str, list[dict[str, Any]]]:
        """The fleet as last reported."""
        return {
            "targets": [dataclasses.asdict(report) for report in self._registry.targets()],
            "drafts": [dataclasses.asdict(report) for report in self._registry.drafts()],
        }
