"""A target on its event loop: several choices, their aborts, a cache too small, a broken engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from paceline.config import GatewayConfig
from paceline.engine.base import EngineBroken, EngineInfo, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.errors import RequestError
from paceline.gateway.openai import CompletionBody
from paceline.gateway.plan import Endpoint
from paceline.gateway.service import GatewayService, ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
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
async def failing(error: Exception, num_good: int, **limits: int) -> AsyncIterator[TargetDriver]:
    engine = Failing(fleet.INFO, error, num_good)
    settings = fleet.config()
    limited = settings.target.model_copy(update=limits)
    settings = settings.model_copy(update={"target": limited})
    async with TargetDriver(EngineWorker(engine), settings, "t", "t-boot") as driver:
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
        async for delta in fleet.rounds(target, wanted):
            if delta.choice == 0 and len(texts(got, 3)[1]) == 4 and target.abort("r", 1):
                assert not target.abort("r", 1), "it is gone"
                assert target.scheduler.stats.num_aborted == 1
                # It is not computed any more, while the others are.
                await fleet.until(lambda: target.scheduler.num_running <= 2)
            got.append(delta)
        first, second, third = alone(wanted)
        assert texts(got, 3) == [first, second[:4], third]
        stats = target.scheduler.stats
        assert (stats.num_aborted, stats.num_finished) == (1, 2)
        assert stats.num_committed_tokens < 3 * 64
        assert not target.abort("r", 0), "the request is over"
        await fleet.until_free(target)


async def test_a_request_ends_when_its_last_choice_is_aborted() -> None:
    async with fleet.target(fleet.config()) as target:
        stream = fleet.rounds(target, choices("r", 2, max_tokens=400))
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
        stream = fleet.rounds(target, choices("r", 3, max_tokens=400))
        await anext(stream)
        assert target.abort("r")
        with pytest.raises(RequestError) as caught:
            _ = [delta async for delta in stream]
        assert (caught.value.code, caught.value.status) == ("aborted", 499)
        assert target.scheduler.stats.num_aborted == 3
        await fleet.until_free(target)


async def test_leaving_the_iterator_ends_all_choices() -> None:
    async with fleet.target(fleet.config()) as target:
        stream = fleet.rounds(target, choices("r", 3, max_tokens=400))
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
    """Whoever was in the pass may have broken it; who waited for a place has not."""
    error = EngineBroken("rank 1 died")
    async with asyncio.timeout(60), failing(error, 5, max_num_seqs=3) as target:
        wanted = [choices("a", 2), choices("b", 1), choices("waits", 2)]
        got = await asyncio.gather(
            *(fleet.collect(target, one) for one in wanted), return_exceptions=True
        )
        with pytest.raises(RequestError) as caught:
            await fleet.collect(target, choices("late", 1))
        errors = [*got, caught.value]
        assert all(isinstance(e, RequestError) for e in errors)
        assert [e.code for e in errors] == ["engine_broken"] * 2 + ["target_lost"] * 2
        assert {(e.status, e.retry_after_s) for e in errors} == {(503, 1)}
        assert str(errors[0]).startswith("the model failed under this request's batch")
        assert str(errors[2]) == "this target has stopped; try again"
        with pytest.raises(RuntimeError, match="rank 1 died"):
            target.check_health()


class Poisoned(ToyEngine):
    """Breaks under token 13."""

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if any(13 in item.token_ids for item in items):
            raise EngineBroken("out of memory on a rank")
        return super().step(items)


class Stream:
    def __init__(self, rounds: AsyncIterator[RoundDelta]) -> None:
        self._rounds = rounds

    def __aiter__(self) -> AsyncIterator[RoundDelta]:
        return self._rounds

    def cancel(self) -> None:
        """A target that has stopped has nothing to cancel."""


class Targets:
    """Asks the first driver whose loop still runs, as Serve drops a replica that has failed."""

    def __init__(self, drivers: list[TargetDriver]) -> None:
        self._drivers = drivers

    def live(self) -> list[bool]:
        return [driver._loop.is_running for driver in self._drivers]

    def generate(self, request: GenerateRequest) -> Stream:
        return Stream(fleet.rounds(self._drivers[self.live().index(True)], request))

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        for driver in self._drivers:
            driver.abort(request_id, choice)

    async def ready(self) -> bool:
        return any(self.live())


async def test_a_request_that_breaks_every_engine_costs_two_targets() -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        drivers = [
            await stack.enter_async_context(
                TargetDriver(EngineWorker(Poisoned(fleet.INFO)), fleet.config(), f"t{i}", f"b{i}")
            )
            for i in range(4)
        ]
        targets = Targets(drivers)
        gateway = GatewayService(
            GatewayConfig(max_retries=10),
            [ServedModel("toy", ToyTokenizer(), targets, fleet.INFO.max_model_len)],
            clock=lambda: 0.0,
            random_hex=lambda: "x",
            random_seed=lambda: 1,
        )
        body = CompletionBody(model="toy", prompt=[1, 13, 2], max_tokens=4)
        (plan,) = await gateway.plans(Endpoint.COMPLETIONS, body)
        with pytest.raises(RequestError) as caught:
            _ = [item async for item in gateway.rounds(plan, gateway.answer(plan))]
        assert caught.value.code == "engine_broken"
        await gateway.drain()
        assert targets.live() == [False, False, True, True]


async def test_one_choice_in_the_pass_is_enough() -> None:
    """The others of the request wait: it was in the pass all the same."""
    async with asyncio.timeout(60), failing(EngineBroken("x"), 1, max_num_seqs=1) as target:
        with pytest.raises(RequestError) as caught:
            await fleet.collect(target, choices("a", 3))
        assert caught.value.code == "engine_broken"


async def test_a_passing_failure_costs_nobody_anything() -> None:
    async with failing(ZeroDivisionError("planted"), num_good=5) as target:
        wanted = choices("a", 3)
        assert texts(await fleet.collect(target, wanted), 3) == alone(wanted)
        assert target.scheduler.stats.num_failed_passes == 1
        await fleet.until_free(target)


class Gone(ToyEngine):
    """Its device goes away in step number `num_good`, with an ordinary error each time."""

    def __init__(self, info: EngineInfo, num_good: int) -> None:
        super().__init__(info)
        self._num_good = num_good

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        self._num_good -= 1
        if self._num_good <= 0:
            raise ZeroDivisionError("planted")
        return super().step(items)


@pytest.mark.parametrize("num_requests", [1, 3])
async def test_an_engine_that_can_do_no_pass_ends_the_target(num_requests: int) -> None:
    """Else it would fail all that comes, looking healthy."""
    worker = EngineWorker(Gone(fleet.INFO, 5))
    async with (
        asyncio.timeout(60),
        TargetDriver(worker, fleet.config(), "t", "t-boot") as target,
    ):
        wanted = [fleet.request(f"r{i}", max_tokens=40) for i in range(num_requests)]
        got = await asyncio.gather(
            *(fleet.collect(target, one) for one in wanted), return_exceptions=True
        )
        assert all(isinstance(error, RequestError) for error in got)
        # Others may go on with them elsewhere.
        assert {error.code for error in got} == {"engine_broken"}
        with pytest.raises(RuntimeError, match="not even a single row"):
            target.check_health()


class Allergic(ToyEngine):
    """Cannot do a pass with token 13 in it."""

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        if any(13 in item.token_ids for item in items):
            raise ZeroDivisionError("planted")
        return super().step(items)


async def test_a_poisoned_request_does_not_fail_its_batch() -> None:
    settings = fleet.config()
    worker = EngineWorker(Allergic(fleet.INFO))
    # Token 13 is not to be anywhere but in the one prompt.
    law = dataclasses.replace(fleet.request("r").sampling, logit_bias=((13, -100.0),))
    wanted = [
        dataclasses.replace(
            fleet.request(f"r{start}", prompt=(start, *range(20, 40)), max_tokens=40), sampling=law
        )
        for start in (10, 11, 12, 13, 14)
    ]
    async with (
        TargetDriver(worker, settings, "t", "t-boot") as target,
        fleet.draft(settings, target, error_rate=0.2),
    ):
        got = await asyncio.gather(
            *(fleet.collect(target, one) for one in wanted), return_exceptions=True
        )
        error = got.pop(3)
        assert isinstance(error, RequestError)
        assert (error.code, error.status) == ("engine_error", 500)
        del wanted[3]
        assert [fleet.tokens(deltas) for deltas in got] == [fleet.alone(one) for one in wanted]
        target.check_health()
        await fleet.until_free(target)
