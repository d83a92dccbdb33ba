"""Target replicas behind a Serve handle. The only gateway module, with the deployment, that
imports Ray; it turns Ray's failures into RequestErrors and decides nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException

from paceline.errors import OverloadedError, RequestError
from paceline.gateway.failover import target_died, target_lost
from paceline.gateway.targets import ABORT_TIMEOUT_S, TargetStream
from paceline.generation import GenerateRequest, RoundDelta

logger = logging.getLogger(__name__)

# Below ABORT_TIMEOUT_S: Ray logs a traceback when its wait is cancelled, none when it is over.
CONFIRM_TIMEOUT_S = 0.8 * ABORT_TIMEOUT_S


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
                timeout_s=CONFIRM_TIMEOUT_S, return_exceptions=True
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
    """One call's items. Not an async generator: those have a state of their own, which a cancelled
    wait could leave half done."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __aiter__(self) -> AsyncIterator[RoundDelta | None]:
        return self

    async def __anext__(self) -> RoundDelta | None:
        try:
            item: RoundDelta | RequestError | None = await anext(self._response)
        except (RayError, RayServeException) as error:
            raise translate(error) from error
        except asyncio.CancelledError:
            # Serve also says this of a call that somebody else cancelled at the replica.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise target_lost() from None
        if isinstance(item, RequestError):
            raise item
        return item

    def cancel(self) -> None:
        # A call that never came to a replica raises once more what the iteration has raised.
        with contextlib.suppress(RayError, RayServeException):
            self._response.cancel()


def translate(error: Exception) -> Exception:
    """What the client shall hear of a failure that Ray reports: the target's own RequestError
    unwrapped, 429 for a full queue, 503 for a target that is gone; a bug stays an unknown error
    (500).

    `target_died`: ActorDiedError, the replica's process ended while the request was in it. (Serve
    itself sends a request elsewhere whose replica dies before accepting it.) A node that was taken
    away (`preempted`) is no fault of the request. `target_lost`: every other RayError or
    RayServeException: no connection (ActorUnavailableError; it may still run), no replica at
    all (DeploymentUnavailableError), a call that was cancelled, the cluster's own failures.
    """
    was_raised_there = isinstance(error, RayTaskError)
    cause: Exception = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RequestError):
        return cause
    if isinstance(cause, BackPressureError):
        return OverloadedError("Every target is at its limit.", None, "overloaded", 429, 1)
    if was_raised_there:
        return error
    if isinstance(cause, ActorDiedError) and not cause.preempted:
        return target_died()
    return target_lost()
