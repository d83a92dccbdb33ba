"""GET /fleet: what the Controllers know, for people and tools. Knows no Ray.

A gateway serves without it: a Controller may be gone while requests are answered.
"""

# No `from __future__ import annotations` here: FastAPI reads the routes' annotations as classes.

import asyncio
from collections.abc import Mapping
from typing import Protocol

from fastapi import FastAPI

from paceline.errors import RequestError
from paceline.gateway.responses import Json

FLEET_TIMEOUT_S = 2.0


class FleetClient(Protocol):
    """The Controller of one served model."""

    async def status(self) -> Json | None:
        """None when it cannot be reached. May take long; never raises."""


class FleetView:
    """The controllers of the served models, by model; the first one's answer is on top, too. All
    who ask at a time share one question."""

    def __init__(
        self, clients: Mapping[str, FleetClient], timeout_s: float = FLEET_TIMEOUT_S
    ) -> None:
        self._clients = clients
        self._timeout_s = timeout_s
        self._question: asyncio.Task[Json | None] | None = None

    async def status(self) -> Json:
        """Raises RequestError (503) when no controller answers in time."""
        if self._question is None:
            self._question = asyncio.ensure_future(self._ask())
            self._question.add_done_callback(self._end_question)
        answer = await asyncio.shield(self._question)
        if answer is None:
            raise RequestError(
                f"{self._silence} Requests do not need it.", None, "no_controller", 503, 1
            )
        return answer

    @property
    def _silence(self) -> str:
        return f"The controller did not answer within {self._timeout_s:g} s."

    async def _ask(self) -> Json | None:
        """None when nobody answers; of several, who does not says so in `problem`."""
        answers = await asyncio.gather(*map(self._ask_one, self._clients.values()))
        if all(answer is None for answer in answers):
            return None
        silent = {"targets": [], "drafts": [], "problem": self._silence}
        models = {
            name: silent if answer is None else answer
            for name, answer in zip(self._clients, answers, strict=True)
        }
        first = next(iter(models.values()))
        return {**first, "models": models}

    async def _ask_one(self, client: FleetClient) -> Json | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await client.status()
        except TimeoutError:
            return None

    def _end_question(self, question: asyncio.Task[Json | None]) -> None:
        self._question = None


def add_fleet_route(app: FastAPI, view: FleetView) -> None:
    """Behind the keys, as every route that is not public."""

    @app.get("/fleet")
    async def fleet() -> Json:
        return await view.status()
