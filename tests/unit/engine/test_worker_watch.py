"""An engine that breaks or hangs: its worker says so at once, and for good."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from paceline.engine.base import EngineBroken, EngineInfo, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.sampling.params import SamplingParams

INFO = EngineInfo("toy", vocab_size=64, max_model_len=128, block_size=4, num_blocks=8)
LONG_S = 60.0


class HangingEngine(ToyEngine):
    """A pass that has `hang_id` in it does not end before `release` is set."""

    hang_id = 13

    def __init__(self) -> None:
        super().__init__(INFO)
        self.release = threading.Event()
        self.num_steps = 0

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        self.num_steps += 1
        if any(item.sequence_id == self.hang_id for item in items):
            assert self.release.wait(LONG_S)
        return super().step(items)


class FailingEngine(ToyEngine):
    """Every pass fails with `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(INFO)
        self.error = error

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        raise self.error


def rows(sequence_id: int) -> list[StepItem]:
    return [StepItem(sequence_id, 0, (5,), 1, SamplingParams(temperature=0))]


async def test_a_pass_that_hangs_breaks_the_engine() -> None:
    engine = HangingEngine()
    worker = EngineWorker(engine, max_pass_s=0.2)
    await worker.run([], rows(1))
    worker.check_health()
    try:
        with pytest.raises(EngineBroken, match=r"did not end within 0\.2 s"):
            await worker.run([], rows(HangingEngine.hang_id))
        with pytest.raises(EngineBroken, match="did not end"):
            worker.check_health()
        with pytest.raises(EngineBroken, match="did not end"):
            await worker.run([], rows(2))
        assert engine.num_steps == 2
        worker.close()  # does not wait for the pass
        assert not engine.release.is_set()
    finally:
        engine.release.set()


async def test_a_pass_within_the_limit_is_no_hang() -> None:
    engine = HangingEngine()
    engine.release.set()
    worker = EngineWorker(engine, max_pass_s=LONG_S)
    done = await worker.run([], rows(HangingEngine.hang_id))
    assert len(done.results[0].token_ids) == 1
    worker.check_health()
    worker.close()


async def test_a_broken_engine_stays_broken() -> None:
    worker = EngineWorker(FailingEngine(EngineBroken("rank 1 died")))
    worker.check_health()
    for _ in range(2):
        with pytest.raises(EngineBroken, match="rank 1 died"):
            await worker.run([], rows(1))
        with pytest.raises(EngineBroken, match="rank 1 died"):
            worker.check_health()
    worker.close()


@pytest.mark.parametrize("error", [MemoryError("no memory"), TimeoutError("of the engine's own")])
async def test_other_failures_do_not_break_it(error: Exception) -> None:
    worker = EngineWorker(FailingEngine(error), max_pass_s=LONG_S)
    with pytest.raises(type(error), match=str(error)):
        await worker.run([], rows(1))
    worker.check_health()
    worker.close()


@pytest.mark.parametrize("error", [MemoryError("no memory"), EngineBroken("rank 1 died")])
async def test_a_probe_that_fails_breaks_it(error: Exception) -> None:
    worker = EngineWorker(FailingEngine(error))
    with pytest.raises(EngineBroken, match=str(error)):
        await worker.probe()
    with pytest.raises(EngineBroken, match=str(error)):
        worker.check_health()
    worker.close()


@pytest.mark.parametrize("num_free", [0, 1])
async def test_a_probe_leaves_nothing(num_free: int) -> None:
    """A cache without a free block says nothing against the engine."""
    info = EngineInfo("toy", 16, 64, 4, 2)
    worker = EngineWorker(ToyEngine(info, enable_prefix_caching=False))
    item = StepItem(1, 0, (1,) * 4 * (2 - num_free), 1, SamplingParams(temperature=0.0))
    await worker.run([], [item])
    await worker.probe()
    worker.check_health()
    assert await worker.free_blocks(check=True) == num_free
    await worker.run([1], [])
    assert await worker.free_blocks(check=True) == 2
    worker.close()
