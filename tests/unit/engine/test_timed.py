from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.timed import EngineWrapper, TimedEngine, sleep_exactly
from paceline.engine.toy import ToyEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
INFO = EngineInfo("toy", vocab_size=16, max_model_len=64, block_size=4, num_blocks=32)


@dataclass
class Time:
    """Stands still unless somebody sleeps or computes; `slept` has each sleep."""

    now: float = 100.0
    slept: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(round(seconds, 9))


class Computing(EngineWrapper):
    """Each step takes `seconds` of `time`."""

    def __init__(self, time: Time, seconds: float) -> None:
        super().__init__(ToyEngine(INFO))
        self._time, self._seconds = time, seconds

    def step(self, items):  # type: ignore[no-untyped-def]
        self._time.now += self._seconds
        return super().step(items)


def timed(time: Time, compute_s: float = 0.0) -> TimedEngine:
    engine = Computing(time, compute_s)
    return TimedEngine(engine, base_ms=20.0, row_ms=0.5, sleep=time.sleep, clock=time.clock)


def test_each_step_costs_base_plus_rows_and_changes_no_token() -> None:
    time = Time()
    toy, slow = ToyEngine(INFO), timed(time)
    for engine in (toy, slow):
        engine.add(1)
        engine.add(2)
    passes = [
        [StepItem(1, 0, (1, 2, 3), 1, GREEDY), StepItem(2, 0, (4,), 1, GREEDY)],
        [StepItem(1, 3, (5,), 1, GREEDY)],
    ]
    for items in passes:
        assert slow.step(items) == toy.step(items)
    assert time.slept == [0.022, 0.0205]
    assert slow.busy_s == pytest.approx(0.0425)
    assert (slow.info, slow.stats()) == (toy.info, toy.stats())
    assert slow.cached_len(1) == 4
    assert slow.can_fit([(1, 60)])
    slow.free(1)
    assert slow.stats().num_sequences == 1
    slow.check_integrity()


def test_what_the_engine_computes_is_part_of_the_cost() -> None:
    time = Time()
    slow = timed(time, compute_s=0.008)
    slow.add(1)
    slow.step([StepItem(1, 0, (1, 2), 1, GREEDY)])
    assert time.slept == [0.013]
    assert slow.busy_s == pytest.approx(0.021)
    assert slow.num_late == 0


def test_a_step_that_computes_for_longer_than_its_cost_is_counted() -> None:
    time = Time()
    slow = timed(time, compute_s=0.030)
    slow.add(1)
    slow.step([StepItem(1, 0, (1, 2), 1, GREEDY)])
    assert time.slept == []
    assert slow.num_late == 1
    assert slow.busy_s == pytest.approx(0.030)


def test_a_step_without_cost_is_never_late() -> None:
    free = TimedEngine(ToyEngine(INFO), base_ms=0.0)
    free.add(1)
    free.step([StepItem(1, 0, (1, 2), 1, GREEDY)])
    assert free.num_late == 0


def test_rows_found_in_the_prefix_cache_cost_nothing() -> None:
    time = Time()
    slow = timed(time)
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    for sequence_id in (1, 2):
        slow.add(sequence_id)
        slow.step([StepItem(sequence_id, 0, prompt, 1, GREEDY)])
    slow.add(3)
    slow.step([StepItem(3, 0, (9, *prompt), 1, GREEDY, max_rows=4)])
    assert time.slept == [0.0245, 0.0205, 0.022]


def test_a_refused_step_costs_nothing() -> None:
    time = Time()
    slow = timed(time)
    with pytest.raises(LocalProtocolError):
        slow.step([StepItem(1, 0, (1,), 1, GREEDY)])
    assert (time.slept, slow.busy_s) == ([], 0.0)


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="costs must be >= 0"):
        TimedEngine(ToyEngine(INFO), base_ms=-1.0)


@pytest.mark.parametrize("seconds", [0.0, 0.0001, 0.002])
def test_an_exact_sleep_is_never_too_short(seconds: float) -> None:
    began = time.perf_counter()
    sleep_exactly(seconds)
    assert time.perf_counter() - began >= seconds
