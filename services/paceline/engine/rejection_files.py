"""Reads what targets wrote down about rejected proposals: `target.rejection_log`'s files.

They come from production and may be damaged, cut or made up: everything is bounded, and the first
bad line is named. Only the last line of a file may be half a line: its target may be writing it.
Knows no model and no tensor.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import hexdigits
from typing import Any

from paceline.errors import ConfigError

PATTERN = "rejections-*.jsonl"  # in a folder; those that were put aside end in .1.jsonl
MAX_FILES = 1024
MAX_TOTAL_BYTES = 1 << 30
MAX_LINE_BYTES = 2 << 20
MAX_CONTEXT_TOKENS = 131_072
MAX_TOP = 64
MAX_NAME_CHARS = 1024
_MAX_ID = 2**31 - 1
_HASH_DIGITS = 16
_ROUNDING = 1e-3


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


def read_rejections(paths: Sequence[Path]) -> Iterator[Rejection]:
    """Of files and of folders of them; `ConfigError` names the first bad file or line."""
    try:
        for path in _checked_files(paths):
            yield from _read_file(path)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error


def _checked_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob(PATTERN)) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"{path} has no file {PATTERN}")
        files += found
    files = list({file.resolve(): file for file in files}.values())
    if len(files) > MAX_FILES:
        raise ConfigError(f"there are {len(files)} files of rejections, at most {MAX_FILES} fit")
    total = 0
    for file in files:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is not an ordinary file")
        total += file.stat().st_size
    if total > MAX_TOTAL_BYTES:
        raise ConfigError(
            f"the files of rejections have {total >> 20} MiB, at most {MAX_TOTAL_BYTES >> 20} fit: "
            "name fewer of them"
        )
    return files


def _read_file(path: Path) -> Iterator[Rejection]:
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
                if line.endswith(b"\n"):
                    raise ConfigError(f"{path}, line {number} is no rejection: {error}") from error
                return
            yield rejection


def parse_rejection(line: bytes) -> Rejection:
    """One line. `ValueError` says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    context_len = _whole(row, "context_len", _MAX_ID)
    return Rejection(
        model=_name(row, "model"),
        adapter=_name(row, "adapter"),
        source=_name(row, "source"),
        context_hash=_hash(row.get("context_hash")),
        context_len=context_len,
        token_id=_whole(row, "token_id", _MAX_ID),
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
    is_number = type(value) is float or (type(value) is int and value > -_MAX_ID)
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
    return type(value) is int and 0 <= value <= _MAX_ID
