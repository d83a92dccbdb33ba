"""When a pass had its logits: each engine says what it knows, and the worker passes it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import ModelConfig
from paceline.engine.base import Engine, EngineInfo, StepItem
from paceline.engine.loader import load_engine
from paceline.engine.scripted import ScriptedEngine
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.sampling.params import SamplingParams

INFO = EngineInfo("toy", vocab_size=64, max_model_len=128, block_size=4, num_blocks=32)
ITEM = StepItem(1, 0, (5, 6, 7), 1, SamplingParams(temperature=0.0))


async def check_within_the_pass(engine: Engine) -> None:
    assert engine.stats().logits_us == 0
    worker = EngineWorker(engine)
    done = await worker.run([], [ITEM])
    assert done.started_us <= done.logits_us <= done.ended_us
    assert done.logits_us > 0
    assert (await worker.run([1], [])).logits_us == 0  # no pass: the last one's is not told again
    worker.close()


async def test_of_a_toy() -> None:
    await check_within_the_pass(ToyEngine(INFO))


async def test_of_a_toy_that_takes_its_time() -> None:
    await check_within_the_pass(TimedEngine(ToyEngine(INFO), base_ms=2.0))


async def test_of_a_model(model_folder: Path) -> None:
    config = ModelConfig(source=str(model_folder), max_model_len=64, device="cpu", num_kv_blocks=16)
    await check_within_the_pass(load_engine(config, model_folder))


async def test_of_an_engine_that_does_not_know() -> None:
    worker = EngineWorker(TimedEngine(ScriptedEngine(INFO), base_ms=1.0))
    assert (await worker.run([], [ITEM])).logits_us == 0
    worker.close()


@pytest.mark.parametrize("base_ms", [0.0, 7.5, 40.0])
def test_what_is_slept_away_is_the_models(base_ms: float) -> None:
    now_s = [100.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    toy = ToyEngine(INFO)
    slow = TimedEngine(toy, base_ms=base_ms, sleep=sleep, clock=lambda: now_s[0])
    slow.add(1)
    slow.step([ITEM])
    later_us = slow.stats().logits_us - toy.stats().logits_us
    assert later_us == pytest.approx(1000 * base_ms, abs=1)
