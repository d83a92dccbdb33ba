from __future__ import annotations

import pytest

from paceline.bench.ceiling import Costs, tokens_per_round
from paceline.bench.lockstep import LockStep
from paceline.bench.schemes import Setting, engine_info, steady
from paceline.engine.base import StepItem
from paceline.engine.scripted import ScriptedEngine
from paceline.sampling.params import SamplingParams

FREE = Costs(0.0, 0.0, 0.0, 0.0)
GREEDY = SamplingParams(temperature=0.0)


def setting(batch: int, acceptance: float) -> Setting:
    return steady(FREE, 0.0, batch, acceptance)


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("acceptance", [0.0, 0.75, 1.0])
def test_texts_are_the_targets_own(k: int, acceptance: float) -> None:
    loop = LockStep(setting(3, acceptance), k, 0.0)
    num_tokens = sum(loop.run_round() for _ in range(50))
    assert num_tokens == sum(len(text.token_ids) - 4 for text in loop.texts)
    alone = ScriptedEngine(engine_info("alone", 1 << 20, 3))
    for text in loop.texts:
        alone.add(text.sequence_id)
        rows = tuple(text.token_ids[:-1])
        item = StepItem(text.sequence_id, 0, rows, len(rows) - 3, GREEDY)
        assert list(alone.step([item])[0].token_ids) == text.token_ids[4:]


@pytest.mark.parametrize(("acceptance", "k"), [(0.75, 4), (0.6, 2), (0.0, 3), (1.0, 3)])
def test_rounds_commit_what_the_formula_says(acceptance: float, k: int) -> None:
    loop = LockStep(setting(8, acceptance), k, 0.0)
    num_tokens = sum(loop.run_round() for _ in range(400))
    assert num_tokens / 3200 == pytest.approx(tokens_per_round(acceptance, k), rel=0.05)


def test_a_round_is_k_draft_passes_and_one_of_the_target() -> None:
    loop = LockStep(setting(2, 0.75), 3, 0.0)
    before = loop.target.stats()
    for _ in range(10):
        loop.run_round()
    stats, drafts = loop.target.stats(), loop.draft.stats()
    assert (stats.num_passes - before.num_passes, drafts.num_passes) == (10, 30)
    assert stats.num_rows - before.num_rows == 10 * 2 * 4


def test_a_measurement_counts_whole_rounds() -> None:
    loop = LockStep(steady(Costs(0.2, 1.0, 0.0, 0.0), 0.0, 2, 0.5), 2, 1.0)
    measured = loop.measure(0.0, 0.1)
    assert measured.k == 2
    assert measured.rows_per_pass == 6
    assert 2 <= measured.tokens_per_pass <= 6
    assert measured.pass_ms >= 1.0
    # Two draft passes and the wire.
    assert measured.gap_ms >= 1.4
    assert measured.target_busy < 1.0 / 2.4 + 0.05
