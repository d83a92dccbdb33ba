"""Safety checks find what they are for: every kind of wrong answer, and no right one."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.checks import examine, median_gap_s, misaligned
from chaos.traffic import TRANSPORT, Outcome, Request


def outcome(text: str = "abcdef", **fields: Any) -> Outcome:
    request = Request(0, "/v1/completions", {"stream": True})
    return Outcome(request, texts=[text], tokens=[[]], **{"is_done": True, **fields})


REFERENCE = [outcome()]


def test_equal_texts_are_identical() -> None:
    found = examine([outcome(), outcome()], REFERENCE)
    assert (found.requests, found.finished, found.failed) == (2, 2, 0)
    assert found.text_identical
    assert (found.tokens_lost, found.tokens_duplicated, found.tokens_compared) == (0, 0, 12)


@pytest.mark.parametrize(
    ("text", "lost", "duplicated"),
    [
        ("abdef", 1, 0),
        ("abccdef", 0, 1),
        ("abcXef", 1, 1),
        ("abc", 3, 0),  # cut off, and called whole
        ("abcdefabc", 0, 3),
        ("", 6, 0),
    ],
)
def test_lost_repeated_and_changed_tokens_are_counted(
    text: str, lost: int, duplicated: int
) -> None:
    found = examine([outcome(text)], REFERENCE)
    assert not found.text_identical
    assert (found.tokens_lost, found.tokens_duplicated) == (lost, duplicated)


def test_an_unfinished_text_must_be_a_beginning() -> None:
    good = outcome("abc", is_done=False, has_left=True)
    assert examine([good], REFERENCE).text_identical
    bad = outcome("abd", is_done=False, has_left=True)
    assert not examine([bad], REFERENCE).text_identical


def test_failures_by_code_and_without_one() -> None:
    lost = outcome("ab", is_done=False, error=TRANSPORT)
    clean = outcome("", is_done=False, error="target_lost")
    found = examine([lost, clean], REFERENCE)
    assert (found.failed, found.unclean) == (2, 1)
    assert found.errors == {TRANSPORT: 1, "target_lost": 1}
    assert found.text_identical


def test_tokens_are_aligned_when_there_are_any() -> None:
    """Two tokens that write the same characters as one are another stream of tokens."""
    request = Request(0, "/v1/completions", {})
    wanted = Outcome(request, texts=["ab"], tokens=[["a", "b"]], is_done=True)
    got = Outcome(request, texts=["ab"], tokens=[["a"]], is_done=True)
    assert examine([got], [wanted]).tokens_lost == 1


def test_alignment_of_a_repeated_round() -> None:
    assert misaligned("the cat cat sat", "the cat sat") == (0, 4)
    assert misaligned("the sat", "the cat sat") == (4, 0)


def test_gaps() -> None:
    found = examine([outcome(gaps=[0.1, 0.7]), outcome(gaps=[0.2])], REFERENCE)
    assert found.worst_stall_s == 0.7
    assert median_gap_s([outcome(gaps=[0.1, 0.3]), outcome(gaps=[0.2])]) == 0.2
    assert median_gap_s([outcome()]) == 0.0
