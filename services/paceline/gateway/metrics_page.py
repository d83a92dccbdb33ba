"""GET /metrics: this gateway process's figures, and the fleet's, as the controllers know them.

Targets and drafts report what they count with their heartbeats, so every gateway shows the same of
them; what a gateway itself counts is its own process's, told apart by the `replica` label. A
controller that does not answer costs the fleet's part of the page, which says so (`controller_up`:
only here, because only this page asks).
Knows no route and no Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from paceline.gateway.metrics import GatewayMetrics
from paceline.metrics import gateway_catalog
from paceline.metrics.catalog import OF_ROLE
from paceline.metrics.exposition import Exposition
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot, read_snapshot

# Prometheus gives a scrape 10 s by default.
METRICS_TIMEOUT_S = 2.0
Answers = Mapping[str, object]


class MetricsClient(Protocol):
    """The Controller of one served model."""

    async def metrics(self) -> Any | None:
        """`fleet_metrics` of the controller; None when it cannot be reached. Never raises."""


class MetricsPage:
    """`clients` by served model. All who ask at a time share one question to each of them."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        replica: str = "gateway",
        clients: Mapping[str, MetricsClient] | None = None,
        timeout_s: float = METRICS_TIMEOUT_S,
    ) -> None:
        self._metrics = metrics
        self._replica = replica
        self._clients = clients or {}
        self._timeout_s = timeout_s
        self._question: asyncio.Task[Answers] | None = None

    async def render(self) -> bytes:
        if self._question is None:
            self._question = asyncio.ensure_future(self._ask())
            self._question.add_done_callback(self._end_question)
        answers = await asyncio.shield(self._question)
        # Milliseconds, and more for a large fleet: not on the event loop.
        return await asyncio.to_thread(self._text, answers)

    def snapshot(self) -> Snapshot:
        """This process's own: all that is known without a question to anybody."""
        return self._metrics.snapshot()

    def _text(self, answers: Answers) -> bytes:
        page = Exposition()
        own = self.snapshot()
        for model, answer in answers.items():
            own.put(gateway_catalog.CONTROLLER_UP, answer is not None, model)
        page.add(own, {"replica": self._replica})
        for model, answer in answers.items():
            if isinstance(answer, Mapping):
                _add_fleet(page, model, answer)
        return self._metrics.render() + page.render()

    async def _ask(self) -> Answers:
        names = list(self._clients)
        answers = await asyncio.gather(*(self._ask_one(self._clients[name]) for name in names))
        return dict(zip(names, answers, strict=True))

    async def _ask_one(self, client: MetricsClient) -> object:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await client.metrics()
        except TimeoutError:
            return None

    def _end_question(self, question: asyncio.Task[Answers]) -> None:
        self._question = None


def _add_fleet(page: Exposition, model: str, answer: Mapping[str, object]) -> None:
    own = read_snapshot(answer.get("controller"), Role.CONTROLLER, OF_ROLE[Role.CONTROLLER])
    page.add(own, {"model_name": model})
    for role, kind in ((Role.TARGET, "targets"), (Role.DRAFT, "drafts")):
        replicas = answer.get(kind)
        for replica, data in replicas.items() if isinstance(replicas, Mapping) else ():
            snapshot = read_snapshot(data, role, OF_ROLE[role])
            page.add(snapshot, {"model_name": model, "replica": str(replica)})
