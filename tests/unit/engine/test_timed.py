from __future__ import annotations

import pytest

from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
INFO = EngineInfo("toy", vocab_size=16, max_model_len=64, block_size=4, num_blocks=32)


def test_each_step_costs_base_plus_rows_and_changes_no_token() -> None:
    toy, costs = ToyEngine(INFO), list[float]()
    timed = TimedEngine(ToyEngine(INFO), base_ms=20.0, row_ms=0.5, sleep=costs.append)
    for engine in (toy, timed):
        engine.add(1)
        engine.add(2)
    passes = [
        [StepItem(1, 0, (1, 2, 3), 1, GREEDY), StepItem(2, 0, (4,), 1, GREEDY)],
        [StepItem(1, 3, (5,), 1, GREEDY)],
    ]
    for items in passes:
        assert timed.step(items) == toy.step(items)
    assert costs == [0.022, 0.0205]
    assert (timed.info, timed.stats()) == (toy.info, toy.stats())
    assert timed.cached_len(1) == 4
    assert timed.can_fit([(1, 60)])
    timed.free(1)
    assert timed.stats().num_sequences == 1
    timed.check_integrity()


def test_rows_found_in_the_prefix_cache_cost_nothing() -> None:
    costs = list[float]()
    timed = TimedEngine(ToyEngine(INFO), base_ms=20.0, row_ms=0.5, sleep=costs.append)
    prompt = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    for sequence_id in (1, 2):
        timed.add(sequence_id)
        timed.step([StepItem(sequence_id, 0, prompt, 1, GREEDY)])
    timed.add(3)
    timed.step([StepItem(3, 0, (9, *prompt), 1, GREEDY, max_rows=4)])
    assert costs == [0.0245, 0.0205, 0.022]


def test_a_refused_step_costs_nothing() -> None:
    costs = list[float]()
    timed = TimedEngine(ToyEngine(INFO), base_ms=20.0, sleep=costs.append)
    with pytest.raises(LocalProtocolError):
        timed.step([StepItem(1, 0, (1,), 1, GREEDY)])
    assert costs == []


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="costs must be >= 0"):
        TimedEngine(ToyEngine(INFO), base_ms=-1.0)
