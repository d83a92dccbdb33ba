"""How a distillation shows itself: bars on a terminal, plain lines elsewhere; Ctrl-C stops it.

During training the first Ctrl-C lets the step end and saves; a second one ends at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from paceline.cli.console import err

if TYPE_CHECKING:
    from types import FrameType

    from paceline.engine.distill import StepReport
    from paceline.engine.distill_run import Watch

LINE_PAUSE_S = 10.0
_KEEP = 0.98  # of the mean KL that is shown, a step


@contextmanager
def training_display() -> Iterator[Watch]:
    """A `Watch` that draws on stderr."""
    stopper = _Stopper()
    before = signal.signal(signal.SIGINT, stopper.on_signal)
    try:
        if not err.is_terminal:
            yield _watch(_Lines(), stopper)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[rest]}"),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=err) as bars:
            yield _watch(_Terminal(bars), stopper)
    finally:
        signal.signal(signal.SIGINT, before)


def _watch(view: _Lines | _Terminal, stopper: _Stopper) -> Watch:
    from paceline.engine.distill_run import Watch  # brings torch

    mean, pace = _Mean(), Pace()

    def step(report: StepReport) -> None:
        stopper.is_training = True
        view.show("training", report.share, training_line(report, mean.add(report.divergence)))

    def progress(what: str, done: int, total: int) -> None:
        stopper.is_training = False
        left = pace.remaining_s(what, done, total, time.monotonic())
        rest = f"{done} of {total}" if total else ""
        view.show(what, done / total if total else 0.0, rest + left_text(left))

    return Watch(progress, step, lambda: stopper.is_asked)


def training_line(report: StepReport, divergence: float) -> str:
    """Step, tokens a second, KL, remaining time."""
    return (
        f"step {report.progress.steps}, {report.tokens_per_s:.0f} tokens/s, KL {divergence:.3f}"
        f"{left_text(report.remaining_s)}"
    )


def left_text(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    return f", {minutes}:{seconds:02d} left"


class Pace:
    """How long a stage will go on, by what it has done since it was first heard of: a resumed one
    does not begin at nothing. None before anything is known, and at the end."""

    def __init__(self) -> None:
        self._what, self._first, self._began_s = "", 0, 0.0

    def remaining_s(self, what: str, done: int, total: int, now_s: float) -> float | None:
        if what != self._what:
            self._what, self._first, self._began_s = what, done, now_s
        num = done - self._first
        if num <= 0 or done >= total:
            return None
        return (now_s - self._began_s) * (total - done) / num


class _Mean:
    """A mean of the last steps, so that single batches do not jump about."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> float:
        self._sum = _KEEP * self._sum + value
        self._weight = _KEEP * self._weight + 1.0
        return self._sum / self._weight


class _Stopper:
    def __init__(self) -> None:
        self.is_training = self.is_asked = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked or not self.is_training:
            raise KeyboardInterrupt
        self.is_asked = True


class _Lines:
    """A line when a stage begins, every few seconds, and when it ends."""

    def __init__(self) -> None:
        self._what, self._said = "", 0.0

    def show(self, what: str, share: float, rest: str) -> None:
        now = time.monotonic()
        if what == self._what and share < 1.0 and now - self._said < LINE_PAUSE_S:
            return
        self._what, self._said = what, now
        err.print(f"{what}: {rest}" if rest else what, markup=False)


class _Terminal:
    """A bar for each stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def show(self, what: str, share: float, rest: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=1.0, rest="")
        self._bars.update(self._tasks[what], completed=share, rest=rest)
