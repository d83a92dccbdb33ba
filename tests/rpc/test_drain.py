"""Drafts that leave in order: their sequences move, no text changes, no sequence stays alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import ClassVar

import pytest

from paceline.config import AppConfig
from paceline.draft.driver import DraftDriver
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.link import LinkState
from paceline.target.draft_desk import DraftDesk
from paceline.target.driver import TargetDriver
from paceline.target.sequence import Sequence
from tests.rpc import fleet

# K = 4: at most 2 K + 1 proposals are in a window, and each pass uses one up at least.
MAX_ROUNDS_ALONE = 9
# Longer than a draft's round trip on a busy machine: with passes of 1 ms proposals were too late.
STEP_MS = 10.0


def settings_for(drain_timeout_s: float) -> AppConfig:
    settings = fleet.config()
    changes = {"drain_timeout_s": drain_timeout_s}
    return settings.model_copy(update={"draft": settings.draft.model_copy(update=changes)})


def requests(num: int, temperature: float) -> list[GenerateRequest]:
    return [
        fleet.request(f"r{i}", temperature=temperature, seed=i, max_tokens=240) for i in range(num)
    ]


class Traffic:
    """Requests that are under way; `deltas` fills as they go."""

    def __init__(self, target: TargetDriver, wanted: list[GenerateRequest]) -> None:
        self.wanted = wanted
        self.deltas: list[list[RoundDelta]] = [[] for _ in wanted]
        self._tasks = [
            asyncio.create_task(self._collect(target, *pair))
            for pair in zip(wanted, self.deltas, strict=True)
        ]

    async def _collect(
        self, target: TargetDriver, request: GenerateRequest, deltas: list[RoundDelta]
    ) -> None:
        async for delta in target.generate(request):
            if delta is not None:
                deltas.append(delta)

    async def until_all_are_drafted(self) -> None:
        await fleet.until(lambda: all(fleet.accepted(deltas) for deltas in self.deltas))

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)
        texts = [fleet.tokens(deltas) for deltas in self.deltas]
        assert texts == [fleet.alone(one) for one in self.wanted]


class WatchedDesk(DraftDesk):
    """Notes for how many rounds a sequence that moves has no draft."""

    left: ClassVar[dict[int, int]] = {}
    rounds_alone: ClassVar[list[int]] = []

    def _move(self, sequence: Sequence, now_us: int) -> None:
        super()._move(sequence, now_us)
        if sequence.session.link is LinkState.LOST:
            self.left[sequence.session.session_id] = sequence.session.round

    def try_open(self, sequence: Sequence, now_us: int) -> None:
        super().try_open(sequence, now_us)
        session = sequence.session
        if session.session_id in self.left and session.link is not LinkState.LOST:
            self.rounds_alone.append(session.round - self.left.pop(session.session_id))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_scale_down_with_sequences_in_flight(temperature: float) -> None:
    settings = settings_for(600)  # a drain that is not over by itself would fail the test
    async with (
        fleet.target(settings, step_ms=STEP_MS) as target,
        fleet.draft(settings, target, name="stays") as stays,
        fleet.draft(settings, target, name="leaves") as leaves,
    ):
        await fleet.until(lambda: target.num_links == 2)
        WatchedDesk.rounds_alone.clear()
        target.scheduler.drafts.__class__ = WatchedDesk
        traffic = Traffic(target, requests(8, temperature))
        await traffic.until_all_are_drafted()
        assert len(leaves.table) == len(stays.table) == 4
        await leaves.drain()
        assert len(leaves.table) == 0
        counts = target.scheduler.drafts.counts
        assert (counts["drained"], counts["moved"]) == (1, 4)
        await leaves.stop()
        await fleet.until(lambda: target.num_links == 1)
        before = [len(deltas) for deltas in traffic.deltas]
        await traffic.finish()
        assert stays.table.stats.num_opened == 8
        after = [d[n:] for d, n in zip(traffic.deltas, before, strict=True)]
        assert all(fleet.accepted(deltas) > 0 for deltas in after)
        assert len(WatchedDesk.rounds_alone) == 4
        assert max(WatchedDesk.rounds_alone) <= MAX_ROUNDS_ALONE
        assert not counts["dark"] + counts["given_up"] + counts["stalled"]
        await fleet.until_free(stays)


async def test_the_last_draft_serves_on_until_another_is_there() -> None:
    settings = settings_for(600)
    async with (
        fleet.target(settings, step_ms=STEP_MS) as target,
        fleet.draft(settings, target, name="old") as old,
    ):
        traffic = Traffic(target, requests(4, 0.8))
        await traffic.until_all_are_drafted()
        counts = target.scheduler.drafts.counts
        drain = asyncio.create_task(old.drain())
        await fleet.until(lambda: counts["drained"] == 1)
        before = [fleet.accepted(deltas) for deltas in traffic.deltas]
        await fleet.until(
            lambda: all(fleet.accepted(d) > n for d, n in zip(traffic.deltas, before, strict=True))
        )
        assert len(old.table) == 4
        assert not drain.done()
        async with fleet.draft(settings, target, name="new") as new:
            await drain
            await old.stop()
            await traffic.finish()
            assert (new.table.stats.num_opened, counts["moved"]) == (4, 4)


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
async def test_it_leaves_at_the_latest_after_its_time(timeout_s: float) -> None:
    settings = settings_for(timeout_s)
    async with (
        fleet.target(settings, step_ms=STEP_MS) as target,
        fleet.draft(settings, target) as draft,
    ):
        traffic = Traffic(target, requests(4, 0.8))
        await traffic.until_all_are_drafted()
        await draft.drain()
        assert len(draft.table) == 4
        await draft.stop()
        await traffic.finish()
        assert target.scheduler.drafts.counts["dark"] == 0


async def test_an_idle_draft_leaves_at_once() -> None:
    settings = settings_for(600)
    async with fleet.target(settings) as target, fleet.draft(settings, target) as draft:
        await draft.drain()
        await draft.stop()
        await fleet.until(lambda: target.num_links == 0)


async def test_a_draining_draft_whose_targets_vanish_leaves() -> None:
    settings = settings_for(600)
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(fleet.target(settings, step_ms=STEP_MS))
        draft = await stack.enter_async_context(fleet.draft(settings, target))
        traffic = Traffic(target, requests(2, 0.8))
        await traffic.until_all_are_drafted()
        drain = asyncio.create_task(draft.drain())
        await fleet.until(lambda: target.scheduler.drafts.counts["drained"] == 1)
        await target.server.stop(0.0)
        await drain
        await traffic.finish()
        assert draft.connected == ()


@asynccontextmanager
async def load(target: TargetDriver, num: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """`num` requests at a time, on and on, each compared with the text of the target alone.

    Yields what waits until requests have been drafted and ended once more.
    """
    is_over = False
    num_done = 0
    numbers = count()

    async def ask() -> None:
        nonlocal num_done
        while not is_over:
            number = next(numbers)
            wanted = fleet.request(f"l{number}", temperature=0.8, seed=number % 5, max_tokens=96)
            deltas = await fleet.collect(target, wanted)
            assert fleet.tokens(deltas) == fleet.alone(wanted)
            num_done += fleet.accepted(deltas) > 0

    async def more() -> None:
        goal = num_done + num
        await fleet.until(lambda: num_done >= goal)

    tasks = [asyncio.create_task(ask()) for _ in range(num)]
    try:
        yield more
    finally:
        is_over = True
        await asyncio.gather(*tasks)


async def test_rolling_restart_of_drafts_under_load() -> None:
    settings = fleet.with_rpc(settings_for(600), stall_timeout_s=30.0)
    async with fleet.target(settings, step_ms=STEP_MS) as target, AsyncExitStack() as stack:
        serving: list[DraftDriver] = []
        for name in ("a1", "b1"):
            serving.append(
                await stack.enter_async_context(fleet.draft(settings, target, name=name))
            )
        await fleet.until(lambda: target.num_links == 2)
        async with load(target, 8) as more:
            await more()
            for old, name in zip(tuple(serving), ("a2", "b2"), strict=True):
                await old.drain()
                assert len(old.table) == 0
                await old.stop()
                new = await stack.enter_async_context(fleet.draft(settings, target, name=name))
                serving.append(new)
                await fleet.until(lambda new=new: new.table.stats.num_drafted_tokens > 0)
                await more()
        assert all(draft.table.stats.num_drafted_tokens > 0 for draft in serving)
        counts = target.scheduler.drafts.counts
        assert (counts["drained"], counts["dark"], counts["stalled"]) == (2, 0, 0)
        await fleet.until_free(target)
