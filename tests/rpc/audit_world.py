"""A gateway service over real target and draft drivers, so that its audit can be watched.

Toy models and real gRPC on loopback. Bugs are planted by subclassing engines, here and nowhere
else. For tests only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from paceline.config import AuditConfig, GatewayConfig, SpeculationConfig
from paceline.draft.driver import DraftDriver
from paceline.engine import toy_rules
from paceline.engine.base import Engine, EngineInfo, Propose, StepItem, StepResult, Verify
from paceline.engine.step_rows import draft_ids
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.toy_rules import ToyRow
from paceline.engine.worker import EngineWorker
from paceline.gateway.audit_samples import AuditCounts
from paceline.gateway.openai import CompletionBody
from paceline.gateway.plan import Endpoint
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta
from paceline.sampling.acceptance import accept_rejection
from paceline.sampling.noise import Purpose
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs
from paceline.target.driver import TargetDriver
from paceline.target.intake import living_outputs
from paceline.testing.loopback import Loopback
from tests.rpc import fleet

# Fewer ids than the tokenizer has, for speed; the last one ends a text.
VOCAB_SIZE = 48
INFO = EngineInfo(
    "toy", VOCAB_SIZE, 512, 16, 512, tokenizer_hash="toy", eos_token_ids=(VOCAB_SIZE - 1,)
)
FLOAT32_TIES = 0.001


class DraftNoise(ToyEngine):
    """Declares its law, and draws from that law's weights to the power `power`."""

    def __init__(self, info: EngineInfo, power: float, error_rate: float = 0.3) -> None:
        super().__init__(info, error_rate=error_rate)
        self._power = power

    def _decide(
        self, item: StepItem, states: Sequence[int]
    ) -> tuple[tuple[int, ...], int | None, tuple[SparseProbs, ...]]:
        tokens, num_accepted, laws = super()._decide(item, states)
        if isinstance(item.rule, Propose):
            rows = [self._row(state, item, index) for index, state in enumerate(states)]
            tokens = tuple(
                self._draw(row, law, item.rule.round) for row, law in zip(rows, laws, strict=True)
            )
        return tokens, num_accepted, laws

    def _draw(self, row: ToyRow, law: SparseProbs, round: int) -> int:
        random = Random(row.word(Purpose.DRAFT_PROPOSAL, round))
        weights = [weight**self._power for weight in law.weights]
        return random.choices(law.token_ids, weights)[0]


class OffByOne(ToyEngine):
    """Where several rows are sampled, the row behind is taken for each but the last."""

    def _decide(
        self, item: StepItem, states: Sequence[int]
    ) -> tuple[tuple[int, ...], int | None, tuple[SparseProbs, ...]]:
        shifted = [*states[1:], *states[-1:]]
        if not isinstance(item.rule, Verify):
            return super()._decide(item, shifted)
        rows: list[ToyRow] = [
            self._row(state, item, min(index + 1, len(states) - 1))
            for index, state in enumerate(shifted)
        ]
        drafts = draft_ids(item)
        accepted = toy_rules.verify(rows, drafts, item.rule)
        kept = drafts[: accepted.num_accepted_tokens]
        return (*kept, accepted.next_token_id), accepted.num_accepted_tokens, ()


class NearDraft(ToyEngine):
    """Its logits are the target's, each off by up to `spread`: it is never quite right or wrong."""

    def __init__(self, info: EngineInfo, spread: float) -> None:
        super().__init__(info)
        self._spread = spread

    def _logits(self, state: int) -> list[float]:
        random = Random(state)
        return [
            logit + random.uniform(-1.0, 1.0) * self._spread for logit in super()._logits(state)
        ]


class SharedNoise(ToyEngine):
    """A target that accepts by the very noise that the draft has drawn with."""

    def _decide(
        self, item: StepItem, states: Sequence[int]
    ) -> tuple[tuple[int, ...], int | None, tuple[SparseProbs, ...]]:
        if not isinstance(item.rule, Verify):
            return super()._decide(item, states)
        rows = [self._row(state, item, index) for index, state in enumerate(states)]
        drafts, laws = draft_ids(item), item.rule.draft_probs
        accepted = accept_rejection(
            drafts,
            laws,
            [row.probs() for row in rows],
            [_drawn_with(law, token_id) for law, token_id in zip(laws, drafts, strict=True)],
            [row.arrivals(item.rule.round) for row in rows],
        )
        kept = drafts[: accepted.num_accepted_tokens]
        return (*kept, accepted.next_token_id), accepted.num_accepted_tokens, ()


def _drawn_with(law: SparseProbs, token_id: int) -> float:
    """The middle of the noise that gives this id."""
    place = law.token_ids.index(token_id)
    return (sum(law.weights[:place]) + law.weights[place] / 2) / TOTAL_WEIGHT


class Rounding(ToyEngine):
    """The two likeliest ids of a row are nearly equal, and which is ahead depends on how many rows
    are sampled: what rounding does, only far more often."""

    def __init__(self, info: EngineInfo, error: float) -> None:
        super().__init__(info)
        self._error = error
        self._is_wide = False

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        self._is_wide = any(item.num_samples > 1 for item in items)
        return super().step(items)

    def _logits(self, state: int) -> list[float]:
        logits = super()._logits(state)
        first, second = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:2]
        logits[second] = logits[first] + (self._error if self._is_wide else -self._error)
        return logits


class Stream:
    def __init__(self, rounds: AsyncIterator[RoundDelta | None]) -> None:
        self._rounds = rounds

    def __aiter__(self) -> AsyncIterator[RoundDelta | None]:
        return self._rounds

    def cancel(self) -> None:
        """The abort that follows ends the request."""


@dataclass
class OneTarget:
    """A TargetClient over one driver, which remembers what it was asked."""

    driver: TargetDriver
    requests: list[GenerateRequest] = field(default_factory=list)

    def generate(self, request: GenerateRequest) -> Stream:
        self.requests.append(request)
        return Stream(self._rounds(request))

    async def _rounds(self, request: GenerateRequest) -> AsyncIterator[RoundDelta | None]:
        async with aclosing(self.driver.generate(request)) as rounds:
            async for delta in rounds:
                yield delta

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        self.driver.abort(request_id, choice)

    async def ready(self) -> bool:
        return True


class LockStep:
    """A TargetClient over a target and a draft in this thread, without a network or a clock: every
    window is full, and 200 requests take seconds."""

    def __init__(self, target: Engine, draft: Engine, speculation: SpeculationConfig) -> None:
        self._loopback = Loopback(target, draft, speculation)
        self._session_ids: dict[str, range] = {}
        self.requests: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest) -> Stream:
        self.requests.append(request)
        return Stream(self._rounds(request))

    async def _rounds(self, request: GenerateRequest) -> AsyncIterator[RoundDelta | None]:
        self._session_ids[request.request_id], run = self._loopback.add(request)
        num_read, open_choices = 0, set(living_outputs(request))
        while open_choices:
            while num_read == len(run.deltas):
                assert self._loopback.step(), "a request that never ends"
            delta = run.deltas[num_read]
            num_read += 1
            if delta.finish_reason is not None:
                open_choices.discard(delta.choice)
            yield delta
        del self._session_ids[request.request_id]

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        for index, session_id in enumerate(self._session_ids.get(request_id, ())):
            if choice in (None, index):
                self._loopback.scheduler.abort(session_id)

    async def ready(self) -> bool:
        return True


class World:
    """One model "toy", audited in full."""

    def __init__(
        self, targets: OneTarget | LockStep, speculation: SpeculationConfig, **audit: Any
    ) -> None:
        self.targets = targets
        self._random = Random(20)
        self.num_requests = 0
        self.num_accepted = 0
        given = {"sample_ratio": 1.0, "max_tokens": 32, "tie_tolerance": FLOAT32_TIES} | audit
        self.service = GatewayService(
            GatewayConfig(),
            [
                ServedModel(
                    "toy", ToyTokenizer(), targets, INFO.max_model_len, speculation=speculation
                )
            ],
            clock=lambda: 0.0,
            random_hex=lambda: f"{self.num_requests}",
            random_seed=lambda: self._random.getrandbits(64),
            audit=AuditConfig(**given),
        )

    @property
    def counts(self) -> AuditCounts:
        return self.service.audit.counts["toy"]

    @property
    def has_alarm(self) -> bool:
        return bool(self.counts.num_mismatches or self.counts.num_alarms)

    async def ask(self, **fields: Any) -> list[int]:
        """One request to its end; the tokens of choice 0."""
        self.num_requests += 1
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(6)]
        given = {"prompt": prompt, "max_tokens": 32} | fields
        body = CompletionBody.model_validate({"model": "toy", **given})
        with self.service.places(body):
            (plan,) = await self.service.plans(Endpoint.COMPLETIONS, body)
            answer = self.service.answer(plan)
            items = [item async for item in self.service.rounds(plan, answer)]
        self.num_accepted += answer.usage.num_accepted_tokens
        return [i for item in items if item.choice == 0 for i in item.delta.token_ids]

    async def audited(self) -> None:
        await fleet.until(lambda: self.service.audit.is_idle)

    async def until_alarm(self, num_requests: int, **fields: Any) -> int:
        """How many requests it took, one by one; fails when they raise nothing."""
        for number in range(1, num_requests + 1):
            await self.ask(**fields)
            await self.audited()
            if self.has_alarm:
                return number
        raise AssertionError(f"nothing seen in {num_requests} requests: {self.counts}")


def speculation(mode: str) -> SpeculationConfig:
    return fleet.config(mode=mode, lookahead="fixed", num_speculative_tokens=4).speculation


def lockstep(
    target: Engine | None = None, draft: Engine | None = None, mode: str = "coupled", **audit: Any
) -> World:
    """`draft` is a toy that is wrong in a third of all contexts unless given."""
    target, draft = target or ToyEngine(INFO), draft or ToyEngine(INFO, error_rate=0.3)
    return World(LockStep(target, draft, speculation(mode)), speculation(mode), **audit)


@asynccontextmanager
async def drivers(
    target: Engine | None = None, draft: Engine | None = None, mode: str = "coupled", **audit: Any
) -> AsyncIterator[World]:
    """The same over the real drivers; a pass takes 6 ms, so that the draft is in time."""
    settings = fleet.config(mode=mode, lookahead="fixed", num_speculative_tokens=4)
    worker = EngineWorker(TimedEngine(target or ToyEngine(INFO), base_ms=6.0))
    async with asyncio.timeout(100), TargetDriver(worker, settings, "t", "t-boot") as driver:
        draft_worker = EngineWorker(draft or ToyEngine(INFO, error_rate=0.3))
        async with DraftDriver(draft_worker, settings.draft, settings.rpc, "d", "d-boot") as drafts:
            drafts.set_targets([driver.server.address])
            await fleet.until(lambda: driver.num_links > 0)
            audited = World(OneTarget(driver), settings.speculation, **audit)
            yield audited
            await audited.service.drain()
            await fleet.until_free(driver)
