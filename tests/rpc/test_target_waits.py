"""What a target says while a request waits: that it lives, and when it has waited long enough."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from paceline.config import AppConfig
from paceline.engine.base import EngineInfo, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.errors import RequestError
from paceline.generation import GenerateRequest, Resumption, RoundDelta
from paceline.target.driver import TargetDriver
from tests.rpc import fleet

pytestmark = pytest.mark.timeout(60)

LONG_S = 50.0


class Gated(ToyEngine):
    """No pass ends while `gate` is closed."""

    def __init__(self, info: EngineInfo = fleet.INFO) -> None:
        super().__init__(info)
        self.gate = threading.Event()

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        assert self.gate.wait(LONG_S)
        return super().step(items)


@asynccontextmanager
async def gated(
    *, max_pass_s: float | None = None, **limits: float
) -> AsyncIterator[tuple[TargetDriver, Gated]]:
    engine = Gated()
    settings = AppConfig.model_validate({"target": limits, "gateway": {"target_silence_s": 1e6}})
    worker = EngineWorker(engine, max_pass_s=max_pass_s)
    try:
        async with TargetDriver(worker, settings, "t", "t-boot") as driver:
            try:
                yield driver, engine
            finally:
                engine.gate.set()
    finally:
        engine.gate.set()


async def test_a_slow_pass_is_no_silence() -> None:
    async with gated(alive_interval_s=0.01) as (target, engine):
        wanted = fleet.request("r", max_tokens=8)
        items = target.generate(wanted)
        assert [await anext(items) for _ in range(5)] == [None] * 5
        engine.gate.set()
        deltas = [delta async for delta in items if delta is not None]
        assert fleet.tokens(deltas) == fleet.alone(wanted)


async def test_nothing_is_said_between_deltas_that_come_in_time() -> None:
    async with gated(alive_interval_s=LONG_S) as (target, engine):
        engine.gate.set()
        wanted = fleet.request("r", max_tokens=8)
        items = [item async for item in target.generate(wanted)]
        assert None not in items
        assert fleet.tokens([i for i in items if i is not None]) == fleet.alone(wanted)


async def test_who_is_queued_hears_it_too() -> None:
    async with gated(alive_interval_s=0.01, max_num_seqs=1) as (target, engine):
        wanted = [fleet.request(name, max_tokens=8) for name in ("first", "second")]
        first = target.generate(wanted[0])
        assert await anext(first) is None
        second = target.generate(wanted[1])
        assert [await anext(second) for _ in range(3)] == [None] * 3
        assert target.scheduler.num_waiting == 1
        engine.gate.set()
        for stream, one in ((first, wanted[0]), (second, wanted[1])):
            deltas = [delta async for delta in stream if delta is not None]
            assert fleet.tokens(deltas) == fleet.alone(one)


async def _wait_in_vain(target: TargetDriver, wanted: GenerateRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await fleet.collect(target, wanted)
    return caught.value


async def test_a_queue_time_ends_amid_a_pass() -> None:
    """The gate stays closed until the second request has its answer."""
    limits = {"alive_interval_s": 0.01, "max_queue_s": 0.05, "max_num_seqs": 1}
    async with gated(**limits) as (target, engine):
        wanted = fleet.request("first", max_tokens=8)
        first = asyncio.create_task(fleet.collect(target, wanted))
        await fleet.until(lambda: target.scheduler.num_running == 1)
        waiting = dataclasses.replace(fleet.request("second"), n=3)
        error = await _wait_in_vain(target, waiting)
        assert (error.status, error.code, error.retry_after_s) == (503, "queue_timeout", 1)
        assert (target.scheduler.num_running, target.scheduler.num_waiting) == (1, 0)
        assert target.scheduler.stats.num_aborted == 0
        engine.gate.set()
        assert fleet.tokens(await first) == fleet.alone(wanted)
        await fleet.until_free(target)


async def test_a_queue_time_ends_between_passes() -> None:
    settings = AppConfig.model_validate(
        {
            "target": {"alive_interval_s": LONG_S, "max_queue_s": 0.02, "max_num_seqs": 1},
            "gateway": {"target_silence_s": 1e6},
        }
    )
    async with fleet.target(settings, step_ms=1.0) as target:
        stream = fleet.rounds(target, fleet.request("first", max_tokens=480))
        await anext(stream)
        error = await _wait_in_vain(target, fleet.request("second"))
        assert error.code == "queue_timeout"
        assert target.scheduler.num_running == 1, "the first goes on"
        await stream.aclose()
        await fleet.until_free(target)


async def test_a_hung_engine_ends_its_target() -> None:
    limits = {"alive_interval_s": 0.01, "max_num_seqs": 1}
    async with gated(max_pass_s=0.1, **limits) as (target, _):
        got = await asyncio.gather(
            _wait_in_vain(target, fleet.request("in the pass")),
            _wait_in_vain(target, fleet.request("waits")),
        )
        assert [error.code for error in got] == ["engine_broken", "target_lost"]
        with pytest.raises(RuntimeError, match=r"a pass did not end within 0\.1 s"):
            target.check_health()
        error = await _wait_in_vain(target, fleet.request("late"))
        assert error.code == "target_lost"


async def test_a_request_goes_on_at_another_target() -> None:
    """Of three choices one has ended, and the others are cut where the first target was left."""
    settings = fleet.config()
    wanted = dataclasses.replace(fleet.request("r", temperature=0.8, seed=5, max_tokens=48), n=3)
    texts = [
        fleet.alone(
            dataclasses.replace(
                wanted, n=1, sampling=dataclasses.replace(wanted.sampling, choice=choice)
            )
        )
        for choice in range(3)
    ]
    got: list[RoundDelta] = []
    async with fleet.target(settings, name="a") as first, fleet.draft(settings, first):
        stream = fleet.rounds(first, wanted)
        while len(_text(got, 2)) < 10:
            got.append(await anext(stream))
        await stream.aclose()
    outputs = (None, _text(got, 1), _text(got, 2))
    async with fleet.target(settings, name="b") as second, fleet.draft(settings, second):
        resumed = dataclasses.replace(wanted, resumption=Resumption(1, outputs))
        rest = await fleet.collect(second, resumed)
        assert {delta.choice for delta in rest} == {1, 2}
        assert fleet.accepted(rest) > 0
        for choice in (1, 2):
            assert _text(got, choice) + _text(rest, choice) == texts[choice]
        assert not second.abort("r", 0), "it is over"
        await fleet.until_free(second)


def _text(deltas: list[RoundDelta], choice: int) -> tuple[int, ...]:
    return fleet.tokens([delta for delta in deltas if delta.choice == choice])


async def test_a_choice_that_does_not_run_cannot_be_aborted() -> None:
    async with gated(alive_interval_s=0.01) as (target, engine):
        wanted = dataclasses.replace(fleet.request("r", max_tokens=8), n=2)
        text = fleet.alone(wanted)
        wanted = dataclasses.replace(wanted, resumption=Resumption(1, (None, text[:3])))
        items = target.generate(wanted)
        assert await anext(items) is None
        assert not target.abort("r", 0)
        engine.gate.set()
        assert fleet.tokens([d async for d in items if d is not None]) == text[3:]
