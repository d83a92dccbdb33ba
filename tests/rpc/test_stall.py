"""A draft whose engine hangs while its event loop answers pings: its sequences are taken away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline.config import AppConfig
from paceline.draft.driver import DraftDriver
from paceline.engine.base import StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.target.driver import TargetDriver
from tests.rpc import fleet

SETTINGS = fleet.with_rpc(
    fleet.config(),
    stall_timeout_s=0.4,
    breaker_failures=1,
    breaker_min_s=0.05,
    breaker_max_s=0.2,
    peer_timeout_s=600.0,
)


class HangingEngine(ToyEngine):
    """Its passes hang while `runs` is not set."""

    def __init__(self) -> None:
        super().__init__(fleet.INFO)
        self.runs = threading.Event()
        self.runs.set()

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        self.runs.wait()
        return super().step(items)


@asynccontextmanager
async def hanging_draft(
    settings: AppConfig, target: TargetDriver
) -> AsyncIterator[tuple[HangingEngine, DraftDriver]]:
    engine = HangingEngine()
    driver = DraftDriver(EngineWorker(engine), settings.draft, settings.rpc, "hangs", "boot")
    async with driver:
        driver.set_targets([target.server.address])
        await fleet.until(lambda: target.num_links == 1)
        try:
            yield engine, driver
        finally:
            engine.runs.set()


async def exact(target: TargetDriver, seed: int) -> int:
    """Three requests at a time, exact texts; how many proposals were accepted."""
    wanted = [fleet.request(f"{seed}-{i}", temperature=0.8, seed=seed + i) for i in range(3)]
    got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
    assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
    return sum(fleet.accepted(deltas) for deltas in got)


async def until_drafted(target: TargetDriver) -> None:
    """On a busy machine a draft may be late for some requests, but not for all."""
    async with asyncio.timeout(60):
        while not await exact(target, 1):
            pass


async def test_plain_while_it_hangs_and_drafted_when_it_is_back() -> None:
    async with (
        fleet.target(SETTINGS) as target,
        hanging_draft(SETTINGS, target) as (engine, _),
    ):
        counts = target.scheduler.drafts.counts
        await until_drafted(target)
        engine.runs.clear()
        long = fleet.request("long", temperature=0.8, seed=9, max_tokens=480)
        flight = asyncio.create_task(fleet.collect(target, long))
        while not (counts["stalled"] and counts["dark"]):
            assert await exact(target, 1) == 0
        assert target.num_links == 1, "the stream lives: its pings are answered"
        engine.runs.set()
        while not counts["restored"]:
            await exact(target, 1)
        await until_drafted(target)
        assert fleet.tokens(await flight) == fleet.alone(long)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_sequences_go_on_with_another_draft(temperature: float) -> None:
    """breaker_min_s is long here: the hung one is dark for the rest of the test."""
    settings = fleet.with_rpc(
        SETTINGS, stall_timeout_s=0.5, breaker_failures=4, breaker_min_s=600.0, breaker_max_s=600.0
    )
    async with (
        fleet.target(settings, step_ms=20.0) as target,
        hanging_draft(settings, target) as (engine, hung),
    ):
        engine.runs.clear()
        wanted = [
            fleet.request(f"r{i}", temperature=temperature, seed=i, max_tokens=240)
            for i in range(4)
        ]
        flights = [asyncio.create_task(fleet.collect(target, one)) for one in wanted]
        await fleet.until(lambda: len(hung.table) == 4)
        async with fleet.draft(settings, target, name="well") as well:
            got = await asyncio.gather(*flights)
            assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
            assert all(fleet.accepted(deltas) > 0 for deltas in got)
            counts = target.scheduler.drafts.counts
            assert counts["stalled"] >= 4
            assert target.scheduler.drafts.pool.breaker_states()["hangs"] == "dark"
            assert hung.table.stats.num_opened == 4, "nothing goes back to it"
            assert well.table.stats.num_opened >= 4
