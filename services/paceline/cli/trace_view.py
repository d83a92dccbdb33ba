"""What `paceline trace` prints: the request, its stages, and one line per round.

On a terminal with colors the upper half of a bar is the draft and the wire, the lower half the
target, over the same time. Elsewhere a bar has one letter per moment. Fits the terminal's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from paceline.cli.demo_view import STYLES
from paceline.cli.trace_bars import axis, bar
from paceline.cli.trace_model import LANES, STAGES, Request, Round
from paceline.cli.values import NOTHING, fixed, percent, word
from paceline.round_times import Stage

MAX_ROWS = 40  # of more rounds the middle is left out
MAX_MARKS = 16  # tokens of a round that have a mark each
PIPE_BAR, MIN_BAR = 60, 16
SOURCE_COLUMNS = len("source")
LEGEND_GAP = "   "
COLORS = {
    Stage.WIRE_BACK: "bright_yellow",
    Stage.REWIND: "magenta",
    Stage.DRAFT: "green",
    Stage.WIRE_OUT: "yellow",
    Stage.WINDOW: "bright_black",
    Stage.QUEUE: "white",
    Stage.VERIFY: "blue",
    Stage.SAMPLE: "cyan",
}
LETTERS = dict(zip(STAGES, "<rd>.qVs", strict=True))
UPPER, LOWER = (*LANES["draft"], *LANES["wire"]), LANES["target"]


@dataclass(frozen=True, slots=True)
class Marks:
    """Signs for tokens: kept, rejected, the target's own; then the halves of a bar."""

    accepted: str = "●"
    rejected: str = "○"
    own: str = "◆"
    stage: str = "■"
    upper: str = "▀"
    lower: str = "▄"


ASCII = Marks("#", "o", "+")


def show_request(console: Console, request: Request, rounds: Sequence[Round]) -> None:
    """`rounds`: those to show, in order."""
    for line in _View(console, request, rounds).lines():
        console.print(line, soft_wrap=True)


class _View:
    def __init__(self, console: Console, request: Request, rounds: Sequence[Round]) -> None:
        is_ascii = console.options.ascii_only
        self._request = request
        self._rounds = rounds
        self._has_colors = console.color_system is not None and not is_ascii
        self._marks = ASCII if is_ascii else Marks()
        self._is_several = len(request.choices) > 1
        self._has_sources = any(item.source for item in rounds)
        self._scale_ns = max((item.times.wall for item in rounds), default=0) or 1
        longest = max((len(item.tokens(MAX_MARKS)) for item in rounds), default=0)
        self._marks_columns = max(len("tokens"), longest)
        used = len(self._columns([""] * 5, Text(), ""))
        self._columns_all = console.width if console.is_terminal else used + PIPE_BAR
        self._bar_columns = max(MIN_BAR, self._columns_all - used)

    def lines(self) -> Iterator[Text]:
        yield from _headlines(self._request)
        yield Text()
        yield from self._legend()
        yield Text()
        if not self._rounds:
            yield Text("No file has a round of it.")
            return
        heading = self._columns(["round", "choice", "source", "K", "kept"], Text("tokens"), "ms")
        yield heading.append(axis(self._scale_ns, self._bar_columns))
        for item in self._shown():
            yield item if isinstance(item, Text) else self._row(item)

    def _shown(self) -> list[Round | Text]:
        if len(self._rounds) <= MAX_ROWS:
            return list(self._rounds)
        half = MAX_ROWS // 2
        hidden = len(self._rounds) - 2 * half
        between = Text(f"  ... {hidden} more rounds: --rounds N..M shows them")
        return [*self._rounds[:half], between, *self._rounds[-half:]]

    def _legend(self) -> Iterator[Text]:
        """The stages, each with its time in the given rounds; then the signs."""
        wall = sum(item.wall_ms for item in self._rounds) or 1.0
        entries = []
        for stage in STAGES:
            total = sum(item.ms(stage) for item in self._rounds)
            sign = self._marks.stage if self._has_colors else LETTERS[stage]
            text = Text(sign, style=COLORS[stage])
            said = f" {stage.span_name} {total:.1f} ms {percent(total / wall)}"
            entries.append(text.append(said, style="default"))
        yield from self._packed(entries)
        marks = self._marks
        signs = [
            (marks.accepted, "accepted", "accepted"),
            (marks.rejected, "recovered", "rejected"),
            (marks.own, "recovered", "recovered"),
            (marks.own, "bonus", "bonus"),
            (marks.own, "", "plain"),
        ]
        if self._has_colors:
            signs += [(marks.upper, "", "draft and wire"), (marks.lower, "", "target")]
        yield from self._packed(
            [
                Text(sign, style=STYLES.get(style, "")).append(f" {meaning}", style="default")
                for sign, style, meaning in signs
            ]
        )

    def _packed(self, entries: Sequence[Text]) -> Iterator[Text]:
        """As many in a line as fit."""
        line = Text()
        for entry in entries:
            if line and len(line) + len(LEGEND_GAP) + len(entry) > self._columns_all:
                yield line
                line = Text()
            line = Text.assemble(line, LEGEND_GAP if line else "", entry)
        yield line

    def _columns(self, cells: Sequence[str], marks: Text, ms: str) -> Text:
        number, choice, source, k, kept = cells
        text = Text(f"{number:>5} ")
        if self._is_several:
            text.append(f"{choice:>6} ")
        if self._has_sources:
            text.append(f"{source[:SOURCE_COLUMNS]:<{SOURCE_COLUMNS}} ")
        text.append(f"{k:>3} {kept:>7}  ")
        text.append_text(marks).append(" " * (self._marks_columns - len(marks)))
        return text.append(f" {ms:>7}  ")

    def _row(self, item: Round) -> Text:
        kept = f"{item.accepted}/{item.proposed}"
        k = str(item.num_speculative_tokens)
        cells = [str(item.number), str(item.choice), word(item.source or NOTHING), k, kept]
        text = self._columns(cells, self._marks_of(item), f"{item.wall_ms:.1f}")
        return text.append_text(self._halves(item) if self._has_colors else self._letters(item))

    def _marks_of(self, item: Round) -> Text:
        signs = {
            "accepted": (self._marks.accepted, "accepted"),
            "rejected": (self._marks.rejected, "recovered"),
        }
        text = Text()
        for kind in item.tokens(MAX_MARKS):
            sign, style = signs.get(kind, (self._marks.own, kind))
            text.append(sign, style=STYLES.get(style, ""))
        return text

    def _letters(self, item: Round) -> Text:
        stages = bar(item, STAGES, self._scale_ns, self._bar_columns)
        return Text("".join(" " if stage is None else LETTERS[stage] for stage in stages).rstrip())

    def _halves(self, item: Round) -> Text:
        """The target's half is empty while it waits for what the other half shows."""
        upper, lower, whole = (
            bar(item, stages, self._scale_ns, self._bar_columns)
            for stages in (UPPER, LOWER, STAGES)
        )
        lower = [
            None if below is Stage.WINDOW and here is not below else below
            for below, here in zip(lower, whole, strict=True)
        ]
        text = Text()
        for (above, below), columns in groupby(zip(upper, lower, strict=True)):
            sign, style = self._half(above, below)
            text.append(sign * len(list(columns)), style=style)
        text.rstrip()
        return text

    def _half(self, above: Stage | None, below: Stage | None) -> tuple[str, str]:
        if above is None and below is None:
            return " ", ""
        if above is None:
            return self._marks.lower, COLORS[below] if below is not None else ""
        if below is None:
            return self._marks.upper, COLORS[above]
        return self._marks.upper, f"{COLORS[above]} on {COLORS[below]}"


def _headlines(request: Request) -> Iterator[Text]:
    text = Text("trace ", style="bold").append(request.trace_id, style="not bold")
    for name in (request.model, request.attribute("paceline.request_id")):
        if name:
            text.append(f"  {word(name)}", style="not bold cyan")
    if request.failure:
        text.append(f"  {word(request.failure)}", style="bold red")
    yield text
    parts = [f"{request.ms:.1f} ms"]
    if request.first_chunk_ms is not None:
        parts.append(f"first tokens after {request.first_chunk_ms:.1f} ms")
    if len(request.choices) > 1:
        parts.append(f"{len(request.choices)} choices")
    yield Text(", ".join(parts))
    parts = [f"{request.num_tokens} tokens in {len(request.rounds)} rounds"]
    if request.num_tokens_per_round is not None:
        parts.append(f"{fixed(request.num_tokens_per_round, 2)} a round")
    if request.proposed:
        kept = f"{request.accepted} of {request.proposed} proposals accepted"
        parts.append(f"{kept} ({percent(request.acceptance_rate)})")
    yield Text(", ".join(parts))
