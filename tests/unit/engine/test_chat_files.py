"""Chats and text files: what is read, and the sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.engine import chat_files
from paceline.engine.chat_files import (
    Chat,
    check_chats,
    common_prefix,
    read_chats,
    read_windows,
    write_chats,
)
from paceline.errors import ConfigError

CHATS = [Chat((1, 2, 3, 9), 3), Chat((1, 2, 4), 2)]


class WordTokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [int(word) for word in text.split()]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    write_chats(CHATS, path)
    path.write_text(path.read_text() + "\n")  # an empty line is none
    assert read_chats(path) == CHATS
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense", "[]", "3", "null", '{"ids": [1, 2]}', '{"ids": 3, "prompt_len": 1}',
        '{"ids": [1, -2], "prompt_len": 1}', '{"ids": [1, "2"], "prompt_len": 1}',
        '{"ids": [1, 2.0], "prompt_len": 1}', '{"ids": [1, true], "prompt_len": 1}',
        '{"ids": [1, 2, 3], "prompt_len": "1"}', '{"ids": "abc", "prompt_len": 1}', "[" * 100_000,
    ],
)  # fmt: skip
def test_a_bent_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('{"ids": [1, 2], "prompt_len": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"chats.jsonl, line 2 is not"):
        read_chats(path)


@pytest.mark.parametrize("prompt_len", [0, 3, 7])
def test_a_chat_has_a_prompt_and_an_answer(tmp_path: Path, prompt_len: int) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"ids": [1, 2, 3], "prompt_len": prompt_len}))
    with pytest.raises(ConfigError, match="line 1: prompt_len must lie inside"):
        read_chats(path)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chats.jsonl"
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        read_chats(path)
    with pytest.raises(ConfigError, match="is not an ordinary file"):
        read_chats(tmp_path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no chats"):
        read_chats(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_chats(path)
    write_chats(CHATS, path)
    monkeypatch.setattr(chat_files, "MAX_CHATS_BYTES", path.stat().st_size)
    assert read_chats(path) == CHATS
    monkeypatch.setattr(chat_files, "MAX_CHATS_BYTES", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="is larger than"):
        read_chats(path)
    monkeypatch.setattr(chat_files, "MAX_TEXT_BYTES", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="is larger than"):
        read_windows(path, WordTokenizer(), 4)


def test_chats_of_another_tokenizer_or_too_long() -> None:
    check_chats(CHATS, "chats", 10, 4)
    with pytest.raises(ConfigError, match="chat 1 has token id 9, the target has 9 ids: it was"):
        check_chats(CHATS, "chats", 9, 4)
    with pytest.raises(ConfigError, match="chat 1 has 4 tokens, the target 3 positions"):
        check_chats(CHATS, "chats", 10, 3)


def test_a_text_is_cut_into_windows(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(" ".join(map(str, range(14))))
    assert read_windows(path, WordTokenizer(), 4) == [
        Chat((0, 1, 2, 3), 1),
        Chat((4, 5, 6, 7), 1),
        Chat((8, 9, 10, 11), 1),
    ]
    path.write_text(" ".join(map(str, range(15))))  # more than half a window is kept
    assert read_windows(path, WordTokenizer(), 4)[-1] == Chat((12, 13, 14), 1)
    for text in ("", "7"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="has no text to learn from"):
            read_windows(path, WordTokenizer(), 4)
    path.write_text("7 8")
    assert read_windows(path, WordTokenizer(), 9) == [Chat((7, 8), 1)]


def test_what_all_chats_begin_with() -> None:
    assert common_prefix(CHATS) == 2
    assert common_prefix([Chat((1, 2), 1), Chat((1, 2, 3), 1)]) == 2
    assert common_prefix([Chat((1, 2), 1), Chat((3,), 1)]) == 0
