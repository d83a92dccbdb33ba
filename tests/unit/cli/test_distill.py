"""`paceline distill` on a tiny target: a draft that loads, one sentence for what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import distill as command
from paceline.cli.distill_view import training_display, training_line
from paceline.cli.main import app
from paceline.config import ModelConfig
from paceline.engine.distill import Progress, StepReport
from paceline.engine.draft_report import load_dense, measure_acceptance
from paceline.engine.torch_loader import load_torch_engine
from paceline.models import ASSETS
from tests.unit.engine.tiny_chat import chats_file, random_chats, save_chat_model

SMALL_FORM, HEADS = str(ASSETS / "smollm2-draft"), str(ASSETS / "smollm2-medusa")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["distill", *map(str, arguments)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats_file(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture(scope="module")
def draft(target: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder, and what the command said."""
    out = tmp_path_factory.mktemp("place") / "draft"
    result = run(target, "--out", out, "--chats", chats, "--steps", 20, "--vocab", 64,
                 "--num-layers", 2, "--held-out", 4)  # fmt: skip
    assert result.exit_code == 0, result.output
    return out, result.output


def test_a_draft_that_loads_and_accepts_what_its_report_says(
    draft: tuple[Path, str], target: Path
) -> None:
    folder, said = draft
    engine = load_torch_engine(ModelConfig(source="x", max_model_len=64, device="cpu"), folder)
    assert engine.info.vocab_size == 101
    report = json.loads((folder / "report.json").read_text())
    direct = measure_acceptance(load_dense(target), load_dense(folder), random_chats(40)[-4:])
    assert report["acceptance"]["agreement"] == direct.agreement
    assert list(report["acceptance"]["coupled"].values()) == list(direct.coupled.values())
    assert f"{direct.agreement:.3f}" in said
    assert str(folder) in said
    assert "training: step 1, " in said
    assert "training: step 20, " in said


def test_the_cards_figures_again_by_one_command(
    draft: tuple[Path, str], target: Path, chats: Path, tmp_path: Path
) -> None:
    folder, _ = draft
    result = run(target, "--report-only", "--draft", folder, "--chats", chats, "--last", 4,
                 "--out", tmp_path / "again")  # fmt: skip
    assert result.exit_code == 0, result.output
    known, again = (
        json.loads((place / "report.json").read_text()) for place in (folder, tmp_path / "again")
    )
    assert again["acceptance"] == known["acceptance"]
    assert again["num_chats"] == 4


def test_what_a_draft_may_have_learned_from_is_said(
    draft: tuple[Path, str], target: Path, chats: Path, tmp_path: Path
) -> None:
    """The same chats are held out again; of other ones nobody knows."""
    more = chats_file(tmp_path / "more.jsonl", 50)
    for name, file, is_said in (("same", chats, False), ("more", more, True)):
        result = run(target, "--out", tmp_path / name, "--chats", file, "--steps", 1,
                     "--init", draft[0], "--held-out", 4)  # fmt: skip
        assert result.exit_code == 0, result.output
        assert ("warning: the draft that this one went on from may" in result.stderr) == is_said
        assert ("**Held out**: the draft" in (tmp_path / name / "README.md").read_text()) == is_said


def test_a_report_alone_overwrites_nothing(
    draft: tuple[Path, str], target: Path, chats: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(draft[0], folder)
    measuring = (target, "--report-only", "--draft", folder, "--chats", chats, "--last", 4)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "README.md").write_text("mine")
    other, damaged = tmp_path / "other", tmp_path / "damaged"
    shutil.copytree(folder, other)
    shutil.copytree(folder, damaged)
    (damaged / "report.json").write_text("{")
    for place, said in (
        (mine, "holds something else"),
        (other, "holds another draft's report"),
        (damaged, "report.json is damaged"),
        (target / "report", "in the target's own folder"),
    ):
        result = run(*measuring, "--out", place)
        assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
        assert said in result.stderr
    assert (mine / "README.md").read_text() == "mine"
    assert not (target / "report").exists()
    known = json.loads((folder / "report.json").read_text())
    result = run(*measuring, "--out", folder)  # its own: how it was made stays
    assert result.exit_code == 0, result.output
    again = json.loads((folder / "report.json").read_text())
    assert (again["made"], again["num_chats"]) == (known["made"], 4)
    assert "How it was made" in (folder / "README.md").read_text()


def test_heads_and_their_figures_again(target: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    result = run(target, "--out", out, "--chats", chats, "--steps", 5, "--medusa", 2,
                 "--held-out", 4)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "| head 1: token t + 3 |" in result.stdout
    result = run(target, "--report-only", "--medusa-heads", out, "--chats", chats, "--last", 4,
                 "--out", tmp_path / "again")  # fmt: skip
    assert result.exit_code == 0, result.output
    known, again = (
        json.loads((place / "report.json").read_text()) for place in (out, tmp_path / "again")
    )
    for key in ("heads", "accepted_chain", "accepted_tree", "num_tokens"):
        assert again[key] == known[key]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--out names the folder"),
        (("--out", "o", "--chats", "c", "--num-chats", "5"), "--chats and --num-chats exclude"),
        (("--out", "o", "--steps", "5", "--minutes", "5"), "--steps and --minutes exclude"),
        (("--out", "o", "--layers", "0", "--init", "d"), "--layers and --init exclude"),
        (("--out", "o", "--init", "d", "--medusa", "3"), "--init and --medusa exclude"),
        (("--out", "o", "--layers", "0", "--num-layers", "1"), "--layers and --num-layers"),
        (("--out", "o", "--num-layers", "1", "--medusa", "1"), "--num-layers and --medusa"),
        (("--out", "o", "--published"), "--published goes with --medusa"),
        (("--out", "o", "--medusa", "1", "--published", "--vocab", "9"), "leave --vocab away"),
        (("--out", "o", "--minutes", "0"), "--minutes must be above 0"),
        (("--out", "o", "--num-chats", "0"), "needs --text files"),
        (("--out", "o", "--draft", "d"), "--draft goes with --report-only"),
        (("--out", "o", "--last", "5"), "--last goes with --report-only"),
        (("--report-only", "--draft", "d"), "--report-only needs --chats"),
        (("--report-only", "--draft", "d", "--chats", "c", "--steps", "5"), "without"),
        (("--report-only", "--draft", "d", "--medusa-heads", "h", "--chats", "c"), "one of"),
        (("--out", "o", "--medusa", "17"), "less than or equal to 16"),
    ],
)
def test_options_that_do_not_go_together(
    target: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(target, *arguments)
    assert result.exit_code == 2
    flat = " ".join(result.stderr.replace("│", " ").split())
    assert message in flat


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--chats", "none.jsonl"), "cannot read or write none.jsonl: No such file"),
        (("--text", "none.txt", "--num-chats", "0"), "cannot read or write none.txt: No such file"),
        (("--layers", "0,x"), "--layers '0,x' are no layer numbers such as 0,1,16,17,18"),
        (("--layers", ","), "--layers ',' are no layer numbers"),
        (("--layers", ""), "--layers '' are no layer numbers"),
        (("--device", "cpu:abc"), "--device 'cpu:abc' is no device such as cpu or cuda:0"),
        (("--length", "300"), "--length 300 is more than the 256 positions that"),
        (("--layers", "0 7"), "layers must be distinct numbers from 0 to 2, the target's: 0 7"),
        (("--num-layers", "9"), "the target has 3 layers: a draft may keep 1 to 3"),
        (("--student-config", "none.json"), "cannot read none.json: No such file"),
        (("--student-config", "/dev/zero"), "/dev/zero is not an ordinary file"),
        (("--chats", "/dev/zero"), "/dev/zero is not an ordinary file"),
        (("--text", "/dev/zero", "--num-chats", "0"), "/dev/zero is not an ordinary file"),
        (("--device", "mps"), "--device 'mps' is neither cpu nor cuda"),
        (
            ("--init", "", "--steps", "1"),
            "--init '' names no draft: give a draft's folder or alias",
        ),
        (("--init", SMALL_FORM), f"{SMALL_FORM} is the small form of a draft: --init needs"),
        (("--init", HEADS), f"{HEADS} holds Medusa heads: --init names a draft's folder"),
        (("--init", "nowhere"), "model 'nowhere' is neither a folder here"),
    ],
)
def test_expected_errors_are_one_line_and_exit_1(
    target: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(target, "--out", tmp_path / "out", "--length", 64, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {message}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["toy", "nowhere", "a/b/c"])
def test_a_target_that_is_not_there(name: str, tmp_path: Path) -> None:
    result = run(name, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_a_students_config(
    target: Path, tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "student.json"

    def attempt(text: str) -> str:
        path.write_text(text)
        return run(target, "--out", tmp_path / "out", "--student-config", path,
                   "--length", 64).stderr  # fmt: skip

    for text, said in (
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 50_000, "is not JSON"),
        ('{"rope_theta": 3}', "not rope_theta: everything else is the target's"),
        ('{"hidden_size": 64}', "may not be wider than the target"),
        ('{"intermediate_size": 1000000000}', "intermediate_size of the student may not exceed"),
        ('{"num_hidden_layers": 10000000}', "num_hidden_layers of the student may not exceed"),
        ('{"head_dim": 1000000000}', "num_attention_heads x head_dim of the student may not"),
    ):
        assert said in attempt(text), text
    monkeypatch.setattr(command, "MAX_STUDENT_BYTES", 4)
    assert "too large to be a student's config" in attempt('{"hidden_size": 16}')
    monkeypatch.setattr(command, "MAX_STUDENT_BYTES", len('{"hidden_size": 16}'))
    assert "too large" not in run(target, "--out", tmp_path / "out", "--student-config", path,
                                  "--chats", tmp_path / "none").stderr  # fmt: skip


@pytest.mark.parametrize(
    ("to", "work"), [("a/b", "a/b-work"), ("a/", "a-work"), (".", "/here/x-work"), ("/", "/-work")]
)
def test_the_default_work_folder_lies_beside_the_result(
    to: str, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here/x"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    expected = tmp_path / work[1:] if work.startswith("/here") else Path(work)
    assert command.work_folder(Path(to)) == expected


def test_a_draft_with_another_tokenizer_is_not_measured(
    target: Path, chats: Path, tmp_path: Path
) -> None:
    other = save_chat_model("llama", tmp_path / "other", vocab_size=103)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["more"] = 101
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = run(target, "--report-only", "--draft", other, "--chats", chats)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "has another tokenizer than" in result.stderr


def test_ctrl_c_saves_and_the_same_command_goes_on(
    target: Path, chats: Path, tmp_path: Path
) -> None:
    arguments = [
        *(sys.executable, "-m", "paceline.cli.main", "distill", str(target)),
        *("--out", str(tmp_path / "out"), "--chats", str(chats), "--num-layers", "2"),
    ]
    process = subprocess.Popen(
        [*arguments, "--steps", "1000000"], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("training: "):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
        code = process.wait(30)
    finally:
        process.kill()
        process.stderr.close()
    assert code == 130, rest
    assert rest.splitlines()[-2:] == [
        "stopped; the same command goes on from here",
        "error: interrupted",
    ]
    result = run(*arguments[4:], "--steps", "1")  # it has done more already
    assert result.exit_code == 0, result.output
    assert "training" not in result.stderr
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["made"]["progress"]["steps"] >= 1


def test_a_line_of_training() -> None:
    report = StepReport(Progress(steps=30, tokens=900, seconds=10.0), 1.5, 712.4, 0.25)
    assert training_line(report, 1.25) == "step 30, 712 tokens/s, KL 1.250, 0:30 left"


def test_ctrl_c_outside_of_training_ends_at_once() -> None:
    with training_display() as watch:
        watch.progress("making up chats", 1, 2)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        watch.step(StepReport(Progress(steps=1, seconds=1.0), 1.0, 1.0, 0.5))
        signal.raise_signal(signal.SIGINT)
        assert watch.should_stop()
        with pytest.raises(KeyboardInterrupt):  # a second one means it
            signal.raise_signal(signal.SIGINT)
