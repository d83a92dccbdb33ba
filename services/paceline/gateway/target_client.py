"""Target replicas behind a Serve handle. The only gateway module, with the deployment, that
imports Ray; it turns Ray's failures into RequestErrors and decides nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from paceline.errors import OverloadedError, RequestError
from paceline.gateway.service import ABORT_TIMEOUT_S, TARGET_LOST, TargetStream
from paceline.generation import GenerateRequest, RoundDelta

logger = logging.getLogger(__name__)


class ServeTargetClient:
    """A `TargetClient` over `handle.generate` (a stream), `handle.abort` and `handle.ready`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._generate = handle.generate.options(stream=True)

    def generate(self, request: GenerateRequest) -> TargetStream:
        return _ServeStream(self._generate.remote(request))

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        # To every replica: Serve does not say which one runs the request, and a replica that
        # does not know the id ignores it.
        try:
            await self._handle.broadcast("abort", request_id, choice).results_async(
                timeout_s=ABORT_TIMEOUT_S, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError, RuntimeError) as error:
            logger.warning("abort of %s not confirmed: %s", request_id, type(error).__name__)

    async def ready(self) -> bool:
        response = self._handle.ready.remote()
        try:
            return bool(await response)
        except (RayError, RayServeException) as error:
            logger.info("no target is ready: %s", type(error).__name__)
            return False


class _ServeStream:
    def __init__(self, response: Any) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[RoundDelta]:
        try:
            async for delta in self._response:
                if isinstance(delta, RequestError):
                    raise delta
                yield delta
        except (RayError, RayServeException) as error:
            raise translate(error) from error

    def cancel(self) -> None:
        self._response.cancel()


def translate(error: Exception) -> Exception:
    """What the client shall hear of a failure that Ray reports: the target's own RequestError
    unwrapped, 429 for a full queue, 503 for a lost target; a bug stays an unknown error (500)."""
    was_raised_there = isinstance(error, RayTaskError)
    cause: Exception = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RequestError):
        return cause
    if isinstance(cause, BackPressureError):
        return OverloadedError("Every target is at its limit.", None, "overloaded", 429, 1)
    if was_raised_there:
        return error
    return RequestError("The target was lost; try again.", None, TARGET_LOST, 503, 1)
