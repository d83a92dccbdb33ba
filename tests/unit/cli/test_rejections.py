"""`paceline rejections`, and the rejection log as data of `paceline distill`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from paceline.cli import distill_view
from paceline.cli.distill_view import Pace, left_text, training_display
from paceline.cli.main import app
from tests.unit.engine.rejection_lines import line, write_lines
from tests.unit.engine.tiny_chat import chats_file, save_chat_model

TEXT = tuple(range(20, 60))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    write_lines(folder / "rejections-7.1.jsonl", [line(TEXT, 5), line(TEXT, 6, 9)])
    write_lines(folder / "rejections-7.jsonl", [line(TEXT, 7, 9), line(TEXT, 7, 9)], '{"mod')
    return folder


def draft_folder(folder: Path, vocab: list[int] | None, size: int = 26) -> Path:
    folder.mkdir()
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    if vocab is not None:
        (folder / "draft_vocab.json").write_text(json.dumps(vocab))
    return folder


def test_what_a_log_says(logs: Path, tmp_path: Path) -> None:
    draft = draft_folder(tmp_path / "draft", [1, 25, 26])
    result = run("rejections", logs, "--draft", draft)
    assert result.exit_code == 0, result.output
    rows = [" ".join(row.split()) for row in result.stdout.splitlines()]
    assert rows == [
        "model tiny",
        "rejections 4 in 3 different places",
        "proposed by model 4",
        "token taken probability 0.607, the likeliest one 100%",
        "likeliest token probability 0.607",
        f"{draft} never says 2 (50%)",
        "without context 1 of 4 (rejection_log.context_tokens)",
        "token 27 2 (50.0%)",
        "token 25 1 (25.0%)",
        "token 26 1 (25.0%)",
    ]


def test_as_json(logs: Path, tmp_path: Path) -> None:
    draft = draft_folder(tmp_path / "draft", None)  # says every id of its own below 26
    found = json.loads(run("rejections", logs, "--draft", draft, "--json", "--top", "1").stdout)
    assert (found["num_entries"], found["num_outside"]) == (4, 3)
    assert found["tokens"] == [[27, 2]]
    assert json.loads(run("rejections", logs, "--json").stdout)["num_outside"] is None


def test_errors_are_one_line_and_exit_1(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "rejections-1.jsonl", [])
    bent = write_lines(tmp_path / "bent", [line(TEXT, 5, model="a\x1b[2J")], "{}\n")
    good = write_lines(tmp_path / "good", [line(TEXT, 5)])
    odd = draft_folder(tmp_path / "odd", None, size=0)
    for arguments, said in (
        ((tmp_path,), f"there are no rejections in {tmp_path} yet"),
        ((tmp_path / "none",), f"cannot read {tmp_path / 'none'}: No such file or directory"),
        ((bent,), f"{bent}, line 2 is no rejection: context_len is no whole number"),
        ((good, "--draft", odd), f"{odd}/config.json names no vocab_size"),
        ((good, "--draft", "nowhere"), ""),
    ):
        result = run("rejections", *arguments)
        assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), arguments
        assert result.stderr.startswith(f"error: {said}")
    assert run("rejections").exit_code == 2
    assert run("rejections", empty, "--top", "1001").exit_code == 2


def test_a_name_does_not_steer_the_terminal(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log", [line(TEXT, 5, model="a\x1b[2J")])
    assert "\x1b" not in run("rejections", log).stdout


def test_distill_says_what_it_takes_and_what_it_cannot(logs: Path, tmp_path: Path) -> None:
    target = save_chat_model("llama", tmp_path / "target")
    chats = chats_file(tmp_path / "chats.jsonl")
    common = ("distill", target, "--chats", chats, "--steps", 1, "--held-out", 4)
    result = run(*common, "--out", tmp_path / "draft", "--rejections", logs)
    assert result.exit_code == 0, result.output
    said = (
        "2 rejected places in 1 texts of the log; "
        "1 of 4 entries have no context: rejection_log.context_tokens"
    )
    assert said in result.stderr.splitlines()
    assert said in (tmp_path / "draft/README.md").read_text()
    bare = write_lines(tmp_path / "bare", [line(TEXT, 5)])
    foreign = write_lines(tmp_path / "foreign", [line(range(99, 140), 5, 9)])
    for log, problem in (
        (bare, f"nothing to learn from in {bare}: 1 of 1 entries have no context: "),
        (foreign, f"{foreign}: text 1 has token id 103, the target has 101 ids: it was made"),
    ):
        out = tmp_path / f"{log.name}-draft"
        result = run(*common, "--out", out, "--rejections", log)
        assert result.exit_code == 1
        assert problem in result.stderr.splitlines()[-1]
    result = run("distill", target, "--report-only", "--rejections", logs)
    assert result.exit_code == 2
    assert "--rejections goes without" in " ".join(result.stderr.replace("│", " ").split())


# -- the time that is left


def test_the_pace_of_a_stage() -> None:
    pace = Pace()
    assert pace.remaining_s("a", 64, 256, 100.0) is None  # resumed: 64 were there
    assert pace.remaining_s("a", 64, 256, 130.0) is None
    assert pace.remaining_s("a", 128, 256, 160.0) == 120.0
    assert pace.remaining_s("a", 256, 256, 220.0) is None
    assert pace.remaining_s("b", 0, 10, 300.0) is None  # another stage has its own
    assert pace.remaining_s("b", 5, 10, 310.0) == 10.0
    assert pace.remaining_s("c", 0, 0, 310.0) is None
    assert (left_text(None), left_text(125.4)) == ("", ", 2:05 left")


def test_stages_show_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill_view, "LINE_PAUSE_S", 0.0)
    with training_display() as watch:
        watch.progress("making up chats", 0, 4)
        watch.progress("making up chats", 1, 4)
        watch.progress("making up chats", 4, 4)
    said = capsys.readouterr().err.splitlines()
    assert (said[0], said[2]) == ("making up chats: 0 of 4", "making up chats: 4 of 4")
    assert re.fullmatch(r"making up chats: 1 of 4, \d+:\d\d left", said[1])
