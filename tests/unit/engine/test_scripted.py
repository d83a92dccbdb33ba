from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.engine.base import EngineInfo, OutOfBlocks, Propose, StepItem, StepResult
from paceline.engine.scripted import Phase, Script, ScriptedEngine
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
INFO = EngineInfo("scripted", vocab_size=1000, max_model_len=4096, block_size=4, num_blocks=4096)
PROMPT = (7, 3, 5)


def engine(script: Script | None = None, *, seed: int = 0, **info: int) -> ScriptedEngine:
    return ScriptedEngine(replace(INFO, **info), script, seed=seed)


def write(target: ScriptedEngine, num_tokens: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """What the target writes behind the prompt, one token a pass."""
    target.add(1)
    text = list(prompt)
    result = target.step([StepItem(1, 0, prompt, 1, GREEDY)])[0]
    for _ in range(num_tokens - 1):
        text.append(result.token_ids[0])
        result = target.step([StepItem(1, len(text) - 1, (text[-1],), 1, GREEDY)])[0]
    target.free(1)
    return [*text[len(prompt) :], result.token_ids[0]]


def guess(script: Script, num_runner_ups: int, prompt: tuple[int, ...] = PROMPT) -> StepResult:
    """What a draft of `script` says at each of the 4000 positions of the target's text."""
    text = write(engine(), 4000, prompt)
    draft = engine(script)
    draft.add(1)
    rows = (*prompt, *text[:-1])
    item = StepItem(1, 0, rows, len(text), GREEDY, num_runner_ups=num_runner_ups)
    return draft.step([item])[0]


def agreement(guessed: StepResult, text: list[int]) -> list[bool]:
    return [a == b for a, b in zip(guessed.token_ids, text, strict=True)]


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def test_a_text_is_the_same_however_it_is_computed() -> None:
    text = write(engine(), 40)
    whole = engine()
    whole.add(1)
    rows = (*PROMPT, *text)
    assert list(whole.step([StepItem(1, 0, rows, 41, GREEDY)])[0].token_ids[:40]) == text
    # A rewind over wrong proposals, then the right ones.
    whole.step([StepItem(1, 10, (1, 2, 3), 3, GREEDY)])
    again = whole.step([StepItem(1, 10, rows[10:20], 10, GREEDY)])[0]
    assert list(again.token_ids) == text[8:18]
    assert whole.cached_len(1) == 20


def test_texts_differ_by_prompt_and_by_seed() -> None:
    texts = [write(engine(), 20), write(engine(seed=1), 20), write(engine(), 20, (7, 3, 6))]
    assert len({tuple(text) for text in texts}) == 3
    assert len(set(texts[0])) > 15


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
def test_the_draft_agrees_as_often_as_the_script_says(acceptance: float) -> None:
    text = write(engine(), 4000)
    hits = agreement(guess(Script.steady(acceptance), 0), text)
    assert share(hits) == pytest.approx(acceptance, abs=0.025)
    if 0.0 < acceptance < 1.0:
        # Independent of the position before.
        after_hit = [b for a, b in pairwise(hits) if a]
        assert share(after_hit) == pytest.approx(acceptance, abs=0.03)


def test_runner_ups_hold_the_correction_as_often_as_the_script_says() -> None:
    text = write(engine(), 4000)
    result = guess(Script.steady(0.5, (0.5, 0.7)), 2)
    rows = list(zip(result.token_ids, result.runner_ups, text, strict=True))
    missed = [(ups, truth) for token_id, ups, truth in rows if token_id != truth]
    assert share([ups[0] == truth for ups, truth in missed]) == pytest.approx(0.5, abs=0.04)
    assert share([truth in ups for ups, truth in missed]) == pytest.approx(0.7, abs=0.04)
    assert all(len({token_id, *ups}) == 3 for token_id, ups, _ in rows)
    assert not any(truth in ups for token_id, ups, truth in rows if token_id == truth)
    first = guess(Script.steady(0.5, (0.5, 0.7)), 1)
    assert first.runner_ups == tuple(ups[:1] for ups in result.runner_ups)
    assert guess(Script.steady(0.5, (0.5, 0.7)), 0).runner_ups == ()


def test_a_class_goes_through_its_phases() -> None:
    script = Script(((Phase(1, 0.0),), (Phase(10, 1.0), Phase(5, 0.0))))
    for prompt, period in (((6, 1), [False] * 15), ((7, 1), [True] * 10 + [False] * 5)):
        text = write(engine(), 4000, prompt)
        hits = agreement(guess(script, 0, prompt), text)
        assert hits[:45] == period * 3


def test_a_prefill_stops_at_its_rows_and_finds_whole_blocks_again() -> None:
    subject, prompt = engine(), tuple(range(20, 31))
    subject.add(1)
    assert subject.step([StepItem(1, 0, prompt, 1, GREEDY, max_rows=5)]) == [StepResult(1, (), 5)]
    done = subject.step([StepItem(1, 5, prompt[5:], 1, GREEDY, max_rows=99)])[0]
    assert (done.cached_len, done.num_prefix_tokens) == (11, 0)
    subject.add(2)
    found = subject.step([StepItem(2, 0, prompt, 1, GREEDY, max_rows=2)])[0]
    assert (found.token_ids, found.cached_len, found.num_prefix_tokens) == ((), 10, 8)
    found = subject.step([StepItem(2, 10, prompt[10:], 1, GREEDY)])[0]
    assert found.token_ids == done.token_ids
    stats = subject.stats()
    assert (stats.num_passes, stats.num_rows, stats.num_prefix_tokens) == (4, 14, 8)


def test_the_last_row_is_computed_even_if_its_block_is_known() -> None:
    subject, prompt = engine(), tuple(range(20, 28))
    for sequence_id, num_found in ((1, 0), (2, 4)):
        subject.add(sequence_id)
        result = subject.step([StepItem(sequence_id, 0, prompt, 1, GREEDY, max_rows=99)])[0]
        assert (result.num_prefix_tokens, len(result.token_ids)) == (num_found, 1)


def test_the_prefix_cache_forgets_the_oldest() -> None:
    subject = engine(num_blocks=2)
    for index in range(3):
        subject.add(index)
        subject.step([StepItem(index, 0, (index, 1, 2, 3), 1, GREEDY)])
        subject.free(index)
    for index, num_found in ((2, 4), (0, 0)):
        subject.add(9)
        item = StepItem(9, 0, (index, 1, 2, 3, 4), 1, GREEDY, max_rows=99)
        assert subject.step([item])[0].num_prefix_tokens == num_found
        subject.free(9)


def test_blocks_are_taken_given_back_and_never_overdrawn() -> None:
    subject = engine(num_blocks=4)
    subject.add(1)
    subject.add(2)
    subject.step([StepItem(1, 0, tuple(range(9)), 1, GREEDY)])
    assert subject.stats().num_free_blocks == 1
    assert subject.can_fit([(1, 16)])
    assert not subject.can_fit([(1, 16), (2, 1)])
    with pytest.raises(OutOfBlocks):
        subject.step([StepItem(1, 9, (1, 2), 1, GREEDY), StepItem(2, 0, (1,) * 5, 1, GREEDY)])
    assert (subject.cached_len(1), subject.cached_len(2)) == (9, 0)
    subject.check_integrity()
    subject.step([StepItem(1, 2, (1,), 1, GREEDY), StepItem(2, 0, (1,) * 9, 1, GREEDY)])
    assert subject.stats().num_free_blocks == 0
    subject.free(2)
    subject.free(2)
    assert subject.stats().num_free_blocks == 3
    subject.check_integrity()


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (StepItem(9, 0, (1,), 1, GREEDY), "unknown"),
        (StepItem(1, 4, (1,), 1, GREEDY), "3 are cached"),
        (StepItem(1, 0, (), 0, GREEDY), "0 rows"),
        (StepItem(1, 0, (1,), 2, GREEDY), "2 samples"),
        (StepItem(1, 0, (1000,), 1, GREEDY), "outside"),
        (StepItem(1, 0, (1,) * 4097, 1, GREEDY), "max_model_len"),
        (StepItem(1, 0, (1,), 1, GREEDY, max_rows=0), "0 rows"),
        (StepItem(1, 0, (1,), 1, SamplingParams(temperature=1.0)), "greedily"),
        (StepItem(1, 0, (1,), 1, replace(GREEDY, presence_penalty=0.5)), "greedily"),
        (StepItem(1, 0, (1,), 1, GREEDY, rule=Propose(1)), "greedily"),
        (StepItem(1, 0, (1,), 1, GREEDY, num_logprobs=1), "log-prob"),
        (StepItem(1, 0, (1,), 1, GREEDY, cache_salt=1), "salts"),
    ],
)
def test_what_it_cannot_do_is_refused_and_changes_nothing(item: StepItem, problem: str) -> None:
    subject = engine()
    subject.add(1)
    subject.add(2)
    subject.step([StepItem(1, 0, PROMPT, 1, GREEDY)])
    before = subject.stats()
    with pytest.raises(LocalProtocolError, match=problem):
        subject.step([StepItem(2, 0, PROMPT, 1, GREEDY), item])
    assert subject.stats() == before
    assert subject.cached_len(2) == 0


def test_a_sequence_is_in_a_pass_once_and_added_once() -> None:
    subject = engine()
    subject.add(1)
    with pytest.raises(LocalProtocolError, match="exists"):
        subject.add(1)
    with pytest.raises(LocalProtocolError, match="twice"):
        subject.step([StepItem(1, 0, PROMPT, 1, GREEDY)] * 2)


@pytest.mark.parametrize(
    ("classes", "corrections"),
    [
        ((), ()),
        (((),), ()),
        (((Phase(1, 1.5),),), ()),
        (((Phase(0, 0.5),),), ()),
        (((Phase(1 << 17, 0.5),),), ()),
        (((Phase(1, 0.5),),), (0.5, 0.4)),
        (((Phase(1, 0.5),),), (1.5,)),
    ],
)
def test_scripts_that_make_no_sense_are_refused(
    classes: tuple[tuple[Phase, ...], ...], corrections: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match=r"script needs|phase needs|phases of|must rise"):
        Script(classes, corrections)
