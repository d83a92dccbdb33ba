"""Targets and drafts on real gRPC over loopback, toy models, no Ray. For tests only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Literal

from paceline.config import AppConfig
from paceline.draft.driver import DraftDriver
from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.generation import GenerateRequest, RoundDelta, SpeculationRequest
from paceline.sampling.params import SamplingParams
from paceline.target.driver import TargetDriver

INFO = EngineInfo("toy", 64, 512, 16, 512, tokenizer_hash="toy", eos_token_ids=())
PROMPT = tuple(range(1, 24))


def config(**speculation: object) -> AppConfig:
    return AppConfig.model_validate(
        {
            "speculation": speculation,
            "rpc": {"redial_min_s": 0.02, "redial_max_s": 0.2, "ping_interval_s": 0.05},
            "draft": {"session_idle_s": 5.0},
        }
    )


def with_rpc(settings: AppConfig, **changes: object) -> AppConfig:
    """The same with other limits of the streams."""
    return settings.model_copy(update={"rpc": settings.rpc.model_copy(update=changes)})


@asynccontextmanager
async def target(
    settings: AppConfig, *, step_ms: float = 2.0, info: EngineInfo = INFO, name: str = "target"
) -> AsyncIterator[TargetDriver]:
    engine = TimedEngine(ToyEngine(info), base_ms=step_ms, row_ms=0.0)
    async with TargetDriver(EngineWorker(engine), settings, name, f"{name}-boot") as driver:
        yield driver


@asynccontextmanager
async def draft(
    settings: AppConfig,
    *targets: TargetDriver,
    error_rate: float = 0.0,
    info: EngineInfo = INFO,
    name: str = "draft",
) -> AsyncIterator[DraftDriver]:
    engine = ToyEngine(info, error_rate=error_rate)
    worker = EngineWorker(engine)
    driver = DraftDriver(worker, settings.draft, settings.rpc, name, f"{name}-boot")
    async with driver:
        driver.set_targets([target.server.address for target in targets])
        await until(lambda: len(driver.connected) == len(targets))
        for one in targets:
            await until(lambda one=one: one.num_links > 0)
        yield driver


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Give the loop turns until `condition` holds; fails loudly after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the drivers under test expose no event for it
            await asyncio.sleep(0.001)


async def until_free(driver: TargetDriver | DraftDriver) -> None:
    """Until the engine has all its KV blocks back (it frees before its next pass)."""
    async with asyncio.timeout(60):
        while await driver.worker.free_blocks(check=True) != driver.worker.info.num_blocks:
            driver.check_health()


def request(
    name: str,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_tokens: int = 64,
    draft_tokens: int | None = None,
    method: Literal["model", "off"] = "model",
    prompt: tuple[int, ...] = PROMPT,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=temperature, seed=seed),
        speculation=SpeculationRequest(method, draft_tokens),
    )


async def collect(driver: TargetDriver, wanted: GenerateRequest) -> list[RoundDelta]:
    return [delta async for delta in rounds(driver, wanted)]


async def rounds(driver: TargetDriver, wanted: GenerateRequest) -> AsyncGenerator[RoundDelta, None]:
    """Without the items that only say that the target lives."""
    async with aclosing(driver.generate(wanted)) as items:
        async for delta in items:
            if delta is not None:
                yield delta


def tokens(deltas: list[RoundDelta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


def alone(wanted: GenerateRequest, info: EngineInfo = INFO) -> tuple[int, ...]:
    """What the toy target says by itself, one token a step, no service around it."""
    engine = ToyEngine(info)
    engine.add(1)
    out: list[int] = []
    feed, start = wanted.prompt_token_ids, 0
    while len(out) < wanted.max_tokens:
        item = StepItem(1, start, feed, 1, wanted.sampling, len(out))
        start += len(feed)
        feed = engine.step([item])[0].token_ids
        out += feed
    return tuple(out)


def accepted(deltas: list[RoundDelta]) -> int:
    return sum(delta.num_accepted_tokens for delta in deltas)


def proposed(deltas: list[RoundDelta]) -> int:
    return sum(delta.num_draft_tokens for delta in deltas)
