"""Admission, one generation's life, and readiness: the gateway without HTTP.

Owns every generation that it starts: whatever ends it (text, stop string, client, deadline,
error), the target's stream is closed, and the target is told when it could not know by itself.
A target that is lost before it sent anything is replaced by another try, under another name: but
no request may be in the pass that breaks a target more than twice.
Of a body it knows the model and how many prompts and choices there are. Knows no route and no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from paceline.config import AuditConfig, GatewayConfig
from paceline.errors import OverloadedError, RequestError
from paceline.gateway.answer import Answer
from paceline.gateway.assembler import RoundText
from paceline.gateway.audit import Auditor
from paceline.gateway.audit_metrics import fill_audit
from paceline.gateway.failover import TARGET_LOST, Failover, has_let_go, target_lost
from paceline.gateway.merge import merge
from paceline.gateway.metrics import GatewayMetrics, RequestMetrics
from paceline.gateway.openai import GenerationBody
from paceline.gateway.places import Places
from paceline.gateway.plan import (
    ID_PREFIXES,
    Endpoint,
    Plan,
    Planner,
    check_num_choices,
    model_not_found,
)
from paceline.gateway.spans import GatewayTracer
from paceline.gateway.targets import (
    ABORT_TIMEOUT_S,
    ServedModel,
    TargetClient,
    TargetStream,
    next_delta,
)
from paceline.generation import GenerateRequest
from paceline.metrics.gateway_catalog import MAX_CONCURRENT

__all__ = ["GatewayService", "ServedModel", "TargetClient", "TargetStream"]

logger = logging.getLogger(__name__)


class GatewayService:
    """One gateway process's work in progress. `models`: at least one, names distinct."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Sequence[ServedModel],
        *,
        clock: Callable[[], float],
        random_hex: Callable[[], str],
        random_seed: Callable[[], int],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        tracer: GatewayTracer | None = None,
        audit: AuditConfig | None = None,
    ) -> None:
        self.config = config
        self.models = {model.name: model for model in models}
        self.started_s = int(clock())
        self._planners = {
            model.name: Planner(
                config,
                model.tokenizer,
                model.max_model_len,
                model.name,
                model.adapter,
                model.offer,
            )
            for model in models
        }
        self._clock = clock
        self._random_hex = random_hex
        self._random_seed = random_seed
        self._sleep = sleep
        self.monotonic = monotonic
        self.tracer = tracer
        self.metrics = GatewayMetrics(self.models)
        # Choices and aborts under way: each choice of each prompt counts, as it does at a target.
        # Nothing enters beyond config.max_concurrent_requests. Invariant: <= that many times
        # 3, as a choice has one abort at most and so has a prompt.
        self.room = Places(
            config.max_concurrent_requests, "{num} requests are in progress", MAX_CONCURRENT
        )
        self.metrics.num_in_progress = lambda: self.room.num_taken
        self._aborts: set[asyncio.Task[None]] = set()
        self.audit = Auditor(
            audit or AuditConfig(),
            self.models,
            load=lambda: self.room.num_taken / config.max_concurrent_requests,
            silence_s=config.target_silence_s,
            timeout_s=config.request_timeout_s,
            random_seed=random_seed,
            sleep=sleep,
        )
        self.metrics.add_source(lambda snapshot: fill_audit(snapshot, self.audit.counts))
        # Those of lost tries, which a silent target delays. They take no place from requests.
        # Invariant: <= config.max_concurrent_requests; beyond it the closed stream has to do.
        self._lost_aborts: set[asyncio.Task[None]] = set()
        # The question under way whether a target would answer.
        self._probe: asyncio.Task[bool] | None = None

    @contextmanager
    def places(self, body: GenerationBody) -> Iterator[int]:
        """Room for one request, from its whole body to its answer's end: for so many choices.
        Raises OverloadedError; RequestError (400) for more choices than ever have room.

        Not from its first byte: bodies that never come would keep everybody else out.
        """
        num_choices = check_num_choices(self.config, body)
        with self.room.take(num_choices):
            yield num_choices

    @property
    def num_in_progress(self) -> int:
        """Places that are taken."""
        return self.room.num_taken

    def served(self, name: str) -> ServedModel:
        """Raises RequestError (404) for a model that is not served here."""
        if name not in self.models:
            raise model_not_found(name, self.models)
        return self.models[name]

    async def plans(self, endpoint: Endpoint, body: GenerationBody) -> tuple[Plan, ...]:
        """One for each prompt. Raises RequestError: 404 for an unknown model, 400 for everything
        over a limit."""
        planner = self._planners[self.served(body.model).name]
        answer_id = f"{ID_PREFIXES[endpoint]}-{self._random_hex()}"
        seeds = [self._random_seed() for _ in range(body.num_prompts)]
        # Tokenizing a long prompt takes milliseconds: not on the event loop.
        return await asyncio.to_thread(planner.plans, body, answer_id, seeds)

    def answer(self, plan: Plan) -> Answer:
        return Answer(plan, self.models[plan.model].tokenizer)

    def now_s(self) -> int:
        return int(self._clock())

    def all_rounds(
        self, plans: Sequence[Plan], answers: Sequence[Answer], arrived_s: float | None = None
    ) -> AsyncGenerator[tuple[int, RoundText], None]:
        """The `rounds` of all prompts, each with its prompt's index, as they come. What ends one
        prompt by an error ends all."""
        pairs = zip(plans, answers, strict=True)
        return merge([self.rounds(plan, answer, arrived_s) for plan, answer in pairs])

    async def rounds(
        self, plan: Plan, answer: Answer, arrived_s: float | None = None
    ) -> AsyncGenerator[RoundText, None]:
        """Rounds until the prompt's answer is whole. Close it (`aclosing`): that is what frees the
        target.

        The last round is followed up to the end of the target's stream, so that the target has
        let go of the sequences when this ends. `arrived_s` is when the request was here, by
        `monotonic`: its times are counted from there.
        """
        began_s = self.monotonic() if arrived_s is None else arrived_s
        record = RequestMetrics(self.metrics.of(plan.model), plan.request.n, answer.usage, began_s)
        sample = self.audit.begin(plan)
        try:
            async with aclosing(self._tries(plan, answer)) as rounds:
                async for item in rounds:
                    record.receive(item, self.monotonic())
                    if sample is not None:
                        sample.receive(item.delta)
                    yield item
        except Exception:
            record.end("error")
            raise
        finally:
            record.end("abort")  # nothing is open unless the client, or its time, is gone
            self.audit.end(sample)

    async def _tries(self, plan: Plan, answer: Answer) -> AsyncGenerator[RoundText, None]:
        """Where a target is lost, another one goes on: seed and tokens are the same, so is the
        text. A lost try's stream is never read again."""
        failover = Failover(plan.request, self.config.max_retries)
        request, targets = plan.request, self.models[plan.model].targets
        while True:
            try:
                async with aclosing(self._rounds_of(targets, request, answer, failover)) as rounds:
                    async for item in rounds:
                        yield item
                return
            except RequestError as error:
                attempt = failover.next_try(error)
                if attempt is None:
                    raise
                logger.warning("%s, retry %d", error.code, answer.num_retries + 1)
                self.metrics.of(plan.model).num_retries += 1
            if attempt.pause_s:
                await self._sleep(attempt.pause_s)
            answer.begin_try()
            request = attempt.request

    async def _rounds_of(
        self, targets: TargetClient, request: GenerateRequest, answer: Answer, failover: Failover
    ) -> AsyncGenerator[RoundText, None]:
        """One try."""
        stream = targets.generate(request)
        deltas = aiter(stream)
        failure: RequestError | None = None
        try:
            while (delta := await next_delta(deltas, self.config.target_silence_s)) is not None:
                item = answer.receive(failover.receive(delta))
                if item is None:
                    continue
                if item.finish_reason:
                    failover.end_choice(item.choice)
                yield item
                if answer.is_whole and not answer.is_over:
                    return
                if item.finish_reason and answer.is_at_target(item.choice):
                    # A stop string: the other choices go on.
                    self._begin_abort(targets, request.request_id, item.choice)
            if not answer.is_over:
                raise target_lost()
        except RequestError as error:
            # After the end nothing is missing: the client has its answer.
            failure = error
            if not answer.is_whole:
                raise
            logger.warning("the answer is whole, but its target ended in %s", error.code)
        finally:
            # No await here: the caller may be in the middle of being cancelled.
            if not answer.is_over and not has_let_go(failure):
                stream.cancel()
                is_lost = failure is not None and failure.code == TARGET_LOST
                self._begin_abort(targets, request.request_id, is_lost=is_lost)

    def _begin_abort(
        self,
        targets: TargetClient,
        request_id: str,
        choice: int | None = None,
        *,
        is_lost: bool = False,
    ) -> None:
        aborts = self._lost_aborts if is_lost else self._aborts
        if is_lost and len(aborts) >= self.config.max_concurrent_requests:
            logger.warning("too many aborts of lost tries: none for %s", request_id)
            return
        num_places = 0 if is_lost else 1
        self.room.num_taken += num_places
        task = asyncio.ensure_future(self._abort(targets, request_id, choice, num_places))
        aborts.add(task)
        task.add_done_callback(aborts.discard)

    async def _abort(
        self, targets: TargetClient, request_id: str, choice: int | None, num_places: int
    ) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await targets.abort(request_id, choice)
        except TimeoutError:
            logger.warning("no target confirmed the abort of %s", request_id)
        finally:
            self.room.num_taken -= num_places

    async def drain(self) -> None:
        """Stop the audit and wait for the aborts under way; each is bounded by ABORT_TIMEOUT_S."""
        await self.audit.close()
        if aborts := self._aborts | self._lost_aborts:
            await asyncio.wait(aborts)

    async def check_ready(self) -> None:
        """Raises RequestError (503) while a request would not be answered."""
        try:
            self.room.refuse_when_full()
        except OverloadedError as error:
            raise RequestError(error.message, None, "not_ready", 503, 1) from None
        # Nobody needs a key to ask: so all who ask share one question, whoever leaves.
        if self._probe is None:
            self._probe = asyncio.ensure_future(self._probe_targets())
            self._probe.add_done_callback(self._end_probe)
        if not await asyncio.shield(self._probe):
            raise RequestError("No target is ready.", None, "not_ready", 503, 1)

    async def _probe_targets(self) -> bool:
        """Every pool has a target that would answer."""
        pools = {id(model.targets): model.targets for model in self.models.values()}
        try:
            async with asyncio.timeout(self.config.ready_timeout_s):
                return all(await asyncio.gather(*(pool.ready() for pool in pools.values())))
        except TimeoutError:
            return False

    def _end_probe(self, probe: asyncio.Task[bool]) -> None:
        self._probe = None
