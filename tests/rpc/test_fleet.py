"""Promises 1, 3 and 4 of the design over real gRPC streams, with toy models."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.rpc import fleet


@pytest.mark.parametrize("draft_tokens", [1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_text_with_a_draft_is_the_text_without(temperature: float, draft_tokens: int) -> None:
    settings = fleet.config()
    async with (
        fleet.target(settings) as target,
        fleet.draft(settings, target, error_rate=0.25),
    ):
        total_accepted = 0
        for seed in range(5):
            wanted = fleet.request(
                f"s{seed}", temperature=temperature, seed=seed, draft_tokens=draft_tokens
            )
            deltas = await fleet.collect(target, wanted)
            assert fleet.tokens(deltas) == fleet.alone(wanted)
            assert max(delta.num_draft_tokens for delta in deltas) <= draft_tokens
            total_accepted += fleet.accepted(deltas)
        assert total_accepted > 0


async def test_no_draft_at_all_is_plain_decoding() -> None:
    async with fleet.target(fleet.config(), step_ms=0.0) as target:
        wanted = fleet.request("alone", temperature=0.8, seed=3)
        deltas = await fleet.collect(target, wanted)
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert len(deltas) == wanted.max_tokens


async def test_method_off_never_opens_the_draft() -> None:
    settings = fleet.config()
    async with fleet.target(settings) as target, fleet.draft(settings, target) as draft:
        deltas = await fleet.collect(target, fleet.request("off", method="off"))
        assert fleet.proposed(deltas) == 0
        assert draft.table.stats.num_opened == 0


async def test_an_equal_draft_is_accepted_whole() -> None:
    settings = fleet.config()
    async with fleet.target(settings) as target, fleet.draft(settings, target):
        wanted = fleet.request("same", temperature=0.8, seed=1, max_tokens=200)
        deltas = await fleet.collect(target, wanted)
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert fleet.accepted(deltas) == fleet.proposed(deltas) > 0


async def test_draft_lost_mid_stream_and_another_takes_over() -> None:
    settings = fleet.config()
    wanted = fleet.request("long", temperature=0.8, seed=5, max_tokens=400)
    async with fleet.target(settings) as target:
        deltas = []
        stream = fleet.rounds(target, wanted)
        async with fleet.draft(settings, target, name="first"):
            while fleet.accepted(deltas) == 0:
                deltas.append(await anext(stream))
        before = len(deltas)
        await fleet.until(lambda: target.num_links == 0)
        deltas.append(await anext(stream))
        async with fleet.draft(settings, target, name="second") as second:
            async for delta in stream:
                deltas.append(delta)
            assert second.table.stats.num_opened == 1
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert fleet.accepted(deltas[before + 1 :]) > 0


async def test_two_targets_and_two_drafts_share_the_work() -> None:
    settings = fleet.config()
    async with (
        fleet.target(settings, name="a") as a,
        fleet.target(settings, name="b") as b,
        fleet.draft(settings, a, b, name="one") as one,
        fleet.draft(settings, a, b, name="two") as two,
    ):
        await fleet.until(lambda: a.num_links == 2 and b.num_links == 2)
        wanted = [fleet.request(f"r{i}", temperature=0.8, seed=i) for i in range(8)]
        got = await asyncio.gather(
            *(fleet.collect((a, b)[i % 2], wanted[i]) for i in range(len(wanted)))
        )
        for request, deltas in zip(wanted, got, strict=True):
            assert fleet.tokens(deltas) == fleet.alone(request)
        assert one.table.stats.num_opened == two.table.stats.num_opened == 4


async def test_concurrent_seeded_requests_equal_solo_runs() -> None:
    settings = fleet.config()
    async with (
        fleet.target(settings) as target,
        fleet.draft(settings, target, error_rate=0.3),
    ):
        wanted = [fleet.request(f"r{i}", temperature=1.0, seed=i) for i in range(8)]
        got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        assert target.scheduler.stats.num_passes < 8 * 64  # they shared passes


async def test_200_aborts_leave_nothing_behind() -> None:
    settings = fleet.config()
    rng = random.Random(7)
    async with (
        fleet.target(settings, step_ms=0.5) as target,
        fleet.draft(settings, target, error_rate=0.2) as draft,
    ):

        async def leave_early(index: int) -> None:
            wanted = fleet.request(f"a{index}", temperature=0.8, seed=index)
            stream = fleet.rounds(target, wanted)
            for _ in range(rng.randrange(0, 12)):
                await anext(stream)
            await stream.aclose()

        for first in range(0, 200, 10):
            await asyncio.gather(*(leave_early(first + i) for i in range(10)))
        scheduler = target.scheduler
        await fleet.until(lambda: scheduler.num_running == scheduler.num_waiting == 0)
        await fleet.until(lambda: len(draft.table) == 0)
        await fleet.until(lambda: scheduler.num_free_blocks == fleet.INFO.num_blocks)
        await fleet.until_free(target)
        await fleet.until_free(draft)
        assert target.num_links == 1


async def test_draft_with_a_short_context_stops_by_itself() -> None:
    settings = fleet.config()
    short = fleet.EngineInfo("toy", 64, 64, 16, 512, tokenizer_hash="toy")
    async with (
        fleet.target(settings) as target,
        fleet.draft(settings, target, info=short),
    ):
        wanted = fleet.request("long", max_tokens=150)
        deltas = await fleet.collect(target, wanted)
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert deltas[-1].num_draft_tokens == 0


async def test_prompts_longer_than_a_draft_pass_are_drafted_too() -> None:
    settings = fleet.config()
    narrow = settings.model_copy(
        update={"draft": settings.draft.model_copy(update={"max_rows_per_pass": 16})}
    )
    async with fleet.target(settings) as target, fleet.draft(narrow, target) as draft:
        prompt = tuple(index % 64 for index in range(200))
        wanted = fleet.request("long prompt", prompt=prompt, max_tokens=100)
        deltas = await fleet.collect(target, wanted)
        assert fleet.tokens(deltas) == fleet.alone(wanted)
        assert fleet.accepted(deltas) > 0
        assert draft.table.stats.num_evicted == 0


async def test_a_failing_draft_model_costs_its_batch_only_the_draft() -> None:
    settings = fleet.config()
    small = fleet.EngineInfo("toy", 64, 512, 16, 4, tokenizer_hash="toy")
    async with fleet.target(settings) as target, fleet.draft(settings, target, info=small) as draft:
        wanted = [fleet.request(f"r{i}", temperature=0.8, seed=i) for i in range(4)]
        got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        assert draft.table.stats.num_evicted > 0  # 4 blocks hold no more than two sequences
        await fleet.until(lambda: len(draft.table) == 0)
        await fleet.until_free(draft)
