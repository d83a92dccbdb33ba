"""Rejections put together to the texts that they were in."""

from __future__ import annotations

import json
import random
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.rejection_texts import (
    KEPT,
    Rejected,
    RejectedText,
    gather_rejections,
    kept_rejections,
)
from paceline.engine.student import REJECTION_WEIGHT, Example
from paceline.errors import ConfigError
from tests.unit.engine.rejection_lines import line, write_lines

TEXT = tuple(range(20, 60))


def gathered(tmp_path: Path, rows: list[dict[str, Any]], length: int = 50) -> Rejected:
    return gather_rejections([write_lines(tmp_path / "log", rows)], length, 1000)


@pytest.mark.parametrize("window", [4, 100])
def test_one_answer_is_one_text(tmp_path: Path, window: int) -> None:
    found = gathered(tmp_path, [line(TEXT, at, window) for at in (6, 9, 10, 14)])
    begin = max(0, 6 - window)
    places = tuple(at - 1 - begin for at in (6, 9, 10, 14))
    assert found.texts == (RejectedText(TEXT[begin:14], places),)
    assert (found.num_entries, found.num_places) == (4, 4)


def test_a_gap_longer_than_the_window_parts_the_text(tmp_path: Path) -> None:
    found = gathered(tmp_path, [line(TEXT, at, 4) for at in (6, 9, 20, 21)])
    assert found.texts == (
        RejectedText(TEXT[2:9], (3, 6)),
        RejectedText(TEXT[16:21], (3, 4)),
    )


def test_answers_that_part_share_no_place(tmp_path: Path) -> None:
    other = (*TEXT[:9], *range(70, 90))
    rows = [line(TEXT, at, 100) for at in (6, 9, 12)] + [line(other, 13, 100)]
    found = gathered(tmp_path, [*rows, rows[1]])  # two answers to one prompt, or one asked twice
    assert sorted(found.texts, key=lambda text: text.ids) == [
        RejectedText(TEXT[:12], (5, 8, 11)),
        RejectedText(other[:13], (12,)),
    ]
    assert (found.num_entries, found.num_places) == (5, 4)


@given(
    st.lists(st.integers(2, 39), min_size=1, max_size=12, unique=True),
    st.integers(1, 45),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_every_context_once_in_whatever_order(
    places: list[int], window: int, length: int, chance: random.Random
) -> None:
    rows = [line(TEXT, at, window) for at in places]
    with tempfile.TemporaryDirectory() as folder:
        found = gathered(Path(folder), rows, length)
        chance.shuffle(rows)
        assert gathered(Path(folder), [*rows, *rows], length).texts == found.texts
    reached = []
    for text in found.texts:
        assert len(text.ids) <= 2 * length
        assert text.ids == TEXT[text.ids[0] - 20 :][: len(text.ids)]
        for at in text.places:
            num = text.ids[at] - 20 + 1
            reached.append(num)
            assert at + 1 >= min(num, window, length)  # no context is shorter than it was
    assert sorted(reached) == sorted(places)


def test_the_longer_context_of_a_place_counts(tmp_path: Path) -> None:
    found = gathered(
        tmp_path, [line(TEXT, 9, 2), line(TEXT, 9, 5), line(TEXT, 9), line(TEXT, 9, 3)]
    )
    assert found.texts == (RejectedText(TEXT[4:9], (4,)),)
    assert (found.num_entries, found.num_bare) == (4, 1)
    assert found.sentence() == (
        "1 rejected places in 1 texts of the log; "
        "1 of 4 entries have no context: rejection_log.context_tokens"
    )


def test_what_cannot_be_learned_from(tmp_path: Path) -> None:
    def said(*rows: dict[str, Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            gathered(tmp_path, list(rows))
        return str(caught.value).replace(str(tmp_path / "log"), "LOG")

    bare, adapted = line(TEXT, 5), line(TEXT, 5, 4, adapter="mine")
    assert said() == "there are no rejections in LOG yet"
    assert said(bare, bare) == (
        "nothing to learn from in LOG: 2 of 2 entries have no context: rejection_log.context_tokens"
    )
    of_adapters = "1 of {} entries are of requests with an adapter"
    assert said(adapted) == f"nothing to learn from in LOG: {of_adapters.format(1)}"
    assert said(adapted, bare).endswith(f"_tokens; {of_adapters.format(2)}")
    assert said(line(TEXT, 5, 4), line(TEXT, 6, 4, model="other")) == (
        "the rejections are of several models (other, tiny): name one's files"
    )
    found = gathered(tmp_path, [adapted, line(TEXT, 7, 100)])
    assert found.texts == (RejectedText(TEXT[:7], (6,)),)
    assert found.sentence().endswith("; 1 entries of requests with an adapter are left out")


def test_a_work_folder_keeps_what_it_was_begun_with(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log", [line(TEXT, 7, 100), line(TEXT, 8)])
    first = kept_rejections([log], 50, 100, 60, tmp_path)
    write_lines(log, [line(TEXT, 9, 100)])
    assert kept_rejections([log], 50, 100, 60, tmp_path) == first
    assert stat.S_IMODE((tmp_path / KEPT).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"texts": []}', "\xff", "[" * 100_000),
        json.dumps({"texts": [[1, 2]], "counts": [1, 2, 3]}),
        json.dumps({"texts": [], "counts": [1, 2, 3]}),
        *(
            json.dumps({"texts": [[[5, 6, 7], [0, 2]], [ids, places]], "counts": counts})
            for ids, places, counts in (
                *((["a"], [0], [1, 0, 0]), ([5, 6.0], [0], [1, 0, 0]), ([-1], [0], [1, 0, 0])),
                *(([True], [0], [1, 0, 0]), ([2**31], [0], [1, 0, 0]), ([], [], [1, 0, 0])),
                *(("56", [0], [1, 0, 0]), ({"5": 6}, [0], [1, 0, 0]), (None, [0], [1, 0, 0])),
                *(([5, 6], [2], [1, 0, 0]), ([5, 6], [-1], [1, 0, 0]), ([5], [], [1, 0, 0])),
                *(([5, 6], [1, 0], [1, 0, 0]), ([5, 6], [1, 1], [1, 0, 0]), ([5], "0", [1, 0, 0])),
                *(([5], [0], [1, 0]), ([5], [0], [1, 0, -1]), ([5], [0], [1, 0, 0, 0, 0])),
                *(([5], [0], [1, 0, 0.5]), ([5], [0], {"a": 1}), ([5], [0], "123")),
            )
        ),
    ],
)
def test_kept_texts_that_are_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / KEPT).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        kept_rejections([tmp_path / "log"], 50, 100, 60, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / KEPT} is damaged: delete it, and every ")


def test_what_the_target_cannot_read_is_not_kept(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log", [line(TEXT, 7, 100), line(TEXT, 30, 100)])

    def said(longest: int, vocab_size: int) -> str:
        with pytest.raises(ConfigError) as caught:
            kept_rejections([log], 50, longest, vocab_size, tmp_path)
        return str(caught.value)

    foreign = "text 1 has token id 49, the target has 49 ids: it was made with another tokenizer"
    assert said(100, 49) == f"{log}: {foreign}"
    assert not (tmp_path / KEPT).exists()
    kept = kept_rejections([log], 50, 100, 50, tmp_path)  # the right log is not behind a wrong one
    assert max(kept.texts[0].ids) == 49
    path = tmp_path / KEPT
    remedy = "delete it, and every teacher-*.safetensors beside it"
    assert said(100, 49) == f"{path}: {foreign}: {remedy}"
    assert said(29, 50) == f"{path}: text 1 has 30 tokens, the target 29 positions: {remedy}"
    assert kept_rejections([log], 50, 30, 50, tmp_path) == kept
    path.write_text(path.read_text().replace("[2, 0, 0, 0]", "[2, 0, 0]"))  # of an older release
    assert kept_rejections([log], 50, 100, 50, tmp_path) == kept
    path.unlink()
    path.mkdir()
    assert said(100, 50) == f"cannot read {path}: Is a directory"


def test_torn_lines_are_told(tmp_path: Path) -> None:
    whole = json.dumps(line(TEXT, 5, 9))
    log = write_lines(tmp_path / "log", [line(TEXT, 7, 100)], f"{whole[:20]}\n{whole}\n")
    for _ in range(2):
        found = kept_rejections([log], 50, 100, 60, tmp_path)
        assert found.sentence().endswith("; 1 torn lines are left out")
    log.write_text(whole[:20] + "\n")
    with pytest.raises(ConfigError, match=r"in .*log yet: 1 torn lines are left out"):
        gather_rejections([log], 50, 100)


def test_rejected_rows_count_more_and_nothing_of_them_is_skipped() -> None:
    ids, hidden = torch.arange(6), torch.zeros(6, 1)
    assert Example(ids, hidden).rows(2).tolist() == [2, 3, 4, 5]
    assert Example(ids, hidden).rows(2, 3).tolist() == [5]
    assert Example(ids, hidden).rows(9).tolist() == []
    again = [1, 5] * (REJECTION_WEIGHT - 1)
    assert Example(ids, hidden, (1, 5)).rows(2).tolist() == [0, 1, 2, 3, 4, 5, *again]
    assert Example(ids, hidden, (1, 5)).rows(2, 2).tolist() == [2, 3, 4, 5, 5, 5, 5]
