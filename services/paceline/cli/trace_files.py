"""Trace files: JSON lines that each process of ours writes, in one folder. Read from the end.

Knows of a span only whether a request hangs on it. What a file has that is no trace is told in
`Reading.problems`, and the rest is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from paceline import models
from paceline.cli.trace_builder import GATEWAY_SERVICE, SESSION, newest
from paceline.cli.trace_spans import Span, spans_of
from paceline.errors import PacelineError

MAX_FILES = 1_000  # of a folder, the newest
MAX_LAST_BYTES = 256 << 20  # of each file, from its end, to find the last request
MAX_LINE_BYTES = 32 << 20
MAX_SPANS = 100_000  # of one trace
CHUNK_BYTES = 1 << 20
# What was put aside when it had become too large has such a name, too.
PATTERN = "*.jsonl"


@dataclass(slots=True)
class Reading:
    """The spans of one trace, and what was wrong with the files."""

    spans: list[Span] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def traces_dir() -> Path:
    """Beside the folder of models, or inside the folder that stands for both."""
    folder = models.cache_dir()
    is_default = folder == models.DEFAULT_CACHE.expanduser()
    return (folder.parent if is_default else folder) / "traces"


def files_in(folder: Path) -> list[Path]:
    """The newest first; none when there is no such folder."""
    found: list[tuple[float, Path]] = []
    try:
        for path in folder.glob(PATTERN):
            try:
                if path.is_file():
                    found.append((path.stat().st_mtime, path))
            except OSError:
                continue  # rotated away meanwhile
    except OSError as error:
        raise PacelineError(f"cannot read {folder}: {error.strerror}") from None
    return [path for _, path in sorted(found, reverse=True)[:MAX_FILES]]


def read_last(paths: Sequence[Path]) -> Reading:
    """The trace of the request that ended last; no spans when no file has one."""
    reader = _Reader(MAX_LAST_BYTES)
    marks = (f'"{SESSION}"'.encode(), f'"{GATEWAY_SERVICE}"'.encode())
    candidates = []
    for path in paths:
        # Spans are written as they end: the last line that has a request has the newest of it.
        for spans in reader.batches(path, marks):
            if last := newest(spans):
                candidates.append(last)
                break
    last = newest(candidates)
    return reader.trace(paths, last.trace_id) if last else reader.reading


def read_trace(paths: Sequence[Path], trace_id: str) -> Reading:
    """One trace, wherever it is in the files. `trace_id` in lower case."""
    return _Reader(None).trace(paths, trace_id)


class _Reader:
    """`max_bytes`: how much of each file's end is looked at; None: all."""

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._told: dict[str, None] = {}
        self.reading = Reading()

    def trace(self, paths: Sequence[Path], trace_id: str) -> Reading:
        found: dict[str, Span] = {}
        for path in paths:
            for spans in self.batches(path, (trace_id.encode(), trace_id.upper().encode())):
                found |= {span.span_id: span for span in spans if span.trace_id == trace_id}
                if len(found) > MAX_SPANS:
                    break
        if len(found) > MAX_SPANS:
            self._tell(f"the trace has more than {MAX_SPANS} spans; the rest is left out")
        order = sorted(found.values(), key=lambda span: (span.began_ns, span.ended_ns))
        self.reading.spans = order[:MAX_SPANS]
        self.reading.problems = list(self._told)
        return self.reading

    def batches(self, path: Path, marks: tuple[bytes, ...]) -> Iterator[list[Span]]:
        """The spans of each line that has one of `marks`, the last line first."""
        try:
            with path.open("rb") as file:
                yield from self._batches(path, file, marks)
        except OSError as error:
            self._tell(f"cannot read {path}: {error.strerror}")

    def _batches(
        self, path: Path, file: BinaryIO, marks: tuple[bytes, ...]
    ) -> Iterator[list[Span]]:
        size = file.seek(0, os.SEEK_END)
        floor = 0 if self._max_bytes is None else max(0, size - self._max_bytes)
        num_bad = 0
        for line in lines_from_end(file, size, floor):
            if line is None:
                self._tell(f"{path}: a line longer than {MAX_LINE_BYTES} bytes is left out")
                continue
            if not any(mark in line for mark in marks):
                continue
            try:
                spans, bad = spans_of(line)
            except ValueError:
                self._tell(_broken(path, line))
                continue
            num_bad += bad
            yield spans
        if num_bad:
            self._tell(f"{path}: {num_bad} spans without a proper id or time are left out")
        if floor:
            self._tell(f"{path}: only its last {size - floor} bytes were looked at")

    def _tell(self, problem: str) -> None:
        """Once each."""
        self._told[problem] = None
        self.reading.problems = list(self._told)


def _broken(path: Path, line: bytes) -> str:
    if line.endswith(b"\n"):
        return f"{path}: some lines are no OTLP/JSON and are left out"
    return f"{path}: its last line is not whole and is left out"


def lines_from_end(file: BinaryIO, size: int, floor: int = 0) -> Iterator[bytes | None]:
    """The lines before `size`, the last first, with their line ends; none that begins before
    `floor`. None stands for a line that is longer than allowed."""
    held = _Held()
    end = size
    while end > floor:
        begin = max(floor, end - CHUNK_BYTES)
        file.seek(begin)
        first, *others = file.read(end - begin).split(b"\n")
        for text in reversed(others):
            held.prepend(text)
            if not held.is_empty:
                yield held.line()
            held = _Held()
            held.prepend(b"\n")
        held.prepend(first)
        end = begin
    # Above a floor it may be the end of a line only.
    if floor == 0 and not held.is_empty:
        yield held.line()


class _Held:
    """A line that is put together from its end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    @property
    def is_empty(self) -> bool:
        return self._num_bytes == 0

    def prepend(self, text: bytes) -> None:
        self._num_bytes += len(text)
        self._pieces.append(text)
        if self._num_bytes > MAX_LINE_BYTES:
            self._pieces.clear()

    def line(self) -> bytes | None:
        if self._num_bytes > MAX_LINE_BYTES:
            return None
        return b"".join(reversed(self._pieces))
