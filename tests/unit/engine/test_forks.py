"""Forks on every engine: a sequence that begins with another's cache is as if computed itself.

The oracle is an engine that never forks. `tests/properties/test_block_pool.py` has the pool at
random; here the engines move what the pool says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import ModelConfig
from paceline.engine.base import Engine, EngineInfo, OutOfBlocks, StepItem
from paceline.engine.loader import load_engine
from paceline.engine.scripted import Script, ScriptedEngine
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.toy import ToyEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams
from tests.unit.engine.conftest import VOCAB_SIZE
from tests.unit.engine.subjects import EVERYTHING, tokens

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0.0)
NUM_BLOCKS = 64
INFO = EngineInfo("small", VOCAB_SIZE, max_model_len=400, block_size=4, num_blocks=NUM_BLOCKS)
TEXT = tokens(3, 23)

Make = Callable[[bool], Engine]


@pytest.fixture(params=["toy", "scripted", "torch"])
def make(request: pytest.FixtureRequest, llama_folder: Path) -> Make:
    """A new engine, with or without a prefix cache."""

    def engine(caching: bool) -> Engine:
        if request.param == "toy":
            return ToyEngine(INFO, enable_prefix_caching=caching)
        if request.param == "scripted":
            script = Script.steady(0.5, (0.5,))
            return ScriptedEngine(INFO, script, enable_prefix_caching=caching)
        config = ModelConfig(
            source=str(llama_folder),
            max_model_len=400,
            block_size=4,
            num_kv_blocks=NUM_BLOCKS,
            device="cpu",
            enable_prefix_caching=caching,
        )
        return load_engine(config, llama_folder)

    return engine


def rows(sequence_id: int, start: int, *token_ids: int, fork_of: int | None = None) -> StepItem:
    return StepItem(sequence_id, start, token_ids, 1, GREEDY, num_runner_ups=1, fork_of=fork_of)


def begin(engine: Engine, sequence_id: int, text: tuple[int, ...] = TEXT) -> None:
    engine.add(sequence_id)
    engine.step([rows(sequence_id, 0, *text)])


def next_of(make: Make, text: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(token, runner-up) after a text, computed from the first token on."""
    engine = make(False)
    engine.add(1)
    [result] = engine.step([rows(1, 0, *text)])
    return result.token_ids, result.runner_ups[0]


def fork(
    engine: Engine, child: int, parent: int, start: int, token_id: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    engine.add(child)
    [result] = engine.step([rows(child, start, token_id, fork_of=parent)])
    return result.token_ids, result.runner_ups[0]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("start", [0, 1, 4, 7, 8, 20, 22, 23])
def test_one_row_instead_of_the_whole_text(make: Make, caching: bool, start: int) -> None:
    engine = make(caching)
    begin(engine, 1)
    num_rows = engine.stats().num_rows
    assert fork(engine, 2, 1, start, 9) == next_of(make, (*TEXT[:start], 9))
    assert engine.stats().num_rows == num_rows + 1
    assert (engine.cached_len(1), engine.cached_len(2)) == (23, start + 1)
    engine.check_integrity()


def test_neither_sees_what_the_other_writes(make: Make) -> None:
    engine = make(True)
    begin(engine, 1)
    fork(engine, 2, 1, 22, 9)
    for _ in range(2):
        for sequence_id, text in ((1, (*TEXT, 1, 2)), (2, (*TEXT[:22], 9, 3))):
            start = 23
            [result] = engine.step([rows(sequence_id, start, *text[start:])])
            assert (result.token_ids, result.runner_ups[0]) == next_of(make, text)
            engine.check_integrity()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1, 3)])
@pytest.mark.parametrize("caching", [False, True])
def test_rewinds_and_ends_in_any_order(make: Make, caching: bool, order: tuple[int, ...]) -> None:
    """Each goes back into what all three share, and writes something else there."""
    engine = make(caching)
    begin(engine, 1)
    fork(engine, 2, 1, 18, 9)
    fork(engine, 3, 2, 17, 8)
    for sequence_id in order:
        text = (*TEXT[:10], 50 + sequence_id, 7)
        [result] = engine.step([rows(sequence_id, 10, *text[10:])])
        assert (result.token_ids, result.runner_ups[0]) == next_of(make, text)
        engine.check_integrity()
    for sequence_id in order:
        engine.free(sequence_id)
        engine.check_integrity()
    assert engine.stats().num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("caching", [False, True])
def test_it_begins_with_what_was_there_before_the_pass(make: Make, caching: bool) -> None:
    """The parent goes back, goes on or goes over to other text in the pass of its forks."""
    for back in (0, 2, 5, 23):
        engine = make(caching)
        begin(engine, 1)
        engine.add(2)
        engine.add(3)
        items = [
            rows(2, 22, 9, fork_of=1),
            rows(1, 23 - back, 4, 5, 6),
            rows(3, 19, 8, 9, fork_of=1),
        ]
        texts = [(*TEXT[:22], 9), (*TEXT[: 23 - back], 4, 5, 6), (*TEXT[:19], 8, 9)]
        for result, text in zip(engine.step(items), texts, strict=True):
            assert (result.token_ids, result.runner_ups[0]) == next_of(make, text)
        engine.check_integrity()
        # and each goes on from what it has itself
        for item, text in zip(items, texts, strict=True):
            [result] = engine.step([rows(item.sequence_id, len(text), 11)])
            assert (result.token_ids, result.runner_ups[0]) == next_of(make, (*text, 11))


def test_a_fork_outlives_its_parent_and_can_be_forked(make: Make) -> None:
    engine = make(True)
    begin(engine, 1)
    fork(engine, 2, 1, 22, 9)
    engine.free(1)
    begin(engine, 4, tokens(8, 30))  # takes what was given back
    text = (*TEXT[:22], 9, 5)
    assert fork(engine, 3, 2, 23, 5) == next_of(make, text)
    engine.check_integrity()


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (rows(2, 3, 9, fork_of=7), "unknown"),
        (rows(2, 24, 9, fork_of=1), "24"),
        (rows(1, 3, 9, fork_of=3), "fork"),
    ],
    ids=["of nobody", "beyond what is cached", "of one that has a text"],
)
def test_what_is_refused_changes_nothing(make: Make, item: StepItem, problem: str) -> None:
    engine = make(True)
    begin(engine, 1)
    begin(engine, 3)
    engine.add(2)
    before = engine.stats()
    with pytest.raises(LocalProtocolError, match=problem):
        engine.step([rows(3, 23, 5), item])
    assert engine.stats() == before
    assert [engine.cached_len(i) for i in (1, 2, 3)] == [23, 0, 23]
    engine.check_integrity()


def test_without_room_nothing_changes(make: Make) -> None:
    engine = make(False)
    begin(engine, 1)
    begin(engine, 2, tokens(9, 4 * (engine.stats().num_free_blocks - 7)))
    for child in (3, 4):
        engine.add(child)
    before = engine.stats()
    items = [rows(3, 22, 9, fork_of=1), rows(4, 22, *range(30), fork_of=1), rows(1, 5, 8)]
    with pytest.raises(OutOfBlocks):
        engine.step(items)
    assert engine.stats() == before
    assert [engine.cached_len(i) for i in (1, 3, 4)] == [23, 0, 0]
    engine.check_integrity()
    [result] = engine.step(items[:1])
    assert (result.token_ids, result.runner_ups[0]) == next_of(make, (*TEXT[:22], 9))


def test_many_at_random(make: Make) -> None:
    rng, engine = random.Random(4), make(True)
    texts: dict[int, tuple[int, ...]] = {1: TEXT}
    begin(engine, 1)
    for child in range(2, 60):
        if len(texts) > 4:
            gone = rng.choice(list(texts))
            engine.free(gone)
            del texts[gone]
        parent = rng.choice(list(texts))
        start = rng.randint(15, len(texts[parent]))
        engine.add(child)
        grown = rng.choice(list(texts))
        items = [
            rows(child, start, child, fork_of=parent),
            rows(grown, max(14, len(texts[grown]) - 3), 90, child),
        ]
        texts[child] = (*texts[parent][:start], child)
        texts[grown] = (*texts[grown][: items[1].start], 90, child)
        for item, result in zip(items, engine.step(items), strict=True):
            assert (result.token_ids, result.runner_ups[0]) == next_of(
                make, texts[item.sequence_id]
            )
        engine.check_integrity()


# -- of single engines ----------------------------------------------------------------------


def test_penalties_count_the_whole_text(make: Make) -> None:
    engine = make(True)
    if isinstance(engine, ScriptedEngine):
        return  # it knows none
    outcomes = []
    for is_fork in (False, True):
        engine = make(True)
        begin(engine, 1)
        engine.add(2)
        item = StepItem(2, 0, (*TEXT[:22], 9), 1, EVERYTHING, 12)
        if is_fork:
            item = replace(item, start=22, token_ids=(9,), fork_of=1)
        outcomes.append(engine.step([item])[0].token_ids)
    assert outcomes[0] == outcomes[1]


def test_blocks_are_shared_but_for_the_last(make: Make) -> None:
    engine = make(False)
    if isinstance(engine, ScriptedEngine):
        return  # counts blocks as if nobody shared any
    begin(engine, 1)
    num_free = engine.stats().num_free_blocks
    for child in range(2, 10):
        fork(engine, child, 1, 22, child)
    assert engine.stats().num_free_blocks == num_free - 8


def test_a_fork_keeps_its_parents_salt() -> None:
    engine = ToyEngine(INFO)
    engine.add(1)
    engine.step([replace(rows(1, 0, *TEXT), cache_salt=5)])
    engine.add(2)
    with pytest.raises(LocalProtocolError, match="salt"):
        engine.step([rows(2, 22, 9, fork_of=1)])
    engine.step([replace(rows(2, 22, 9, 10, 11, fork_of=1), cache_salt=5)])
    engine.add(3)
    [result] = engine.step([replace(rows(3, 0, *TEXT[:22], 9, 10, 1), cache_salt=5)])
    assert result.num_prefix_tokens == 24, "the block that the fork filled has its name"


def test_a_failed_pass_leaves_a_fork_empty(llama_folder: Path) -> None:
    config = ModelConfig(
        source="x", max_model_len=400, block_size=4, num_kv_blocks=NUM_BLOCKS, device="cpu"
    )
    engine = load_engine(config, llama_folder)
    assert isinstance(engine, TorchEngine)
    begin(engine, 1)
    engine.add(2)
    runner = engine._runner
    engine._runner = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        engine.step([rows(2, 22, 9, fork_of=1), rows(1, 10, 4)])
    engine._runner = runner
    assert (engine.cached_len(1), engine.cached_len(2)) == (10, 0)
    engine.check_integrity()
    engine.step([rows(2, 9, 9, fork_of=1)])
    engine.check_integrity()
