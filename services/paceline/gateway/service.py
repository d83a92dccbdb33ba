"""Admission, one generation's life, and readiness: the gateway without HTTP.

Owns every generation that it starts: whatever ends it (text, stop string, client, deadline,
error), the target's stream is closed, and the target is told when it could not know by itself.
A target that is lost before it sent anything is replaced by another try, under another name: but
no request may be in the pass that breaks a target more than twice.
Knows no request body's fields, no route and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Protocol

from paceline.config import GatewayConfig
from paceline.errors import OverloadedError, RequestError
from paceline.gateway.answer import Answer
from paceline.gateway.assembler import RoundText
from paceline.gateway.openai import GenerationBody
from paceline.gateway.plan import ID_PREFIXES, Endpoint, Plan, Planner
from paceline.gateway.tokenizer import Tokenizer
from paceline.generation import GenerateRequest, RoundDelta

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
# Waits before the second, third, ... other try; the first other try is made at once, because
# most often another replica is there.
RETRY_PAUSES_S = (0.1, 0.3, 1.0)
TARGET_LOST = "target_lost"
# The request was in the pass that broke its target's engine. Most often something else did it (a
# rank died), but a request that breaks whatever computes it must not go from target to target.
ENGINE_BROKEN = "engine_broken"
MAX_ENGINE_BROKEN_RETRIES = 1


class TargetStream(Protocol):
    """The rounds of one request. RequestErrors of the target come out of the iteration as they
    are; a target that cannot be reached is a RequestError too (503)."""

    def __aiter__(self) -> AsyncIterator[RoundDelta]: ...

    def cancel(self) -> None:
        """Stop listening, at once and without waiting."""


class TargetClient(Protocol):
    """The targets, however many there are."""

    def generate(self, request: GenerateRequest) -> TargetStream: ...

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """Free the request, or only one of its choices, wherever it runs; what is unknown there
        is ignored. Never raises."""

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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
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
        self._sleep = sleep
        # Choices and aborts under way: a request for n choices counts n, as it does at a target.
        # Nothing enters beyond config.max_concurrent_requests. Invariant: <= that many times
        # 3 + max_retries, as a choice has one abort at most and so has every try of a request.
        self.num_in_progress = 0
        self._aborts: set[asyncio.Task[None]] = set()

    @contextmanager
    def places(self, body: GenerationBody) -> Iterator[None]:
        """Room for one request, from its whole body to its answer's end. Raises OverloadedError;
        RequestError (400) for more choices than ever have room.

        Not from its first byte: bodies that never come would keep everybody else out.
        """
        num_choices = self._planner.check_num_choices(body)
        self.refuse_when_full(num_choices)
        self.num_in_progress += num_choices
        try:
            yield
        finally:
            self.num_in_progress -= num_choices

    def refuse_when_full(self, num_choices: int = 1) -> None:
        """Raises OverloadedError while so many places are not free."""
        limit = self.config.max_concurrent_requests
        if self.num_in_progress + num_choices > limit:
            raise OverloadedError(
                f"{self.num_in_progress} requests are in progress, of {limit} at most; each of "
                "the 'n' choices counts. Try again.",
                None,
                "too_many_requests",
                retry_after_s=1,
            )

    async def plan(self, endpoint: Endpoint, body: GenerationBody) -> Plan:
        request_id = f"{ID_PREFIXES[endpoint]}-{self._random_hex()}"
        # Tokenizing a long prompt takes milliseconds: not on the event loop.
        return await asyncio.to_thread(self._planner.plan, body, request_id, self._random_seed())

    def answer(self, plan: Plan) -> Answer:
        return Answer(plan, self._tokenizer)

    def now_s(self) -> int:
        return int(self._clock())

    async def rounds(self, plan: Plan, answer: Answer) -> AsyncGenerator[RoundText, None]:
        """Rounds until the answer is whole. Close it (`aclosing`): that is what frees the target.

        The last round is followed up to the end of the target's stream, so that the target has
        let go of the sequences when this ends. A target that is lost before its first round is
        tried again up to `max_retries` times: seed and tokens are the same, so is the text. Of
        these tries at most MAX_ENGINE_BROKEN_RETRIES follow a target that broke under it.
        """
        request = plan.request
        num_broken = 0
        for num_retries in range(1, self.config.max_retries + 2):
            try:
                async with aclosing(self._rounds_of(request, answer)) as rounds:
                    async for item in rounds:
                        yield item
                return
            except RequestError as error:
                num_broken += error.code == ENGINE_BROKEN
                is_last = answer.has_begun or num_retries > self.config.max_retries
                is_last |= num_broken > MAX_ENGINE_BROKEN_RETRIES
                if error.code not in (TARGET_LOST, ENGINE_BROKEN) or is_last:
                    raise
                logger.warning("request %s: %s, try again", request.request_id, error.code)
            if num_retries > 1:
                await self._sleep(RETRY_PAUSES_S[min(num_retries, len(RETRY_PAUSES_S) + 1) - 2])
            # Under its own name the abort of the lost try, which may still be on its way to the
            # targets, would hit this one.
            request = replace(request, request_id=f"{plan.request.request_id}~{num_retries}")

    async def _rounds_of(
        self, request: GenerateRequest, answer: Answer
    ) -> AsyncGenerator[RoundText, None]:
        """One try."""
        stream = self._targets.generate(request)
        try:
            async for delta in stream:
                item = answer.receive(delta)
                if item is None:
                    continue
                yield item
                if answer.is_whole and not answer.is_over:
                    return
                if item.finish_reason and answer.is_at_target(item.choice):
                    # A stop string: the other choices go on.
                    self._begin_abort(request.request_id, item.choice)
            if not answer.is_over:
                raise RequestError("The target was lost; try again.", None, TARGET_LOST, 503, 1)
        except RequestError as error:
            # After the end nothing is missing: the client has its answer.
            if not answer.is_whole:
                raise
            logger.warning("request %s: %s", request.request_id, error.code)
        finally:
            # No await here: the caller may be in the middle of being cancelled.
            if not answer.is_over:
                stream.cancel()
                self._begin_abort(request.request_id)

    def _begin_abort(self, request_id: str, choice: int | None = None) -> None:
        self.num_in_progress += 1
        task = asyncio.ensure_future(self._abort(request_id, choice))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, request_id: str, choice: int | None) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._targets.abort(request_id, choice)
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
