"""A draft whose engine is gone (a lost rank) hangs up and is replaced; nobody waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline.draft.driver import DraftDriver
from paceline.engine.base import EngineBroken, OutOfBlocks, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.target.driver import TargetDriver
from tests.rpc import fleet


class BreakingEngine(ToyEngine):
    """Does `num_steps` passes, then never one again."""

    num_steps = 12

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if self.num_steps == 0:
            raise EngineBroken("a rank was lost")
        self.num_steps -= 1
        return super().step(items)


@asynccontextmanager
async def pair(engine: ToyEngine) -> AsyncIterator[tuple[TargetDriver, DraftDriver]]:
    """A target and a draft with this engine, connected."""
    settings = fleet.config()
    async with fleet.target(settings) as target:
        worker = EngineWorker(engine)
        driver = DraftDriver(worker, settings.draft, settings.rpc, "draft", "draft-boot")
        async with driver:
            driver.set_targets([target.server.address])
            await fleet.until(lambda: target.num_links == 1)
            yield target, driver


async def test_a_broken_draft_hangs_up_and_stays_away() -> None:
    wanted = fleet.request("one", max_tokens=96)
    async with pair(BreakingEngine(fleet.INFO)) as (target, driver):
        deltas = await fleet.collect(target, wanted)
        await fleet.until(lambda: target.num_links == 0)
        driver.set_targets([target.server.address])  # the next heartbeat's answer
        assert driver.connected == ()
        with pytest.raises(RuntimeError, match="EngineBroken"):
            driver.check_health()
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert fleet.accepted(deltas) > 0
        await fleet.until_free(target)


class FullOnceEngine(ToyEngine):
    """Its cache is full in one pass, as when other sequences have grown meanwhile."""

    num_passes_before = 12

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        self.num_passes_before -= 1
        if self.num_passes_before == 0:
            raise OutOfBlocks("full")
        return super().step(items)


async def test_a_full_draft_gives_a_sequence_up_and_gets_it_back() -> None:
    """The target must hear of it, or it would count on this draft to the end of the text."""
    wanted = fleet.request("one", max_tokens=160)
    async with pair(FullOnceEngine(fleet.INFO)) as (target, driver):
        deltas = await fleet.collect(target, wanted)
        counts = target.scheduler.drafts.counts
        assert driver.table.stats.num_evicted == 1
        assert (counts["given_up"], counts["reopened"]) == (1, 1)
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert fleet.accepted(deltas[-20:]) > 0  # drafted again
        await fleet.until_free(target)
