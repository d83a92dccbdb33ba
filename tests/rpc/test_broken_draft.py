"""A draft whose engine is gone (a lost rank) hangs up and is replaced; nobody waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.draft.driver import DraftDriver
from paceline.engine.base import EngineBroken, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from tests.rpc import fleet


class BreakingEngine(ToyEngine):
    """Does `num_steps` passes, then never one again."""

    num_steps = 12

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if self.num_steps == 0:
            raise EngineBroken("a rank was lost")
        self.num_steps -= 1
        return super().step(items)


async def test_a_broken_draft_hangs_up_and_stays_away() -> None:
    settings = fleet.config()
    wanted = fleet.request("one", max_tokens=96)
    async with fleet.target(settings) as target:
        worker = EngineWorker(BreakingEngine(fleet.INFO))
        driver = DraftDriver(worker, settings.draft, settings.rpc, "draft", "draft-boot")
        async with driver:
            driver.set_targets([target.server.address])
            await fleet.until(lambda: target.num_links == 1)
            deltas = await fleet.collect(target, wanted)
            await fleet.until(lambda: target.num_links == 0)
            driver.set_targets([target.server.address])  # the next heartbeat's answer
            assert driver.connected == ()
            with pytest.raises(RuntimeError, match="EngineBroken"):
                driver.check_health()
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert fleet.accepted(deltas) > 0
        await fleet.until_free(target)
