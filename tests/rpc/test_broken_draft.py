"""A draft whose engine is gone (a lost rank) hangs up and is replaced; nobody waits for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline.draft.driver import DraftDriver
from paceline.engine.base import EngineBroken, OutOfBlocks, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.protocol.messages import CloseSession, DraftMessage
from paceline.target.driver import TargetDriver
from tests.rpc import fleet


class BreakingEngine(ToyEngine):
    """Does `num_steps` passes, then never one again."""

    num_steps = 12

    def __init__(self, error: Exception) -> None:
        super().__init__(fleet.INFO)
        self._error = error

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if self.num_steps == 0:
            raise self._error
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


@pytest.mark.parametrize("error", [EngineBroken("a rank was lost"), ZeroDivisionError("planted")])
async def test_a_broken_draft_hangs_up_and_stays_away(error: Exception) -> None:
    """Also one that does not know that it is broken: no pass of its works any more."""
    wanted = fleet.request("one", max_tokens=96)
    async with pair(BreakingEngine(error)) as (target, driver):
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


class Allergic(ToyEngine):
    """Cannot do a pass with token 13 in it."""

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if any(13 in item.token_ids for item in items):
            raise ZeroDivisionError("planted")
        return super().step(items)


async def test_a_poisoned_sequence_does_not_cost_the_others_their_draft() -> None:
    # Token 13 is not to be anywhere but in the one prompt.
    law = dataclasses.replace(fleet.request("r").sampling, logit_bias=((13, -100.0),))
    wanted = [
        dataclasses.replace(
            fleet.request(f"r{start}", prompt=(start, *range(20, 40)), max_tokens=96), sampling=law
        )
        for start in (10, 11, 12, 13)
    ]
    given_up: set[int] = set()

    async with asyncio.timeout(60), pair(Allergic(fleet.INFO)) as (target, driver):
        receive = target.scheduler.drafts.receive

        def record(
            link_id: int, message: DraftMessage, now_us: int, offset_us: int | None = None
        ) -> None:
            if isinstance(message, CloseSession):
                given_up.add(message.session_id)
            receive(link_id, message, now_us, offset_us)

        target.scheduler.drafts.receive = record
        got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        assert [fleet.accepted(deltas) > 0 for deltas in got] == [True, True, True, False]
        driver.check_health()
        assert given_up == {4}
        await fleet.until_free(target)
