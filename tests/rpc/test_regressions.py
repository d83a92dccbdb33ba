"""One test for each bug that a hostile tester found around the drivers."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from paceline.config import AppConfig
from paceline.draft.driver import DraftDriver
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.errors import RequestError
from paceline.protocol.messages import Nack, OpenSession
from paceline.rpc.client import dial
from paceline.rpc.errors import StreamLost
from paceline.target.driver import TargetDriver
from paceline.target.scheduler import Scheduler
from tests.rpc import fleet
from tests.rpc.test_misdeeds import HELLO, ok


async def test_a_prompt_that_no_message_can_carry_runs_without_a_draft() -> None:
    settings = AppConfig.model_validate(
        {**fleet.config().model_dump(), "rpc": {"max_message_bytes": 65536}}
    )
    info = dataclasses.replace(fleet.INFO, max_model_len=100_000, num_blocks=8000)
    async with (
        fleet.target(settings, info=info) as target,
        fleet.draft(settings, target, info=info) as draft,
    ):
        wanted = fleet.request("long", prompt=(1,) * 70_000, max_tokens=2)
        assert len(fleet.tokens(await fleet.collect(target, wanted))) == 2
        assert draft.table.stats.num_opened == 0
        after = fleet.request("short", temperature=0.8, seed=1)
        deltas = await fleet.collect(target, after)
        assert fleet.accepted(deltas) > 0


class BrokenScheduler(Scheduler):
    """Plans nothing but trouble once it has a sequence."""

    def plan(self, now_us: int):  # type: ignore[no-untyped-def]
        if self.num_running:
            raise ZeroDivisionError("planted")
        return super().plan(now_us)


async def test_requests_fail_at_once_when_the_pass_loop_ends() -> None:
    settings = fleet.config()
    async with fleet.target(settings) as target:
        target.scheduler = BrokenScheduler(
            target.worker.info, settings.target, settings.speculation, settings.rpc
        )
        for name in ("first", "second"):
            with pytest.raises(RequestError) as caught:
                await fleet.collect(target, fleet.request(name))
            assert caught.value.status == 503
        with pytest.raises(RuntimeError, match="not running"):
            target.check_health()


async def test_a_draft_refuses_what_its_cache_cannot_hold() -> None:
    settings = fleet.config()
    small = dataclasses.replace(fleet.INFO, num_blocks=4)
    async with (
        fleet.target(settings, step_ms=10) as target,
        fleet.draft(settings, target, info=small) as draft,
    ):
        wanted = fleet.request("r", prompt=(1,) * 90, max_tokens=60)
        assert fleet.tokens(await fleet.collect(target, wanted)) == fleet.alone(wanted)
        assert draft.table.stats.num_evicted == 0
        assert draft.table.stats.num_busy > 0


async def test_stop_waits_for_the_links() -> None:
    settings = fleet.config()
    async with fleet.target(settings) as target:
        worker = EngineWorker(ToyEngine(fleet.INFO))
        driver = DraftDriver(worker, settings.draft, settings.rpc, "d", "b")
        await driver.start()
        driver.set_targets([target.server.address])
        await fleet.until(lambda: target.num_links > 0)
        await driver.stop()
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert not [name for name in names if name.startswith("paceline-link")]


async def flood(target: TargetDriver) -> str:
    """Answer every message with 500 Nacks, which make a target repeat itself; how it ends."""
    settings = fleet.config()
    async with dial(target.server.address, settings.rpc, HELLO) as (_, stream):
        nack = None
        try:
            while True:
                for message in await stream.receive():
                    if isinstance(message, OpenSession):
                        stream.send(ok(message))
                        have_len = len(message.token_ids)
                        nack = Nack(message.session_id, message.epoch, have_len)
                if nack is not None:
                    for _ in range(500):
                        stream.send(nack)
        except StreamLost as lost:
            return str(lost)


async def test_a_flood_costs_the_draft_its_stream() -> None:
    settings = fleet.config()
    async with fleet.target(settings) as target:
        rogue = asyncio.create_task(flood(target))
        await fleet.until(lambda: target.num_links == 1)
        wanted = [fleet.request(f"r{i}", temperature=0.8, seed=i, max_tokens=200) for i in range(4)]
        got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        assert target.scheduler.drafts.counts["flood"] > 0
        async with asyncio.timeout(60):
            assert "too many broken rules" in await rogue
