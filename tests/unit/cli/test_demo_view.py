"""What the demo prints, with and without a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console, RenderableType

from paceline.cli import demo_view
from paceline.cli.demo_stream import Answer, Piece, Round


def rendered(*items: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=100, soft_wrap=True)
    for item in items:
        console.print(item)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def shown(piece: Piece, terminal: bool) -> str:
    colors = {"force_terminal": True, "color_system": "standard"} if terminal else {}
    console = Console(file=io.StringIO(), soft_wrap=True, **colors)  # type: ignore[arg-type]
    demo_view.show_piece(console, piece)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_each_origin_has_its_own_color_and_plain_has_none() -> None:
    colored = {origin: shown(Piece("x", origin), True) for origin in demo_view.STYLES}
    assert colored == {
        "accepted": "\x1b[32mx\x1b[0m",
        "recovered": "\x1b[33mx\x1b[0m",
        "bonus": "\x1b[36mx\x1b[0m",
    }
    assert shown(Piece("x", "plain"), True) == "x"


def test_without_a_terminal_the_text_is_untouched() -> None:
    text = "  a [bold] line \n\n with [/] brackets, and blanks "
    assert shown(Piece(text, "accepted"), False) == text


def test_a_model_cannot_steer_the_terminal() -> None:
    assert shown(Piece("a\x1b[2J\x07b\n", "plain"), True) == "a\ufffd[2J\ufffdb\n"


def rounds(number: int) -> list[Round]:
    return [Round(i + 1, 4, 2, 1, 1.0, 0.5, 0.25, 8.0, "model") for i in range(number)]


def test_the_table_has_one_row_per_round_and_the_sums() -> None:
    drafted, plain = rounds(2), Round(3, 4, 0, 0, 0, 0, 0, 5)
    drafted[1] = replace(drafted[1], source="suffix")
    lines = rendered(demo_view.rounds_table([*drafted, plain], 0))
    cells = [line.strip("│┃ ").split() for line in lines.splitlines() if "│" in line]
    assert [[c for c in row if c != "│"] for row in cells] == [
        ["1", "model", "4", "2", "1", "1.0", "0.5", "0.2", "8.0"],
        ["2", "suffix", "4", "2", "1", "1.0", "0.5", "0.2", "8.0"],
        ["3", "-", "4", "0", "0", "0.0", "0.0", "0.0", "5.0"],
        ["all", "4", "2", "1.0", "0.5", "0.2", "7.0"],
    ]


def test_a_long_table_is_cut_and_says_how_much() -> None:
    text = rendered(demo_view.rounds_table(rounds(30), 24))
    assert "│    +6 │" in text
    assert "│    25 │" not in text


def test_an_answer_without_rounds_has_an_empty_table() -> None:
    assert "│   all │" in rendered(demo_view.rounds_table([], 24))


def test_the_summary_compares_and_judges() -> None:
    drafted = Answer("abc", 60, 2.0, rounds(20))
    text = rendered(demo_view.summary_table(drafted, Answer("abc", 60, 3.0)))
    rows = [line.strip("│ ").split(" │ ") for line in text.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["tokens/s with speculation", "30.0 (60 in 2.00 s)"],
        ["tokens/s without", "20.0 (60 in 3.00 s)"],
        ["ratio", "1.50x"],
        ["acceptance rate", "50%"],
        ["mean acceptance length", "2.00"],
        ["texts identical", "yes"],
    ]
    assert "NO" in rendered(demo_view.summary_table(drafted, Answer("abd", 60, 3.0)))


def test_the_legend_names_the_three_colors() -> None:
    text = demo_view.legend()
    assert [span.style for span in text.spans] == ["green", "yellow", "cyan"]
