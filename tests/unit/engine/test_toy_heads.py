"""Medusa heads of engines without weights: mostly right, never a token's business."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.config import ModelConfig
from paceline.engine.base import Engine, EngineInfo, StepItem, StepResult, Verify
from paceline.engine.loader import load_engine
from paceline.engine.scripted import ScriptedEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.toy_heads import guesses
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams, VerificationMode
from tests.unit.engine.subjects import COUPLED, EVERYTHING, GREEDY, law_around

PROMPT = (3, 1, 4, 1, 5)
LENGTH = 300
INFO = EngineInfo("x", 101, max_model_len=1024, block_size=4, num_blocks=1024, num_heads=3)


def make(kind: str, error_rate: float = 0.2, num_heads: int = 3) -> Engine:
    info = replace(INFO, num_heads=num_heads, adapters=("a",))
    made = {"toy": ToyEngine, "scripted": ScriptedEngine}[kind]
    engine: Engine = made(info, head_error_rate=error_rate)
    return engine


def text(
    engine: Engine, sampling: SamplingParams, candidates: int, adapter: str = ""
) -> list[StepResult]:
    """Token after token."""
    engine.add(1)
    results: list[StepResult] = []
    last, start = PROMPT, 0
    for index in range(LENGTH):
        item = StepItem(1, start, last, 1, sampling, index, adapter=adapter)
        results += engine.step([replace(item, num_head_candidates=candidates)])
        start, last = start + len(last), results[-1].token_ids
    engine.free(1)
    engine.check_integrity()
    return results


@pytest.mark.parametrize("kind", ["toy", "scripted"])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_mostly_right(kind: str, sampling: SamplingParams) -> None:
    if kind == "scripted" and not sampling.is_greedy:
        pytest.skip("scripted engines only decode greedily")
    results = text(make(kind), sampling, 3)
    committed = [result.token_ids[0] for result in results]
    for head in range(3):
        pairs = [
            (committed[place + 1 + head], results[place].head_token_ids[head])
            for place in range(LENGTH - 1 - head)
        ]
        firsts = sum(token_id == ids[0] for token_id, ids in pairs) / len(pairs)
        found = sum(token_id in ids for token_id, ids in pairs) / len(pairs)
        assert 0.7 < firsts < 0.9
        assert firsts + 0.04 < found < 0.97
        assert all(len(ids) == len(set(ids)) <= 3 for _, ids in pairs)


@pytest.mark.parametrize("kind", ["toy", "scripted"])
def test_as_good_as_they_are_told_to_be(kind: str) -> None:
    results = text(make(kind, error_rate=0.0), GREEDY, 1)
    committed = [result.token_ids[0] for result in results]
    for place in range(LENGTH - 3):
        ahead = tuple((token_id,) for token_id in committed[place + 1 : place + 4])
        assert results[place].head_token_ids == ahead
    never = text(make(kind, error_rate=1.0), GREEDY, 1)
    wrong = [never[i].head_token_ids[0][0] != committed[i + 1] for i in range(LENGTH - 1)]
    assert sum(wrong) > 0.95 * LENGTH


@pytest.mark.parametrize("kind", ["toy", "scripted"])
def test_they_change_no_token(kind: str) -> None:
    plain, asked = text(make(kind, num_heads=0), GREEDY, 0), text(make(kind), GREEDY, 4)
    assert [result.token_ids for result in plain] == [result.token_ids for result in asked]
    assert not any(result.head_token_ids for result in plain)
    if kind == "toy":
        plain = text(make(kind, num_heads=0), EVERYTHING, 0)
        asked = text(make(kind), EVERYTHING, 4)
        assert [result.token_ids for result in plain] == [result.token_ids for result in asked]


@pytest.mark.parametrize("kind", ["toy", "scripted"])
def test_behind_what_is_accepted(kind: str) -> None:
    """Of a chain with a wrong proposal: the guesses of a step by step run at that place."""
    results = text(make(kind), GREEDY, 3)
    committed = [result.token_ids[0] for result in results]
    for num_right in range(4):
        proposals = [*committed[:num_right], *((i + 1) % 101 for i in committed[num_right:3])]
        engine = make(kind)
        engine.add(1)
        item = StepItem(1, 0, (*PROMPT, *proposals), 4, GREEDY, num_head_candidates=3)
        [result] = engine.step([item])
        assert result.head_token_ids == results[num_right].head_token_ids


def test_behind_what_is_accepted_by_laws() -> None:
    steps = [result.token_ids[0] for result in text(make("toy"), COUPLED, 0)]
    engine = make("toy", error_rate=0.0)
    engine.add(1)
    laws = tuple(law_around(token_id, 1) for token_id in steps[:2])
    rule = Verify(VerificationMode.REJECTION, laws, 1)
    item = StepItem(1, 0, (*PROMPT, *steps[:2]), 3, COUPLED, 0, rule, num_head_candidates=1)
    [result] = engine.step([item])
    assert result.num_accepted is not None
    later = make("toy", error_rate=0.0)
    later.add(1)
    whole = (*PROMPT, *result.token_ids)
    guessed = []
    for index in range(result.num_accepted + 1, result.num_accepted + 4):
        [after] = later.step([StepItem(1, 0, whole, 1, COUPLED, index)])
        guessed.append(after.token_ids)
        whole += after.token_ids
    assert result.head_token_ids == tuple(guessed)


def test_heads_of_an_adapter() -> None:
    results = text(make("toy", error_rate=0.0), COUPLED, 1, "a")
    assert [r.token_ids for r in results] != [r.token_ids for r in text(make("toy"), COUPLED, 0)]
    for place in range(LENGTH - 1):
        assert results[place].head_token_ids[0] == results[place + 1].token_ids


@pytest.mark.parametrize("kind", ["toy", "scripted"])
def test_refused(kind: str) -> None:
    engine = make(kind, num_heads=0)
    engine.add(1)
    with pytest.raises(LocalProtocolError, match="there are no heads"):
        engine.step([StepItem(1, 0, (1,), 1, GREEDY, num_head_candidates=1)])


def test_the_configured_quality() -> None:
    for rate, right in ((0.0, LENGTH - 1), (1.0, 0)):
        model = ModelConfig(toy_head_error_rate=rate)
        results = text(load_engine(model, medusa="toy"), GREEDY, 1)
        hits = [one.head_token_ids[0] == other.token_ids for one, other in pairwise(results)]
        assert sum(hits) == right


def test_where_the_right_one_is() -> None:
    best, half = (7, 8, 9, 10), 1 << 63
    assert guesses(best, half, 0.5, 2) == (7, 8)
    assert guesses(best, half - 1, 0.5, 2) == (8, 7)
    assert guesses(best, (half >> 1) - 1, 0.5, 3) == (8, 9, 10)
    assert guesses((7,), 0, 1.0, 3) == (7,)
