"""What the demo prints: colored text, the table of rounds, the summary."""

from __future__ import annotations

from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.demo_stream import Answer, Piece, Round
from paceline.cli.values import NOTHING, word

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan"}
LEGEND = {
    "accepted": "a proposed token, confirmed by the target",
    "recovered": "the target's token in place of a rejected one",
    "bonus": "the target's extra token after a full acceptance",
}


def legend() -> Text:
    text = Text()
    for origin, meaning in LEGEND.items():
        text.append(f"{origin:>9}", style=STYLES[origin]).append(f"  {meaning}\n")
    return text.append("    plain  the target's token; nothing was proposed")


def show_piece(console: Console, piece: Piece) -> None:
    """Control characters are not passed on: a model must not steer the terminal."""
    text = "".join(
        char if char.isprintable() or char in "\n\t" else "\ufffd" for char in piece.text
    )
    console.print(Text(text, style=STYLES.get(piece.origin, "")), end="")


def rounds_table(rounds: list[Round], max_rows: int) -> Table:
    """The first `max_rows` rounds (0: all), then the sums and means over every round."""
    title = "rounds: one pass of the target each (ms; of draft and wire, what it waited for)"
    table = Table(title=title, title_justify="left")
    table.add_column("round", justify="right")
    table.add_column("source")
    for heading in ("K", "proposed", "accepted", "draft", "wire", "queue", "verify"):
        table.add_column(heading, justify="right")
    shown = rounds[:max_rows] if max_rows else rounds
    for r in shown:
        source = Text(word(r.source or NOTHING))
        counts = (r.num_speculative_tokens, r.proposed, r.accepted)
        times = (r.draft_ms, r.wire_ms, r.queue_ms, r.verify_ms)
        table.add_row(str(r.round), source, *map(str, counts), *(f"{ms:.1f}" for ms in times))
    if hidden := len(rounds) - len(shown):
        table.add_row(f"+{hidden}", *["..."] * 8)
    table.add_section()
    table.add_row("all", "", "", *_totals(rounds))
    return table


def _totals(rounds: list[Round]) -> list[str]:
    """Sums of tokens; means of times, the draft's over the rounds that had a proposal."""
    drafted = [r for r in rounds if r.proposed]
    means = [
        _mean([r.draft_ms for r in drafted]),
        _mean([r.wire_ms for r in drafted]),
        _mean([r.queue_ms for r in drafted]),
        _mean([r.verify_ms for r in rounds]),
    ]
    return [str(sum(r.proposed for r in rounds)), str(sum(r.accepted for r in rounds)), *means]


def _mean(values: list[float]) -> str:
    return f"{fmean(values):.1f}" if values else "-"


def summary_table(drafted: Answer, alone: Answer) -> Table:
    table = Table(title="summary", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("tokens/s with speculation", _speed(drafted))
    table.add_row("tokens/s without", _speed(alone))
    ratio = drafted.tokens_per_s / alone.tokens_per_s if alone.tokens_per_s else None
    table.add_row("ratio", _number(ratio, "{:.2f}x"))
    table.add_row("acceptance rate", _number(drafted.acceptance_rate, "{:.0%}"))
    table.add_row("mean acceptance length", _number(drafted.mean_acceptance_length, "{:.2f}"))
    table.add_row("texts identical", "yes" if drafted.text == alone.text else "NO")
    return table


def _speed(answer: Answer) -> str:
    return f"{answer.tokens_per_s:.1f} ({answer.num_tokens} in {answer.seconds:.2f} s)"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
