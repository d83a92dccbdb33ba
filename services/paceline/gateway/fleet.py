"""GET /fleet: what the Controller knows, for people and tools. Knows no Ray.

A gateway serves without it: the Controller may be gone while requests are answered.
"""

# No `from __future__ import annotations` here: FastAPI reads the routes' annotations as classes.

import asyncio
from typing import Protocol

from fastapi import FastAPI

from paceline.errors import RequestError
from paceline.gateway.responses import Json

FLEET_TIMEOUT_S = 2.0


class FleetClient(Protocol):
    """The Controller."""

    async def status(self) -> Json | None:
        """None when it cannot be reached. May take long; never raises."""


class FleetView:
    """All who ask at a time share one question."""

    def __init__(self, client: FleetClient, timeout_s: float = FLEET_TIMEOUT_S) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._question: asyncio.Task[Json | None] | None = None

    async def status(self) -> Json:
        """Raises RequestError (503) without an answer in time."""
        if self._question is None:
            self._question = asyncio.ensure_future(self._ask())
            self._question.add_done_callback(self._end_question)
        answer = await asyncio.shield(self._question)
        if answer is None:
            raise RequestError(
                f"The controller did not answer within {self._timeout_s:g} s. Requests do not "
                "need it.",
                None,
                "no_controller",
                503,
                1,
            )
        return answer

    async def _ask(self) -> Json | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._client.status()
        except TimeoutError:
            return None

    def _end_question(self, question: asyncio.Task[Json | None]) -> None:
        self._question = None


def add_fleet_route(app: FastAPI, view: FleetView) -> None:
    """Behind the keys, as every route that is not public."""

    @app.get("/fleet")
    async def fleet() -> Json:
        return await view.status()
