"""Grammars in `Engine.step`: each sampled row has the mask of the text before it, whatever came
before in that cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
from llguidance import LLMatcher

from paceline import grammars
from paceline.config import ModelConfig
from paceline.engine.base import Engine, Propose, StepItem, Verify
from paceline.engine.grammar_masks import GrammarMasks, _masks
from paceline.engine.loader import load_engine
from paceline.engine.scripted import ScriptedEngine
from paceline.engine.timed import TimedEngine
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.toy_rules import ToyRow, best_tokens, propose, verify
from paceline.errors import LocalProtocolError
from paceline.grammars import (
    GrammarState,
    TokenGrammars,
    allowed_token_ids,
    load_grammars,
)
from paceline.sampling.params import SamplingParams, VerificationMode
from tests.e2e.structured import GRAMMAR, save_model, toy
from tests.unit.engine.subjects import dense

torch.set_num_threads(1)

PROMPT = tuple(b"a shape: ")
GREEDY = SamplingParams(0.0, grammar=GRAMMAR)
COUPLED = SamplingParams(0.9, seed=4, repetition_penalty=1.1, grammar=GRAMMAR)
NUMBER = LLMatcher.grammar_from_regex("[1-9][0-9]{3,5}")
LAWS = [GREEDY, COUPLED, replace(COUPLED, grammar=NUMBER), replace(COUPLED, grammar="")]


@dataclass
class Subject:
    engine: Engine
    logits: Callable[[tuple[int, ...]], list[float]]  # where a grammar is followed
    plain_logits: Callable[[tuple[int, ...]], list[float]]

    @property
    def grammars(self) -> TokenGrammars:
        assert self.engine.info.grammars is not None
        return self.engine.info.grammars

    def row(self, text: tuple[int, ...], law: SamplingParams) -> ToyRow:
        """The row after all of `text`, by a state that has read it afresh."""
        prompt, output = text[: len(PROMPT)], text[len(PROMPT) :]
        if not law.grammar:
            return ToyRow(self.plain_logits(text), law, len(output), prompt, output)
        state = self.grammars.start(law.grammar)
        assert state.sync(output)
        allowed = allowed_token_ids(state.bitmask())
        return ToyRow(self.logits(text), law, len(output), prompt, output, allowed)

    def text(self, law: SamplingParams, length: int) -> tuple[int, ...]:
        """PROMPT and the first tokens of the output."""
        text = PROMPT
        for _ in range(length):
            text += (self.row(text, law).token(),)
        return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(params=["toy", "torch"])
def subject(request: pytest.FixtureRequest, folder: Path) -> Iterator[Subject]:
    if request.param == "toy":
        engine = toy()
        yield Subject(engine, engine.full_logits, engine.logits)
    else:
        config = ModelConfig(
            source=str(folder), max_model_len=256, block_size=4, num_kv_blocks=400, device="cpu"
        )
        loaded = load_engine(config, folder)
        width = loaded.info.vocab_size
        rows = dense(folder, width)
        yield Subject(loaded, lambda text: rows(text)[-1], lambda text: rows(text)[-1])


def verify_item(
    text: tuple[int, ...], start: int, drafts: tuple[int, ...], law: SamplingParams
) -> StepItem:
    return StepItem(
        sequence_id=1,
        start=start,
        token_ids=text[start:] + drafts,
        num_samples=1 + len(drafts),
        sampling=law,
        output_index=len(text) - len(PROMPT),
        num_runner_ups=2,
    )


@pytest.mark.parametrize("law", LAWS)
def test_rewinds_and_jumps_never_show(subject: Subject, law: SamplingParams) -> None:
    """Verify rows of right, wrong and forbidden proposals at places that go back and forth."""
    rng, engine = Random(2), subject.engine
    length = 5 if law.grammar == NUMBER else 24
    whole = subject.text(law, length)
    engine.add(1)
    cached = whole[:0]
    for _ in range(14):
        end = len(PROMPT) + rng.randrange(length)
        start = min(end - 1, rng.randrange(len(PROMPT) + length))
        start = min(start, sum(1 for _ in iter_common(cached, whole)))
        drafts = list(whole[end : end + rng.randrange(4)])
        if drafts and rng.random() < 0.6:
            drafts[rng.randrange(len(drafts))] = rng.randrange(engine.info.vocab_size)
        [result] = engine.step([verify_item(whole[:end], start, tuple(drafts), law)])
        cached = whole[:end] + tuple(drafts)
        for offset, token_id in enumerate(result.token_ids):
            prefix = whole[:end] + tuple(drafts[:offset])
            if law.grammar and not follows(subject, law, prefix):
                break
            row = subject.row(prefix, law)
            assert token_id == row.token()
            assert result.runner_ups[offset] == best_tokens(row, 3)[1:]
            if offset < len(drafts) and drafts[offset] != token_id:
                break  # what follows has no meaning
    engine.check_integrity()


def iter_common(one: tuple[int, ...], other: tuple[int, ...]) -> Iterator[int]:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return
        yield a


def follows(subject: Subject, law: SamplingParams, text: tuple[int, ...]) -> bool:
    return subject.grammars.start(law.grammar).sync(text[len(PROMPT) :])


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
def test_laws_are_stated_and_judged_under_the_grammar(
    subject: Subject, mode: VerificationMode
) -> None:
    engine, law = subject.engine, COUPLED
    text = subject.text(law, 3)
    engine.add(1)
    item = replace(verify_item(text, 0, (), law), num_runner_ups=0, rule=Propose(5))
    [first] = engine.step([item])
    token_id, stated = propose(subject.row(text, law), 5)
    assert (first.token_ids, first.draft_probs) == ((token_id,), (stated,))
    second, law_after = propose(subject.row((*text, token_id), law), 6)
    rule = Verify(mode, (stated, law_after), 7)
    drafts = (token_id, second)
    item = replace(verify_item(text, len(text) - 1, drafts, law), num_runner_ups=0, rule=rule)
    [judged] = engine.step([item])
    rows = [subject.row(text + drafts[:n], law) for n in range(3)]
    expected = verify(rows, drafts, rule)
    assert judged.num_accepted == expected.num_accepted_tokens == 2
    assert judged.token_ids == (*drafts, expected.next_token_id)


@pytest.mark.parametrize("law", [GREEDY, COUPLED])
def test_a_fork_goes_on_in_its_parents_grammar(subject: Subject, law: SamplingParams) -> None:
    engine = subject.engine
    text = subject.text(law, 8)
    engine.add(1)
    engine.step([verify_item(text, 0, (), law)])
    engine.add(2)
    other = best_tokens(subject.row(text, law), 2)[-1]
    branch = (*text, other)
    main = verify_item((*text, subject.row(text, law).token()), len(text), (), law)
    fork = replace(verify_item(branch, len(text), (), law), sequence_id=2, fork_of=1)
    results = engine.step([main, fork])
    assert results[0].token_ids == (subject.row(main_text(main, text), law).token(),)
    assert results[1].token_ids == (subject.row(branch, law).token(),)


def main_text(item: StepItem, text: tuple[int, ...]) -> tuple[int, ...]:
    return text[: item.start] + item.token_ids


def test_prefills_in_parts_and_from_the_prefix_cache(subject: Subject) -> None:
    engine = subject.engine
    text = subject.text(GREEDY, 12)
    for sequence_id in (1, 2):
        engine.add(sequence_id)
        start, result = 0, None
        while result is None or not result.token_ids:
            item = verify_item(text, start, (), GREEDY)
            [result] = engine.step([replace(item, sequence_id=sequence_id, max_rows=6)])
            start = result.cached_len or 0
        assert result.token_ids == (subject.row(text, GREEDY).token(),)
    assert engine.stats().num_prefix_tokens > 0


def test_states_live_as_long_as_their_sequences(subject: Subject) -> None:
    engine, text = subject.engine, PROMPT
    assert isinstance(engine, ToyEngine | TorchEngine)
    for sequence_id in range(5):
        engine.add(sequence_id)
        law = GREEDY if sequence_id % 2 else replace(GREEDY, grammar="")
        engine.step([replace(verify_item(text, 0, (), law), sequence_id=sequence_id)])
    assert len(engine._masks) == 2
    for sequence_id in range(5):
        engine.free(sequence_id)
    assert len(engine._masks) == 0


def test_an_id_that_serves_another_request_begins_anew() -> None:
    """Freed and used again, or given another grammar while it lives."""
    masks, text = GrammarMasks(load_grammars("toy")), PROMPT
    item = verify_item((*text, *b'{"kind'), 0, (), GREEDY)
    [mask] = masks.rows(item, ())
    assert mask is not None
    assert allowed_token_ids(mask) == [*b'"']
    [mask] = masks.rows(verify_item(text, 0, (), replace(GREEDY, grammar=NUMBER)), ())
    assert mask is not None
    assert allowed_token_ids(mask) == [*b"123456789"]


def test_rows_after_a_forbidden_proposal_have_no_mask() -> None:
    masks = GrammarMasks(load_grammars("toy"))
    law = replace(GREEDY, grammar=NUMBER)
    rows = masks.rows(verify_item(PROMPT, 0, (*b"12x4",), law), ())
    assert [row is None for row in rows] == [False, False, False, True, True]


def test_a_text_that_breaks_its_grammar_is_an_error_and_nothing_stays_of_it() -> None:
    masks = GrammarMasks(load_grammars("toy"))
    law = replace(GREEDY, grammar=NUMBER)
    with pytest.raises(ValueError, match="an output cannot be followed"):
        masks.rows(verify_item((*PROMPT, *b"x1"), 0, (*b"2",), law), ())
    assert len(masks) == 0
    [mask] = masks.rows(verify_item((*PROMPT, *b"1"), 0, (), law), ())
    assert mask is not None
    assert allowed_token_ids(mask) == [*b"0123456789"]


class Unread(GrammarState):
    """A matcher at a limit that it does not report."""

    def advance(self, token_id: int) -> bool:
        return False


def test_a_limit_that_looks_like_a_refusal_is_an_error() -> None:
    """The proposal is allowed, but the matcher cannot read it: no row after it may go unmasked."""
    toy = load_grammars("toy")
    state = Unread(toy.start(NUMBER)._matcher, toy.vocab_size, toy.eos_token_ids)
    assert len(_masks(state, (), b"x1")) == 1
    with pytest.raises(ValueError, match="a proposal cannot be followed"):
        _masks(state, (), b"11")


def test_a_limit_on_the_way_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "STEP_FUEL", 100)
    masks = GrammarMasks(load_grammars("toy"))
    words = "|".join(f"k{i}[a-z]{{1,{i}}}" for i in range(1, 60))
    law = replace(GREEDY, grammar=LLMatcher.grammar_from_lark(f'start: "xyz" w\nw: /{words}/'))
    [mask] = masks.rows(verify_item((*PROMPT, *b"xyz"), 0, (), law), ())
    assert mask is not None
    assert allowed_token_ids(mask) == [*b"k"]
    for text, drafts in ((b"", b"xyzk1"), (b"xyz", b"k1"), (b"xyzk", b""), (b"xyzk1", b"")):
        with pytest.raises(ValueError, match=r"cannot be followed|too many expressions"):
            masks.rows(verify_item((*PROMPT, *text), 0, tuple(drafts), law), ())


def test_without_grammars_nothing_is_masked() -> None:
    engine = toy(has_grammars=False)
    assert not engine.info.has_grammars
    engine.add(1)
    [result] = engine.step([verify_item(PROMPT, 0, (), GREEDY)])
    engine.add(2)
    plain = replace(verify_item(PROMPT, 0, (), replace(GREEDY, grammar="")), sequence_id=2)
    assert engine.step([plain])[0].token_ids == result.token_ids


def test_a_grammar_that_fails_changes_nothing(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass raises as if it had never begun, and goes through without that sequence."""
    engine = subject.engine
    bad, good = verify_item(PROMPT, 0, (), GREEDY), verify_item(PROMPT, 0, (), COUPLED)
    good = replace(good, sequence_id=2)
    engine.add(1)
    engine.add(2)
    before = engine.stats()
    with monkeypatch.context() as patch:
        patch.setattr(subject.grammars, "start", failing(subject.grammars, GREEDY.grammar))
        with pytest.raises(ValueError, match="too complex"):
            engine.step([good, replace(bad, sampling=replace(GREEDY, grammar="bad"))])
        assert engine.cached_len(1) == engine.cached_len(2) == 0
        assert engine.stats().num_free_blocks == before.num_free_blocks
        engine.check_integrity()
        [result] = engine.step([good])
    assert result.token_ids == (subject.row(PROMPT, COUPLED).token(),)


def failing(grammars: TokenGrammars, known: str) -> Callable[[str], object]:
    start = grammars.start

    def start_or_fail(grammar: str) -> object:
        if grammar != known:
            raise ValueError("too complex")
        return start(grammar)

    return start_or_fail


def test_engines_that_wrap_and_engines_that_cannot() -> None:
    timed = TimedEngine(toy(), base_ms=0.0)
    assert timed.info.has_grammars
    timed.add(1)
    [result] = timed.step([verify_item(PROMPT, 0, (), GREEDY)])
    assert result.token_ids == (ord("{"),)
    scripted = ScriptedEngine(toy(has_grammars=False).info)
    scripted.add(1)
    with pytest.raises(LocalProtocolError, match="only decodes greedily"):
        scripted.step([verify_item(PROMPT, 0, (), GREEDY)])
