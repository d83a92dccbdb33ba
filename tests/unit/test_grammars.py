"""Masks against brute force, states that follow any output, and what a grammar may cost."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from llguidance import LLMatcher

from paceline import grammars, models
from paceline.grammars import GrammarState, TokenGrammars, allowed_token_ids, load_grammars
from tests.e2e.structured import GRAMMAR, problem, save_tokenizer, text_of

EOS = models.TOY_EOS_TOKEN_ID
REGEX = LLMatcher.grammar_from_regex("(ab*c|a[0-9]{2}é)!?")
LARK = LLMatcher.grammar_from_lark('start: "<" item* ">"\nitem: start | /[a-c]/')
GRAMMARS = {"json": GRAMMAR, "regex": REGEX, "lark": LARK}


@pytest.fixture(scope="module")
def toy() -> TokenGrammars:
    return load_grammars("toy")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> TokenGrammars:
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_grammars(str(folder), save_tokenizer(folder), (0, 2))


@pytest.fixture(params=["toy", "real"])
def some(request: pytest.FixtureRequest) -> TokenGrammars:
    tokens: TokenGrammars = request.getfixturevalue(request.param)
    return tokens


def walk(state: GrammarState, eos: tuple[int, ...], seed: int, limit: int = 80) -> list[int]:
    """A random text that the grammar allows; it takes the end when it can."""
    chance, text = Random(seed), list[int]()
    while len(text) < limit and not set(text) & set(eos):
        allowed = allowed_token_ids(state.bitmask())
        ends = [i for i in allowed if i in eos]
        text.append(ends[0] if ends and chance.random() < 0.5 else chance.choice(allowed))
        assert state.advance(text[-1])
    return text


def test_the_bytes_are_the_models_own() -> None:
    toy = load_grammars("timed")
    assert toy.vocab_size == models.TOY_VOCAB_SIZE
    assert toy.eos_token_ids == (models.TOY_EOS_TOKEN_ID,)
    assert {"toy", "timed"} == set(models.BUILTIN_SOURCES)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_is_what_one_token_after_the_other_would_be(some: TokenGrammars, name: str) -> None:
    """Every id of the vocabulary is tried on a state that has read the text afresh."""
    grammar = GRAMMARS[name]
    for seed in range(3):
        text = walk(some.start(grammar), some.eos_token_ids, seed)
        for length in sorted({0, 1, len(text) // 2, len(text) - 1}):
            fresh = some.start(grammar)
            assert fresh.sync(text[:length])
            allowed = allowed_token_ids(fresh.bitmask())
            tried = [i for i in range(some.vocab_size) if fresh.copy().advance(i)]
            if some.vocab_size > 257 and len(allowed) == 1:
                # of the one text that can come next only the usual tokens are allowed
                assert allowed[0] in tried
            else:
                assert allowed == tried, (name, seed, length)


def test_what_a_mask_allows_leads_to_a_valid_end(toy: TokenGrammars) -> None:
    for seed in range(20):
        text = walk(toy.start(GRAMMAR), toy.eos_token_ids, seed, limit=400)
        assert text[-1] == EOS
        assert problem(text_of(text)) == "", text_of(text)


def test_any_of_the_eos_ids_ends_a_text(real: TokenGrammars) -> None:
    state = real.start(LLMatcher.grammar_from_regex("a"))
    assert state.sync(allowed_token_ids(state.bitmask())[:1])
    assert allowed_token_ids(state.bitmask()) == [0, 2]


def test_eos_is_allowed_where_the_grammar_accepts_and_nowhere_else(toy: TokenGrammars) -> None:
    state = toy.start(LLMatcher.grammar_from_regex("ab*c|ab*"))
    assert allowed_token_ids(state.bitmask()) == [*b"a"]
    assert state.sync(b"a")
    assert allowed_token_ids(state.bitmask()) == [*b"bc", EOS]
    assert state.sync(b"abc")
    assert allowed_token_ids(state.bitmask()) == [EOS]
    assert state.sync([*b"abc", EOS])
    assert allowed_token_ids(state.bitmask()) == [EOS]  # nobody asks: the text is over
    assert state.sync(b"ab")
    assert allowed_token_ids(state.bitmask()) == [*b"bc", EOS]


def test_a_state_follows_any_output(some: TokenGrammars) -> None:
    """Rewinds, other ways and jumps: always the mask of a state that read only that output."""
    texts = [walk(some.start(GRAMMAR), some.eos_token_ids, seed) for seed in range(6)]
    state, chance = some.start(GRAMMAR), Random(1)
    for _ in range(120):
        text = chance.choice(texts)
        output = text[: chance.randrange(len(text) + 1)]
        assert state.sync(output)
        fresh = some.start(GRAMMAR)
        assert fresh.sync(output)
        assert state.bitmask() == fresh.bitmask()
        if chance.random() < 0.3:
            state = state.copy()


def test_a_token_that_is_forbidden_changes_nothing(toy: TokenGrammars) -> None:
    state = toy.start(REGEX)
    assert state.sync(b"ab")
    before = state.bitmask()
    assert not state.advance(ord("x"))
    assert not state.advance(EOS)
    assert state.bitmask() == before
    assert state.advance(ord("c"))


def test_a_copy_goes_its_own_way(toy: TokenGrammars) -> None:
    state = toy.start(REGEX)
    assert state.sync(b"a")
    copy = state.copy()
    assert copy.sync(b"a1")
    assert allowed_token_ids(state.bitmask()) == [*b"0123456789", *b"bc"]
    assert allowed_token_ids(copy.bitmask()) == [*b"0123456789"]


def test_an_output_that_breaks_its_grammar_is_known(toy: TokenGrammars) -> None:
    state = toy.start(REGEX)
    assert not state.sync(b"abx")
    assert state.sync(b"ab")
    assert not state.sync([*b"ab", EOS])
    toy.check(REGEX, b"ab")
    with pytest.raises(ValueError, match="the output so far breaks it"):
        toy.check(REGEX, b"abx")


def test_where_nothing_can_come_next_the_text_may_end(tmp_path: Path) -> None:
    """The vocabulary is cut below the only tokens that the grammar could go on with."""
    save_tokenizer(tmp_path)
    cut = load_grammars(str(tmp_path), 20, (0,))
    mask = cut.start(LLMatcher.grammar_from_regex("zz")).bitmask()
    assert (allowed_token_ids(mask), len(mask)) == ([0], 3)


def test_ids_beyond_the_vocabulary_are_never_allowed(tmp_path: Path) -> None:
    size = save_tokenizer(tmp_path)
    anything = LLMatcher.grammar_from_regex("(.|\n)*")
    whole = load_grammars(str(tmp_path), size, (0,)).start(anything).bitmask()
    cut = load_grammars(str(tmp_path), size - 21, (0,)).start(anything).bitmask()
    wide = load_grammars(str(tmp_path), size + 40, (0,)).start(anything).bitmask()
    allowed = allowed_token_ids(whole)
    assert max(allowed) == size - 1
    assert allowed_token_ids(cut) == [i for i in allowed if i < size - 21]
    assert allowed_token_ids(wide) == allowed


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "empty"),
        ("no grammar (", "."),
        ('{"grammars":[]}', "."),
        (json.dumps({"grammars": [{"json_schema": {"type": "colour"}}]}), "colour"),
        (LLMatcher.grammar_from_regex("(a"), "."),
        (LLMatcher.grammar_from_json_schema({"type": "string", "format": "odd"}), "odd"),
        ("\ud800", "UTF-8"),
        ("start: " + '"a" ' * 400_000, "."),
        (LLMatcher.grammar_from_lark("start: x" + "\nx: y y y" * 3), "."),
    ],
)
def test_a_bad_grammar_is_one_sentence(toy: TokenGrammars, grammar: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        toy.check(grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 310
    toy.check(REGEX)  # and it has harmed nothing


def test_a_folder_without_a_usable_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be used for grammars"):
        load_grammars(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be used for grammars"):
        load_grammars(str(tmp_path))


def test_compiled_grammars_are_kept_up_to_a_limit() -> None:
    toy = load_grammars("toy")
    toy.check(REGEX)
    kept = toy._compiled[REGEX]
    for i in range(3 * grammars.MAX_COMPILED_GRAMMARS):
        toy.check(LLMatcher.grammar_from_regex(f"a{i}"))
        toy.check(REGEX)
    assert toy.num_compiled == grammars.MAX_COMPILED_GRAMMARS
    assert toy._compiled[REGEX] is kept  # it was never the one not used longest


LIMITS = (
    "COMPILE_FUEL",
    "MAX_GRAMMAR_SYMBOLS",
    "STEP_FUEL",
    "MAX_LEXER_STATES",
    "STEP_MAX_ITEMS",
)


@pytest.mark.parametrize("name", LIMITS)
def test_a_grammar_may_not_cost_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A far smaller limit refuses, or ends, what the real one lets by."""
    strings = {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,50}}{i}$"} for i in range(300)}
    wide = LLMatcher.grammar_from_json_schema({"type": "object", "properties": strings})
    output = b'{"p1":"abc1","p2":"zz2"'

    def follow() -> None:
        state = load_grammars("toy").start(wide)
        for length in range(len(output) + 1):
            assert state.sync(output[:length])
            state.bitmask()

    follow()
    monkeypatch.setattr(grammars, name, 50)
    with pytest.raises(ValueError, match=r"oo (big|many)"):
        follow()
