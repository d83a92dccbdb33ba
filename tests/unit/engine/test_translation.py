"""Tokens of a target as tokens of a draft: the same bytes, cut where both can be cut."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.translation import MIN_COMMON_TOKENS, Translated, Translation
from paceline.engine.vocabulary import Vocabulary
from paceline.errors import ConfigError
from tests.unit.engine.two_tokenizers import TARGET_TEXT, save_tokenizers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vocabulary, Vocabulary]:
    folders = save_tokenizers(tmp_path_factory.mktemp("tokenizers"))
    return Vocabulary(folders["draft"]), Vocabulary(folders["target"])


@pytest.fixture(scope="module")
def translation(pair: tuple[Vocabulary, Vocabulary]) -> Translation:
    return Translation(*pair)


def check(pair: tuple[Vocabulary, Vocabulary], token_ids: list[int], made: Translated) -> None:
    """Both texts agree as a whole, and up to every cut."""
    draft, target = pair
    assert (made.marks[-1], made.places[-1]) == (len(token_ids), len(made.token_ids))
    for cuts in (made.marks, made.places):
        assert all(one < other for one, other in pairwise([0, *cuts]))
    for mark, place in zip(made.marks, made.places, strict=True):
        written = draft.decode(made.token_ids[:place])
        assert written == draft.known(target.decode(token_ids[:mark]))


def test_common_tokens_write_the_same(
    pair: tuple[Vocabulary, Vocabulary], translation: Translation
) -> None:
    draft, target = pair
    for mine, theirs in zip(translation.draft_ids, translation.target_ids, strict=True):
        assert draft.token_bytes[mine] == target.token_bytes[theirs]
    assert list(translation.target_ids) == sorted(set(translation.target_ids))
    assert len(set(translation.draft_ids)) == len(translation.draft_ids)
    both = set(draft.token_bytes) & set(target.token_bytes)
    assert translation.overlap.num_common == len(both) == len(translation.draft_ids)
    # Control tokens: the one that both have, and no other.
    common = set(translation.target_ids)
    assert {text for text, i in target.specials.items() if i in common} == {"<|end|>"}
    assert 256 < translation.overlap.num_common < draft.size
    assert translation.overlap.draft_share == translation.overlap.num_common / draft.size
    assert translation.overlap.target_share == translation.overlap.num_common / target.size


@given(st.data())
def test_any_ids_are_the_same_bytes(
    pair: tuple[Vocabulary, Vocabulary], translation: Translation, data: st.DataObject
) -> None:
    ids = st.integers(0, pair[1].size - 1)
    token_ids = data.draw(st.lists(ids, min_size=1, max_size=30))
    num_apart = data.draw(st.integers(0, len(token_ids)))
    made = translation.translate(token_ids, num_apart=num_apart)
    check(pair, token_ids, made)
    assert set(range(len(token_ids) - num_apart + 1, len(token_ids) + 1)) <= set(made.marks)


@given(text=st.text(min_size=1, max_size=40))
def test_any_text_is_the_same_text(
    pair: tuple[Vocabulary, Vocabulary], translation: Translation, text: str
) -> None:
    token_ids = pair[1].encode(text.encode())
    made = translation.translate(token_ids)
    check(pair, token_ids, made)
    assert pair[0].decode(made.token_ids).decode() == text
    assert made.token_ids == pair[0].encode(text.encode())


def test_control_tokens(pair: tuple[Vocabulary, Vocabulary], translation: Translation) -> None:
    """The common one stays one, in any place; another is text as it is spelt."""
    draft, target = pair
    end, user = target.specials["<|end|>"], target.specials["<|user|>"]
    text = target.encode(TARGET_TEXT[0].encode())
    token_ids = [end, end, *text, end, user, *text]
    made = translation.translate(token_ids)
    theirs = draft.specials["<|end|>"]
    assert made.token_ids.count(theirs) == 3
    assert made.token_ids[:2] == [theirs] * 2
    check(pair, token_ids, made)
    assert b"<|user|>" in draft.decode(made.token_ids)
    assert draft.specials["<|start|>"] not in translation.translate([user]).token_ids


def test_an_id_without_an_entry_is_something_to_read(
    pair: tuple[Vocabulary, Vocabulary],
) -> None:
    draft, target = pair
    wider = Translation(draft, target, target_size=target.size + 2)
    made = wider.translate([target.size + 1], num_apart=1)
    assert draft.decode(made.token_ids).decode() == "\ufffd"


def test_a_text_begins_as_the_draft_knows_it(
    pair: tuple[Vocabulary, Vocabulary], translation: Translation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it does already."""
    draft, target = pair
    text = target.encode(b"the sea")
    plain = translation.translate(text)
    monkeypatch.setattr(draft, "bos_token_ids", (draft.specials["<|end|>"],))
    made = translation.translate(text, is_start=True)
    assert made.token_ids == [draft.specials["<|end|>"], *plain.token_ids]
    assert made.places == [place + 1 for place in plain.places]
    begun = [target.specials["<|end|>"], *text]
    assert translation.translate(begun, is_start=True).token_ids == made.token_ids


def test_what_may_be_proposed_is_bounded_on_both_sides(
    pair: tuple[Vocabulary, Vocabulary], translation: Translation
) -> None:
    few = set(random.Random(3).sample(translation.draft_ids, MIN_COMMON_TOKENS))
    assert set(Translation(*pair, allowed_draft_ids=few).draft_ids) == few
    size = translation.target_ids[-1]
    cut = Translation(*pair, target_size=size)
    assert cut.target_ids == translation.target_ids[:-1]


def test_too_little_in_common(
    pair: tuple[Vocabulary, Vocabulary], translation: Translation
) -> None:
    few = translation.draft_ids[: MIN_COMMON_TOKENS - 1]
    with pytest.raises(ConfigError, match=f"{len(few)} tokens in common"):
        Translation(*pair, allowed_draft_ids=few)


def test_share_of_a_text(pair: tuple[Vocabulary, Vocabulary], translation: Translation) -> None:
    token_ids = pair[1].encode(TARGET_TEXT[0].encode())
    num_common = sum(token_id in translation.target_ids for token_id in token_ids)
    assert 0 < num_common < len(token_ids)
    assert translation.share_of(TARGET_TEXT[0]) == num_common / len(token_ids)
    assert translation.share_of("") == 0
