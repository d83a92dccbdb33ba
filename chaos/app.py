"""Paceline's own application with three stand-ins, for a Serve YAML of the chaos harness.

A target tells drafts the address of a proxy that the harness controls instead of its own, and
every replica counts its asyncio tasks. Nothing else differs from `paceline.app`. Serve reads the
annotation of `build_app` as a class: no `from __future__ import annotations` here.
"""

import asyncio
import functools
import os
import time
from typing import Any

from ray.serve import Application

import paceline.app
from chaos import proxy_control
from paceline.config import AppConfig
from paceline.draft.deployment import DraftReplica
from paceline.gateway.deployment import Gateway
from paceline.target.deployment import TargetReplica

LAG_TICK_S = 0.02
PROXY_ENV = "PACELINE_CHAOS_PROXY"  # host:port where the proxy takes orders


def num_tasks() -> int:
    """Those of this replica's own loop."""
    return len(asyncio.all_tasks())


class LoopLag:
    """How long an event loop did nothing: a stall that it explains is this machine's, or a call
    that blocks."""

    def __init__(self) -> None:
        self._worst_s = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LAG_TICK_S)
            self._worst_s = max(self._worst_s, time.monotonic() - before_s - LAG_TICK_S)

    def take(self) -> float:
        """The longest since this was asked last."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s


class ChaosTarget(TargetReplica):
    """Drafts reach it through the proxy."""

    @functools.cached_property
    def _lag(self) -> LoopLag:
        return LoopLag()  # from the first question on

    async def take_lag(self) -> float:
        return self._lag.take()

    @functools.cached_property
    def address(self) -> str:  # type: ignore[override]
        control = os.environ[PROXY_ENV]
        return proxy_control.map_upstream(control, self._driver.server.address)

    async def stats(self, check: bool = False) -> dict[str, Any]:
        return {**await super().stats(check), "num_tasks": num_tasks()}


class ChaosDraft(DraftReplica):
    """Says how many tasks it has, too."""

    async def stats(self, check: bool = False) -> dict[str, Any]:
        return {**await super().stats(check), "num_tasks": num_tasks()}


class ChaosGateway(Gateway):
    """A gateway that can be asked for its sizes."""

    async def stats(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "num_in_progress": self._service.num_in_progress,
            "num_tasks": num_tasks(),
        }


def build_app(config: AppConfig) -> Application:
    """`paceline.app.build_app` with the stand-ins in place."""
    own = (paceline.app.TargetReplica, paceline.app.DraftReplica, paceline.app.Gateway)
    stand_ins = (ChaosTarget, ChaosDraft, ChaosGateway)
    try:
        _use(*stand_ins)
        return paceline.app.build_app(config)
    finally:
        _use(*own)


def _use(target: type, draft: type, gateway: type) -> None:
    paceline.app.TargetReplica = target  # type: ignore[misc]
    paceline.app.DraftReplica = draft  # type: ignore[misc]
    paceline.app.Gateway = gateway  # type: ignore[misc]
