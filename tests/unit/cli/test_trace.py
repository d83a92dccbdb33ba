"""`paceline trace`: what it prints, where it looks, and how it ends."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from paceline import models
from paceline.cli.main import app
from paceline.cli.trace_bars import axis, bar, step
from paceline.cli.trace_builder import request_of
from paceline.cli.trace_model import STAGES, Request, request_json
from paceline.cli.trace_spans import spans_of
from paceline.cli.trace_view import LETTERS, MAX_MARKS, MAX_ROWS, show_request
from paceline.round_times import Stage
from tests.unit.cli.trace_lines import CLIENT_SPAN, TRACE_ID, Made, make_trace


def trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default folder, with one trace of twelve rounds."""
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path))
    made = tmp_path / "traces"
    made.mkdir()
    make_trace().write(made)
    return made


def request(made: Made) -> Request:
    found = request_of([span for _, line in made.lines() for span in spans_of(line.encode())[0]])
    assert found is not None
    return found


def drawn(
    wanted: Request, width: int = 100, encoding: str = "utf-8", color: str | None = "standard"
) -> list[str]:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding) as file:
        system: Any = color
        console = Console(
            file=file,
            width=width,
            force_terminal=color is not None,
            color_system=system,
            soft_wrap=True,
            highlight=False,
        )
        show_request(console, wanted, wanted.rounds)
        file.flush()
        return raw.getvalue().decode(encoding).splitlines()


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def rows(lines: list[str]) -> list[str]:
    heading = next(at for at, line in enumerate(lines) if line.lstrip().startswith("round"))
    return lines[heading + 1 :]


# ---------------------------------------------------------------------------------- the command


def test_the_last_request_of_the_default_folder(folder: Path) -> None:
    for arguments in ((), ("--last",), ("--dir", folder), tuple(folder.glob("*.jsonl"))):
        result = trace(*arguments)
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0] == f"trace {TRACE_ID}  smollm2-135m  chatcmpl-1f"
        assert lines[1:3] == [
            "426.2 ms, first tokens after 41.5 ms",
            "48 tokens in 12 rounds, 4.00 a round, 36 of 44 proposals accepted (82 %)",
        ]
        assert len(rows(lines)) == 12
        assert "\x1b" not in result.stdout
        assert result.stderr == ""


def test_json_of_the_command(folder: Path) -> None:
    result = trace("--last", "--json")
    made = request(make_trace())
    assert json.loads(result.stdout) == request_json(made, made.rounds)
    assert len(result.stdout.splitlines()) == 1


def test_one_trace_by_its_id(folder: Path) -> None:
    make_trace(num_rounds=3, trace_id="a" * 32, seed=5, began_ms=1e12).write(folder)
    assert len(rows(trace("--trace-id", "A" * 32).stdout.splitlines())) == 3
    result = trace("--trace-id", "b" * 32)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: no request of trace {'b' * 32} in {folder}\n"


def test_no_trace_says_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path))
    for arguments in ((), ("--json",), ("--dir", tmp_path / "traces")):
        result = trace(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        [line] = result.stderr.splitlines()
        assert line == (
            f"error: no traced request in {tmp_path}/traces; to write some, the args of the Serve "
            f"YAML need tracing: {{sample_ratio: 1.0, file_dir: {tmp_path}/traces}}"
        )


def test_a_file_that_is_not_there(folder: Path) -> None:
    result = trace("none.jsonl")
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first == "cannot read none.jsonl: No such file or directory"
    assert second.startswith("error: no traced request in none.jsonl; ")


def test_problems_are_told_on_stderr_only(folder: Path) -> None:
    (folder / "paceline-draft-7.jsonl").write_text('{"resourceSpans": [{"traceId": "' + TRACE_ID)
    result = trace("--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rounds"]
    assert "its last line is not whole and is left out" in result.stderr


@pytest.mark.parametrize(
    ("given", "numbers"),
    [("3..5", [3, 4, 5]), ("11..", [11, 12]), ("..2", [1, 2]), ("7", [7]), ("0..0", None)],
)
def test_some_of_the_rounds(folder: Path, given: str, numbers: list[int] | None) -> None:
    shown, data = trace("--rounds", given), trace("--rounds", given, "--json")
    if numbers is None:
        assert (shown.exit_code, data.exit_code) == (1, 1)
        assert shown.stderr == "error: the request has no round 0..0, only 1..12\n"
        return
    assert [int(row.split()[0]) for row in rows(shown.stdout.splitlines())] == numbers
    assert [item["round"] for item in json.loads(data.stdout)["rounds"]] == numbers


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rounds", ".."),
        ("--rounds", "5-7"),
        ("--rounds", "1..9999999999"),
        ("--rounds", "٣"),
        ("--trace-id", "4bf9"),
        ("--trace-id", TRACE_ID, "--last"),
        ("--dir", ".", "x.jsonl"),
    ],
)
def test_a_wrong_command_line(folder: Path, arguments: tuple[str, ...]) -> None:
    assert trace(*arguments).exit_code == 2


def test_a_page_is_written(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "request.html"
    result = trace("--html", page)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {page}\n")
    assert page.read_text().startswith("<!doctype html>")
    result = trace("--html", page, "--json")
    assert json.loads(result.stdout)["trace_id"] == TRACE_ID


def test_a_page_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    result = trace("--html", tmp_path / "none" / "x.html")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: cannot write {tmp_path}/none/x.html: No such file")


# ---------------------------------------------------------------------------------- the picture


def test_each_row_has_its_counts_and_its_tokens() -> None:
    made = request(make_trace())
    for item, row in zip(made.rounds, rows(plain(drawn(made))), strict=True):
        number, k, kept, marks, wall = row.split()[:5]
        assert (number, k) == (str(item.number), "4")
        assert kept == f"{item.accepted}/{item.proposed}"
        assert marks == "●" * item.accepted + "○" * (item.proposed - item.accepted) + "◆"
        assert wall == f"{item.wall_ms:.1f}"


def test_the_legend_has_the_sums() -> None:
    made = request(make_trace())
    text = " ".join(plain(drawn(made)))
    for stage in STAGES:
        total = sum(item.ms(stage) for item in made.rounds)
        assert f"{stage.span_name} {total:.1f} ms " in text


def test_letters_where_there_are_no_colors() -> None:
    made = request(make_trace())
    for item, row in zip(made.rounds, rows(drawn(made, color=None)), strict=True):
        letters = row.split()[-1]
        assert letters.strip("".join(LETTERS.values())) == ""
        share = letters.count("V") / len(letters)
        assert share == pytest.approx(item.ms(Stage.VERIFY) / item.wall_ms, abs=0.06)
        order = [letter for letter in LETTERS.values() if letter in letters]
        assert "".join(dict.fromkeys(letters)) == "".join(order)


def test_only_ascii_where_nothing_else_can_be_written() -> None:
    lines = drawn(request(make_trace()), encoding="ascii", color=None)
    assert "####+" in lines[-1]
    assert any("o" in line.split()[3] for line in rows(lines))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_it_fits_the_terminal(width: int, num_choices: int) -> None:
    made = request(make_trace(num_choices=num_choices))
    first, _, _, *lines = plain(drawn(made, width))
    assert max(map(len, rows(lines))) == width
    assert max(map(len, lines)) == width
    assert first.startswith("trace ")


def test_both_lanes_are_drawn() -> None:
    """A draft that runs while the target verifies is above it."""
    made = Made()
    gateway = made.span("gateway", "chat toy", CLIENT_SPAN, 0, 40, kind=2)
    session = made.span("target", "session", gateway, 0, 40)
    span = made.span("target", "round", session, 0, 40, paceline__round=1)
    made.span("target", "verify", span, 20, 40)
    made.span("draft", "draft", span, 10, 30)
    [row] = rows(drawn(request(made), width=72))
    green, blue, both = "\x1b[32m▀", "\x1b[34m▀", "\x1b[32;44m▀"
    waiting, verify = "\x1b[90m▄", "\x1b[34m▄"
    assert [sign in row for sign in (waiting, green, both, verify, blue)] == [True] * 4 + [False]
    assert row.index(waiting) < row.index(green) < row.index(both) < row.index(verify)


def test_the_middle_of_many_rounds_is_left_out() -> None:
    made = request(make_trace(num_rounds=MAX_ROWS + 3))
    lines = rows(drawn(made, color=None))
    assert len(lines) == MAX_ROWS + 1
    assert lines[MAX_ROWS // 2] == "  ... 3 more rounds: --rounds N..M shows them"
    assert [int(lines[at].split()[0]) for at in (0, 19, 21, -1)] == [1, 20, 24, 43]
    assert len(rows(drawn(request(make_trace(num_rounds=MAX_ROWS)), color=None))) == MAX_ROWS


def test_sources_have_a_column_where_somebody_told_them() -> None:
    made = Made()
    gateway = made.span("gateway", "chat toy", CLIENT_SPAN, 0, 40, kind=2)
    session = made.span("target", "session", gateway, 0, 40)
    for number, source in enumerate(("model", "suffix", "", "\x1b[31mvery long")):
        told = {"paceline__source": source} if source else {}
        made.span("target", "round", session, 10 * number, 10 * number + 10,
                  paceline__round=number, **told)  # fmt: skip
    shown = request(made)
    lines = drawn(shown, width=72, color=None)
    heading = next(line.split() for line in lines if line.lstrip().startswith("round"))
    assert heading[:4] == ["round", "source", "K", "kept"]
    assert [row.split()[1] for row in rows(lines)] == ["model", "suffix", "-", "\ufffd[31mv"]
    told_rounds = request_json(shown, shown.rounds)["rounds"]
    assert [item["source"] for item in told_rounds][:3] == ["model", "suffix", ""]
    old = drawn(request(make_trace()), color=None)
    assert "source" not in "\n".join(old)


def test_marks_are_bounded() -> None:
    made = Made()
    gateway = made.span("gateway", "chat toy", CLIENT_SPAN, 0, 40, kind=2)
    session = made.span("target", "session", gateway, 0, 40)
    made.span("target", "round", session, 0, 40, paceline__proposed=MAX_MARKS + 4,
              paceline__accepted=MAX_MARKS + 4)  # fmt: skip
    [row] = rows(drawn(request(made), color=None))
    assert row.split()[3] == "●" * MAX_MARKS


def test_a_model_does_not_steer_the_terminal() -> None:
    made = request(make_trace(num_rounds=1, model="\x1b[31mred\n\ud800[bold]"))
    first = drawn(made, color=None)[0]
    assert "\ufffd[31mred\ufffd\ufffd[bold]" in first


def test_a_request_without_rounds() -> None:
    made = make_trace(num_rounds=2)
    del made.spans["paceline-target"]
    lines = drawn(request(made), color=None)
    assert lines[2] == "0 tokens in 0 rounds"
    assert lines[-1] == "No file has a round of it."


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (2, "target_lost", "target_lost"),
        (2, "", "failed"),
        (0, "client_disconnected", "client_disconnected"),
    ],
)
def test_a_request_that_did_not_end_well_says_so(status: int, error: str, said: str) -> None:
    made = make_trace(num_rounds=2)
    span = made.spans["paceline-gateway"][0]
    span["status"] = {"code": status}
    if error:
        span["attributes"].append({"key": "error.type", "value": {"stringValue": error}})
    assert drawn(request(made), color=None)[0].endswith(f"chatcmpl-1f  {said}")


@pytest.mark.parametrize(
    ("scale_ns", "columns", "labels"),
    [
        (40_000_000, 60, "|0             |10            |20            |30"),
        (1_000_000, 30, "|0             |0.5"),
        (1, 40, "|0                  |5e-07"),
    ],
)
def test_the_axis_has_round_numbers(scale_ns: int, columns: int, labels: str) -> None:
    assert axis(scale_ns, columns) == labels


def test_steps_of_an_axis() -> None:
    found = [step(least) for least in (0.3, 1, 1.1, 3, 7, 60)]
    assert found == pytest.approx([0.5, 1, 2, 5, 10, 100])


def test_a_column_is_what_takes_most_of_it() -> None:
    [item] = request(make_trace(num_rounds=1)).rounds
    wall = item.times.wall
    assert bar(item, STAGES, wall, 2) == [Stage.VERIFY, Stage.VERIFY]
    assert bar(item, (Stage.SAMPLE,), wall * 2, 4) == [None, Stage.SAMPLE, None, None]
    assert bar(item, STAGES, wall, 1000)[0] is Stage.QUEUE
