"""Admission, one generation's life, and readiness: the gateway without HTTP.

Owns every generation that it starts: whatever ends it (text, stop string, client, deadline,
error), the target's stream is closed, and the target is told when it could not know by itself.
Knows no request body, no route and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from paceline.config import GatewayConfig
from paceline.errors import OverloadedError, RequestError
from paceline.gateway.assembler import Assembler, RoundText
from paceline.gateway.openai import GenerationBody
from paceline.gateway.plan import ID_PREFIXES, Endpoint, Plan, Planner
from paceline.gateway.tokenizer import Tokenizer
from paceline.generation import GenerateRequest, RoundDelta

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0


class TargetStream(Protocol):
    """The rounds of one request. RequestErrors of the target come out of the iteration as they
    are; a target that cannot be reached is a RequestError too (503)."""

    def __aiter__(self) -> AsyncIterator[RoundDelta]: ...

    def cancel(self) -> None:
        """Stop listening, at once and without waiting."""


class TargetClient(Protocol):
    """The targets, however many there are."""

    def generate(self, request: GenerateRequest) -> TargetStream: ...

    async def abort(self, request_id: str) -> None:
        """Free the request wherever it runs; unknown ids are ignored. Never raises."""

    async def ready(self) -> bool:
        """Whether a target would answer a request. May take long; never raises."""


class GatewayService:
    """One gateway process's work in progress."""

    def __init__(
        self,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        targets: TargetClient,
        max_model_len: int,
        *,
        clock: Callable[[], float],
        random_hex: Callable[[], str],
        random_seed: Callable[[], int],
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.started_s = int(clock())
        self._tokenizer = tokenizer
        self._targets = targets
        self._planner = Planner(config, tokenizer, max_model_len)
        self._clock = clock
        self._random_hex = random_hex
        self._random_seed = random_seed
        # Requests and aborts under way; at or above config.max_concurrent_requests nothing new
        # enters. Invariant: <= twice that, as a request has at most one abort.
        self.num_in_progress = 0
        self._aborts: set[asyncio.Task[None]] = set()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Room for one request, from its whole body to its answer's end. Raises OverloadedError.

        Not from its first byte: bodies that never come would keep everybody else out.
        """
        self.refuse_when_full()
        self.num_in_progress += 1
        try:
            yield
        finally:
            self.num_in_progress -= 1

    def refuse_when_full(self) -> None:
        """Raises OverloadedError while no place is free."""
        if self.num_in_progress >= self.config.max_concurrent_requests:
            raise OverloadedError(
                f"{self.num_in_progress} requests are in progress, the limit; try again.",
                None,
                "too_many_requests",
                retry_after_s=1,
            )

    async def plan(self, endpoint: Endpoint, body: GenerationBody) -> Plan:
        request_id = f"{ID_PREFIXES[endpoint]}-{self._random_hex()}"
        # Tokenizing a long prompt takes milliseconds: not on the event loop.
        return await asyncio.to_thread(self._planner.plan, body, request_id, self._random_seed())

    def assembler(self, plan: Plan) -> Assembler:
        return Assembler(self._tokenizer, plan.stop, plan.num_prompt_tokens)

    def now_s(self) -> int:
        return int(self._clock())

    async def rounds(self, plan: Plan, assembler: Assembler) -> AsyncGenerator[RoundText, None]:
        """Rounds until the answer is whole. Close it (`aclosing`): that is what frees the target.

        The last round is followed up to the end of the target's stream, so that the target has
        let go of the sequence when this ends.
        """
        stream = self._targets.generate(plan.request)
        is_over = False  # the target ended the sequence by itself
        try:
            async for delta in stream:
                if is_over:
                    raise RequestError("The target went on after its end.", None, None, 500)
                is_over = delta.finish_reason is not None
                item = assembler.receive_round(delta)
                yield item
                if item.finish_reason and not is_over:
                    return
            if not is_over:
                raise RequestError("The target was lost; try again.", None, "target_lost", 503, 1)
        except RequestError as error:
            # After the end nothing is missing: the client has its answer.
            if assembler.finish_reason is None:
                raise
            logger.warning("request %s: %s", plan.request.request_id, error.code)
        finally:
            # No await here: the caller may be in the middle of being cancelled.
            if not is_over:
                stream.cancel()
                self._begin_abort(plan.request.request_id)

    def _begin_abort(self, request_id: str) -> None:
        self.num_in_progress += 1
        task = asyncio.ensure_future(self._abort(request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._targets.abort(request_id)
        except TimeoutError:
            logger.warning("request %s: no target confirmed the abort", request_id)
        finally:
            self.num_in_progress -= 1

    async def drain(self) -> None:
        """Wait for the aborts under way; each is bounded by ABORT_TIMEOUT_S."""
        if self._aborts:
            await asyncio.wait(self._aborts)

    async def check_ready(self) -> None:
        """Raises RequestError (503) while a request would not be answered."""
        try:
            self.refuse_when_full()
        except OverloadedError as error:
            raise RequestError(error.message, None, "not_ready", 503, 1) from None
        try:
            async with asyncio.timeout(self.config.ready_timeout_s):
                is_ready = await self._targets.ready()
        except TimeoutError:
            is_ready = False
        if not is_ready:
            raise RequestError("No target is ready.", None, "not_ready", 503, 1)
