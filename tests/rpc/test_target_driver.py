"""A target on its event loop: several choices, their aborts, a cache too small, a broken engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline.engine.base import EngineBroken, EngineInfo, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.errors import RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.target.driver import TargetDriver
from tests.rpc import fleet

pytestmark = pytest.mark.timeout(60)


def choices(name: str, n: int, **changes: int) -> GenerateRequest:
    return dataclasses.replace(fleet.request(name, temperature=0.8, seed=5, **changes), n=n)


def texts(deltas: list[RoundDelta], n: int) -> list[tuple[int, ...]]:
    return [fleet.tokens([d for d in deltas if d.choice == choice]) for choice in range(n)]


def alone(wanted: GenerateRequest) -> list[tuple[int, ...]]:
    """Each choice as a request of its own."""
    return [
        fleet.alone(
            dataclasses.replace(
                wanted, n=1, sampling=dataclasses.replace(wanted.sampling, choice=choice)
            )
        )
        for choice in range(wanted.n)
    ]


class Failing(ToyEngine):
    """Raises `error` in step number `num_good` and never again."""

    def __init__(self, info: EngineInfo, error: Exception, num_good: int) -> None:
        super().__init__(info)
        self._error = error
        self._num_good = num_good

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        self._num_good -= 1
        if self._num_good == 0:
            raise self._error
        return super().step(items)


@asynccontextmanager
async def failing(error: Exception, num_good: int) -> AsyncIterator[TargetDriver]:
    engine = Failing(fleet.INFO, error, num_good)
    async with TargetDriver(EngineWorker(engine), fleet.config(), "t", "t-boot") as driver:
        yield driver


async def test_all_choices_come_through_one_iterator() -> None:
    settings = fleet.config()
    async with (
        fleet.target(settings) as target,
        fleet.draft(settings, target, error_rate=0.1),
    ):
        wanted = choices("r", 3)
        deltas = await fleet.collect(target, wanted)
        assert texts(deltas, 3) == alone(wanted)
        assert sorted(d.choice for d in deltas if d.finish_reason) == [0, 1, 2]
        assert fleet.accepted(deltas) > 0
        await fleet.until_free(target)


async def test_a_choice_that_is_aborted_is_silent_and_the_others_go_on() -> None:
    """Even what the pass at that moment has made of it, and what waits behind another's delta."""
    async with fleet.target(fleet.config()) as target:
        wanted = choices("r", 3)
        got: list[RoundDelta] = []
        async for delta in target.generate(wanted):
            if delta.choice == 0 and len(texts(got, 3)[1]) == 4:
                target.abort("r", 1)
                assert not target.abort("r", 1), "it is gone"
            got.append(delta)
        first, second, third = alone(wanted)
        assert texts(got, 3) == [first, second[:4], third]
        assert not target.abort("r", 0), "the request is over"
        await fleet.until_free(target)


async def test_a_request_ends_when_its_last_choice_is_aborted() -> None:
    async with fleet.target(fleet.config()) as target:
        stream = target.generate(choices("r", 2, max_tokens=400))
        await anext(stream)
        assert [target.abort("r", choice) for choice in (0, 1, 2)] == [True, True, False]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert target.scheduler.stats.num_aborted == 2
        await fleet.until_free(target)


async def test_an_abort_wakes_who_waits_for_the_last_choice() -> None:
    async with fleet.target(fleet.config(), step_ms=200.0) as target:
        collecting = asyncio.create_task(fleet.collect(target, choices("r", 2)))
        await fleet.until(lambda: target.scheduler.num_running == 2)
        assert target.abort("r", 0)
        assert target.abort("r", 1)
        assert await collecting == []


async def test_the_abort_of_a_request_ends_all_its_choices() -> None:
    async with fleet.target(fleet.config()) as target:
        stream = target.generate(choices("r", 3, max_tokens=400))
        await anext(stream)
        assert target.abort("r")
        with pytest.raises(RequestError) as caught:
            _ = [delta async for delta in stream]
        assert (caught.value.code, caught.value.status) == ("aborted", 499)
        assert target.scheduler.stats.num_aborted == 3
        await fleet.until_free(target)


async def test_leaving_the_iterator_ends_all_choices() -> None:
    async with fleet.target(fleet.config()) as target:
        stream = target.generate(choices("r", 3, max_tokens=400))
        await anext(stream)
        await stream.aclose()
        await fleet.until(lambda: target.scheduler.num_running == 0)
        assert target.scheduler.stats.num_aborted == 3
        await fleet.until_free(target)


async def test_a_cache_for_two_serves_eight() -> None:
    """23 + 64 tokens are 6 blocks: 13 hold two such texts, and all start at once."""
    settings = fleet.config()
    small = dataclasses.replace(fleet.INFO, num_blocks=13)
    async with (
        fleet.target(settings, step_ms=0.5, info=small) as target,
        fleet.draft(settings, target, error_rate=0.1),
    ):
        prompts = [(index, *fleet.PROMPT[1:]) for index in range(8)]
        wanted = [
            fleet.request(f"r{index}", temperature=0.8, seed=index, prompt=prompt)
            for index, prompt in enumerate(prompts)
        ]
        got = await asyncio.gather(*(fleet.collect(target, one) for one in wanted))
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        assert target.scheduler.stats.num_preemptions > 0
        await fleet.until_free(target)
        await fleet.until(lambda: target.scheduler.num_free_blocks == 13)


async def test_a_broken_engine_ends_the_target() -> None:
    async with failing(EngineBroken("rank 1 died"), num_good=5) as target:
        wanted = [choices("a", 2), choices("b", 1)]
        got = await asyncio.gather(
            *(fleet.collect(target, one) for one in wanted), return_exceptions=True
        )
        with pytest.raises(RequestError) as caught:
            await fleet.collect(target, choices("c", 1))
        for error in (*got, caught.value):
            assert isinstance(error, RequestError)
            assert (error.code, error.status, error.retry_after_s) == ("target_lost", 503, 1)
            assert str(error) == "this target has stopped; try again"
        with pytest.raises(RuntimeError, match="rank 1 died"):
            target.check_health()


async def test_an_ordinary_failure_costs_its_batch_only() -> None:
    async with failing(ZeroDivisionError("planted"), num_good=5) as target:
        with pytest.raises(RequestError) as caught:
            await fleet.collect(target, choices("a", 3))
        assert (caught.value.code, caught.value.status) == ("engine_error", 500)
        wanted = choices("b", 3)
        assert texts(await fleet.collect(target, wanted), 3) == alone(wanted)
        await fleet.until_free(target)
