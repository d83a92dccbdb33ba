"""Reads what targets wrote down about rejected proposals: `target.rejection_log`'s files.

They come from production and may be damaged, cut or made up: everything is bounded, and the first
bad line is named. The last line of a file may be half a line, as its target may be writing it; torn
lines before it, of machines that went down, are left out and counted. Knows no model and no tensor.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import hexdigits
from typing import Any

from paceline.errors import ConfigError

PATTERN = "rejections-*.jsonl"  # in a folder; those that were put aside end in .1.jsonl
MAX_FILES = 1024
MAX_FOLDERS = 4096
MAX_DEPTH = 8
MAX_TOTAL_BYTES = 1 << 30
MAX_LINE_BYTES = 2 << 20
MAX_CONTEXT_TOKENS = 131_072
MAX_TOP = 64
MAX_NAME_CHARS = 1024
MAX_ID = 2**31 - 1
_HASH_DIGITS = 16
_ROUNDING = 1e-3
_BEGIN = b'{"model"'


@dataclass(frozen=True, slots=True)
class Rejection:
    """A place where the target took `token_id` and not what was proposed.

    `context`: the last of the `context_len` tokens before it, which `context_hash` (that of
    `TokenLog`) is of; empty where the configuration did not allow it. Log-probabilities are raw.
    """

    model: str
    adapter: str
    source: str
    context_hash: int
    context_len: int
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    context: array[int]


@dataclass(slots=True)
class Torn:
    """How many lines a reader left out because they break off."""

    num: int = 0


def read_rejections(paths: Sequence[Path], torn: Torn | None = None) -> Iterator[Rejection]:
    """Of files and of folders of them; `ConfigError` names the first bad file or line. Torn lines
    are counted in `torn` as they are met."""
    torn = Torn() if torn is None else torn
    try:
        for path in _checked_files(paths):
            yield from _read_file(path, torn)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


def _checked_files(paths: Sequence[Path]) -> list[Path]:
    files: dict[str, Path] = {}
    for path in paths:
        num_found = 0
        for file in _files_in(path) if path.is_dir() else [path]:
            num_found += 1
            files.setdefault(os.path.realpath(file), file)
            if len(files) > MAX_FILES:
                raise ConfigError(f"there are more than {MAX_FILES} files of rejections")
        if not num_found:
            raise ConfigError(f"{path} has no file {PATTERN}")
    total = 0
    for file in files.values():
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is not an ordinary file")
        size = file.stat().st_size
        if size > MAX_TOTAL_BYTES:
            raise ConfigError(f"{file} has {_more_than_fit(size)}: split it between two lines")
        total += size
    if total > MAX_TOTAL_BYTES:
        raise ConfigError(
            f"the files of rejections have {_more_than_fit(total)}: name fewer of them"
        )
    return [*files.values()]


def _more_than_fit(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB, at most {MAX_TOTAL_BYTES / 2**20:,.1f} fit"


def _files_in(top: Path) -> Iterator[Path]:
    """Those of its subfolders, too, as logs of many machines are kept. Links to folders are not
    followed: they may lead anywhere, or back."""
    waiting = [(top, 0)]
    num_folders = 1
    while waiting:
        folder, depth = waiting.pop()
        files, folders = [], []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                    num_folders += 1
                elif Path(entry.name).match(PATTERN) and not _is_folder(entry):
                    files.append(Path(entry.path))
                if num_folders > MAX_FOLDERS or len(files) > MAX_FILES:
                    raise ConfigError(
                        f"{top} has more than {MAX_FOLDERS} folders or {MAX_FILES} files of "
                        "rejections"
                    )
        if folders and depth == MAX_DEPTH:
            raise ConfigError(f"{top} has folders more than {MAX_DEPTH} deep: {folders[0]}")
        yield from sorted(files)
        waiting += [(each, depth + 1) for each in sorted(folders, reverse=True)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """A link to one. What leads nowhere is none, and is named when it is read."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _read_file(path: Path, torn: Torn) -> Iterator[Rejection]:
    left = MAX_TOTAL_BYTES  # it may grow meanwhile
    with path.open("rb") as file:
        number = 0
        while left > 0 and (line := file.readline(MAX_LINE_BYTES + 1)):
            number += 1
            left -= len(line)
            if not line.strip():
                continue
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(f"{path}, line {number} has more than {MAX_LINE_BYTES} bytes")
            try:
                rejection = parse_rejection(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                if _is_torn(line):
                    torn.num += 1
                    continue
                raise ConfigError(f"{path}, line {number} is no rejection: {error}") from error
            yield rejection


def _is_torn(line: bytes) -> bool:
    """It begins as every line does and breaks off; zeros or the next line may come behind it."""
    text = line.strip().strip(b"\0")
    ends = [end for end in (text.find(b"\0"), text.find(_BEGIN, 1)) if end >= 0]
    head = text[: min(ends, default=len(text))]
    is_short = bool(ends) or not text.endswith(b"}")
    return is_short and (head.startswith(_BEGIN) or _BEGIN.startswith(head))


def parse_rejection(line: bytes) -> Rejection:
    """One line. `ValueError` says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    context_len = _whole(row, "context_len", MAX_ID)
    return Rejection(
        model=_name(row, "model"),
        adapter=_name(row, "adapter"),
        source=_name(row, "source"),
        context_hash=_hash(row.get("context_hash")),
        context_len=context_len,
        token_id=_whole(row, "token_id", MAX_ID),
        logprob=_logprob(row.get("logprob")),
        top=_top(row.get("top")),
        context=_context(row.get("context"), context_len),
    )


def _whole(row: dict[str, Any], key: str, most: int) -> int:
    value = row.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{key} is no whole number from 0 to {most}")
    return value


def _name(row: dict[str, Any], key: str) -> str:
    """Null, as requests without an adapter have it, is the empty name."""
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise ValueError(f"{key} is no name of at most {MAX_NAME_CHARS} characters")
    return value


def _hash(value: Any) -> int:
    is_text = isinstance(value, str) and len(value) == _HASH_DIGITS
    if not is_text or not set(value) <= set(hexdigits):
        raise ValueError(f"context_hash is not {_HASH_DIGITS} hexadecimal digits")
    return int(value, 16)


def _logprob(value: Any) -> float:
    is_number = type(value) is float or (type(value) is int and value > -MAX_ID)
    if not is_number or math.isnan(value) or value > _ROUNDING:
        raise ValueError("a log-probability is no number up to 0")
    return float(value)


def _top(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list) or len(value) > MAX_TOP:
        raise ValueError(f"top is no list of at most {MAX_TOP} tokens")
    found = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_id(pair[0]):
            raise ValueError("top has something else than token ids with log-probabilities")
        found.append((pair[0], _logprob(pair[1])))
    return tuple(found)


def _context(value: Any, context_len: int) -> array[int]:
    """Packed: there may be many."""
    if value is None:
        return array("I")
    most = min(context_len, MAX_CONTEXT_TOKENS)
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"context is no list of at most {most} token ids")
    if not all(map(_is_id, value)):
        raise ValueError("context has something else than token ids")
    return array("I", value)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID
