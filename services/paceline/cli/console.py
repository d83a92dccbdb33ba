"""What a terminal gets: two consoles, progress bars, a status line. Color only on a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from paceline.cli.values import word
from paceline.models import Progress

# soft_wrap: a long line (a curl command, a path) stays one line when it is copied or piped.
out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


# Nobody's row is longer; what is, is folded.
PIPE_COLUMNS = 1000
MAX_TOLD_CHARS = 4000


def print_rows(table: RenderableType) -> None:
    """Fits a terminal; in a pipe every row is one line, whatever its length, for grep and cut."""
    if out.is_terminal:
        out.print(table, soft_wrap=False)
        return
    wide = Console(width=PIPE_COLUMNS, file=io.StringIO(), color_system=None)
    wide.print(table)
    for line in wide.file.getvalue().splitlines():  # type: ignore[attr-defined]
        out.print(line.rstrip(), markup=False)


def print_error(message: str) -> None:
    err.print("[bold red]error:[/]", end=" ")
    print_told(message)


def print_told(text: str) -> None:
    """On stderr, a bounded part of what may hold somebody else's words: one line, no markup."""
    err.print(told(text), markup=False)


def told(text: str) -> str:
    cut = text if len(text) <= MAX_TOLD_CHARS else f"{text[: MAX_TOLD_CHARS - 3]}..."
    return word(" ".join(cut.splitlines()))


@contextmanager
def progress_display() -> Iterator[Progress]:
    """A `Progress` that draws one bar per step; without a terminal, one line per step."""
    if not err.is_terminal:
        with lines_on_change() as line:
            yield lambda what, done, total: line(what)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=err) as bars:
        steps = _Steps(bars)
        yield steps.show
        steps.finish()


class _Steps:
    """One bar per step; a step ends when the next one begins."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._what = ""
        self._task: TaskID | None = None

    def show(self, what: str, done: int, total: int) -> None:
        if what != self._what or self._task is None:
            self.finish()
            self._what, self._task = what, self._bars.add_task(what, total=None)
        self._bars.update(self._task, completed=done, total=total or None)

    def finish(self) -> None:
        if self._task is not None:
            size = max(1, int(self._bars.tasks[self._task].completed))
            self._bars.update(self._task, completed=size, total=size)
            self._task = None


@contextmanager
def status_display() -> Iterator[Callable[[str], None]]:
    """A spinner with changing words; "" hides it. Without a terminal, one line per change."""
    if not err.is_terminal:
        with lines_on_change() as line:
            yield line
        return
    spinner = err.status("")

    def show(text: str) -> None:
        spinner.update(Text(told(text)))
        if text:
            spinner.start()
        else:
            spinner.stop()

    try:
        yield show
    finally:
        spinner.stop()


@contextmanager
def lines_on_change() -> Iterator[Callable[[str], None]]:
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text and text != last:
            print_told(text)
        last = text

    yield show
