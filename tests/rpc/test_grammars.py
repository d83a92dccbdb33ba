"""A grammar travels to the draft, which then proposes what the target can take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.engine.base import EngineInfo
from paceline.grammars import load_grammars
from paceline.sampling.params import SamplingParams
from tests.e2e.structured import GRAMMAR, problem, text_of
from tests.rpc import fleet

INFO = EngineInfo("toy", 257, 512, 16, 512, "toy", (256,), load_grammars("toy"))
WITHOUT = replace(INFO, grammars=None)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("info", [INFO, WITHOUT], ids=["with", "without"])
async def test_drafts_with_and_without_grammars(temperature: float, info: EngineInfo) -> None:
    law = SamplingParams(temperature, seed=3, grammar=GRAMMAR)
    wanted = replace(fleet.request("json", max_tokens=200), sampling=law)
    settings = fleet.config()
    async with fleet.target(settings, info=INFO, step_ms=10) as target:
        alone = await fleet.collect(target, replace(wanted, request_id="alone"))
        async with fleet.draft(settings, target, info=info) as draft:
            drafted = await fleet.collect(target, wanted)
            assert fleet.tokens(drafted) == fleet.tokens(alone)
            assert problem(text_of(fleet.tokens(drafted))) == ""
            assert draft.table.stats.num_opened == 1
            share = fleet.accepted(drafted) / len(fleet.tokens(drafted))
            assert (share > 0.3) == info.has_grammars
            await fleet.until_free(target)
