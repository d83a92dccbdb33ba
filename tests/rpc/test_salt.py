"""A request's cache salt reaches both engines: no prompt is found under another one's."""

from __future__ import annotations

from dataclasses import replace

from paceline.draft.driver import DraftDriver
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.target.driver import TargetDriver
from tests.rpc import fleet


async def test_prompts_are_found_under_their_own_salt_at_both_ends() -> None:
    settings = fleet.config()
    target_engine, draft_engine = ToyEngine(fleet.INFO), ToyEngine(fleet.INFO)
    wanted = fleet.request("r", max_tokens=48)
    found = []
    slow = EngineWorker(TimedEngine(target_engine, base_ms=2.0, row_ms=0.0))
    async with TargetDriver(slow, settings, "t", "t-boot") as target:
        worker = EngineWorker(draft_engine)
        async with DraftDriver(worker, settings.draft, settings.rpc, "d", "d-boot") as draft:
            draft.set_targets([target.server.address])
            await fleet.until(lambda: target.num_links == 1)
            for number, salt in enumerate((0, 7, 2**64 - 1, 7)):
                before = [e.stats().num_prefix_tokens for e in (target_engine, draft_engine)]
                one = replace(wanted, request_id=f"r{number}", cache_salt=salt)
                deltas = await fleet.collect(target, one)
                assert fleet.tokens(deltas) == fleet.alone(wanted)
                await fleet.until(lambda number=number: draft.table.stats.num_opened == number + 1)
                await fleet.until_free(target)
                await fleet.until_free(draft)
                after = [e.stats().num_prefix_tokens for e in (target_engine, draft_engine)]
                found.append([a - b for a, b in zip(after, before, strict=True)])
    assert found[:3] == [[0, 0]] * 3
    assert min(found[3]) >= 16
