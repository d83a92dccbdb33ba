"""Chats as token ids: the file format of training data, and text files cut to the same form.

Knows no model: whether the ids are those of a target is checked against its vocabulary size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

MAX_CHATS_BYTES = 1 << 30
MAX_TEXT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Chat:
    """Token ids of a conversation; the answer starts at `prompt_len`."""

    ids: tuple[int, ...]
    prompt_len: int


def read_chats(path: Path) -> list[Chat]:
    """One JSON object a line: `ids` and `prompt_len`; `ConfigError` names the first bad line."""
    text = _read(path, MAX_CHATS_BYTES)
    lines = enumerate(text.splitlines(), 1)
    chats = [_chat(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not chats:
        raise ConfigError(f"{path} has no chats")
    return chats


def _chat(line: str, where: str) -> Chat:
    try:
        row = json.loads(line)
        ids, prompt_len = row["ids"], row["prompt_len"]
        is_good = all(type(i) is int and i >= 0 for i in (*ids, prompt_len))
    except (ValueError, LookupError, TypeError, RecursionError):
        is_good = False
    if not is_good:
        raise ConfigError(f'{where} is not {{"ids": [...], "prompt_len": n}} with token ids')
    if not 0 < prompt_len < len(ids):
        raise ConfigError(f"{where}: prompt_len must lie inside of the ids, as the answer follows")
    return Chat(tuple(ids), prompt_len)


def write_chats(chats: Iterable[Chat], path: Path) -> None:
    """All or nothing: a process that dies leaves no half file."""
    staged = path.with_suffix(".new")
    staged.write_text("".join(json.dumps(asdict(chat)) + "\n" for chat in chats), "utf-8")
    staged.rename(path)


def check_chats(chats: Sequence[Chat], what: str, vocab_size: int, max_len: int) -> None:
    """`ConfigError` unless a model with so many ids and positions can read all of them."""
    for number, chat in enumerate(chats, 1):
        if max(chat.ids) >= vocab_size:
            raise ConfigError(
                f"{what}: chat {number} has token id {max(chat.ids)}, the target has {vocab_size} "
                "ids: it was made with another tokenizer"
            )
        if len(chat.ids) > max_len:
            raise ConfigError(
                f"{what}: chat {number} has {len(chat.ids)} tokens, the target {max_len} positions"
            )


def read_windows(path: Path, tokenizer: Any, length: int) -> list[Chat]:
    """A text file cut into pieces of `length` tokens; a short rest is left out."""
    ids = tokenizer.encode(_read(path, MAX_TEXT_BYTES), add_special_tokens=False)
    starts = range(0, max(len(ids) - length // 2, 1), length)
    windows = [Chat(tuple(ids[start : start + length]), 1) for start in starts]
    if len(windows[0].ids) < 2:
        raise ConfigError(f"{path} has no text to learn from")
    return windows


def common_prefix(chats: Sequence[Chat]) -> int:
    """How many ids all chats begin with: what a chat template puts before the user's text."""
    first, last = min(chat.ids for chat in chats), max(chat.ids for chat in chats)
    pairs = enumerate(zip(first, last, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(last)))


def check_file(path: Path, limit: int) -> None:
    """`ConfigError` unless a file of at most `limit` bytes; a device or a pipe may have no end."""
    if not path.is_file() and path.exists():
        raise ConfigError(f"{path} is not an ordinary file")
    if path.stat().st_size > limit:
        raise ConfigError(f"{path} is larger than {limit >> 20} MiB: split it")


def _read(path: Path, limit: int) -> str:
    try:
        check_file(path, limit)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
