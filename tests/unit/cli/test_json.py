"""What scripts rely on: `--json`, exit codes, no color outside a terminal, help that says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from paceline import __version__, models
from paceline.cli import explain_view
from paceline.cli.main import MEASURE, OPERATE, SERVE, TRY, app
from paceline.cli.values import figure, number, size, word
from paceline.engine.medusa_source import MEDUSA_ALIASES
from tests.unit.cli.test_explain import shown
from tests.unit.cli.toy_service import gateway, serving, two_models, two_targets_two_drafts

# Commands for people and scripts alike, as typed after `paceline`.
WITH_JSON = (
    ("version",), ("models", "list"), ("models", "verify"), ("explain",), ("doctor",), ("chat",),
    ("top",),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path))


# Who serves whom is for the controller to draw: told once.
TOLD = two_models()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(gateway(TOLD["toy"], TOLD)) as address:
        yield address


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), **options)


def spoken(*arguments: str, code: int = 0) -> Any:
    """The one JSON value on stdout."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (code, "")
    return json.loads(result.stdout)


def test_version() -> None:
    assert spoken("version", "--json") == {"version": __version__}


def test_models_that_are_missing() -> None:
    found = {state["name"]: state for state in spoken("models", "list", "--json")}
    assert set(found) - set(MEDUSA_ALIASES) == set(models.ALIASES)
    for name, state in ((name, found[name]) for name in models.ALIASES):
        assert (state["is_ready"], state["folder"], state["size_bytes"]) == (False, None, None)
        assert state["fix"].endswith(f"run `paceline models fetch {name}`")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model that is in the cache."""
    alias = models.Alias("tiny", "a model of one byte")
    monkeypatch.setattr(models, "ALIASES", {"tiny": alias})

    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")

    models.install(alias, build)
    return alias.name


def test_models_that_are_there(installed: str, tmp_path: Path) -> None:
    state, *_ = spoken("models", "list", "--json")  # heads of the package are behind it
    folder = tmp_path / installed
    on_disk = sum(file.stat().st_size for file in folder.iterdir())
    assert state == {
        "name": installed, "description": "a model of one byte", "is_ready": True,
        "folder": str(folder), "size_bytes": on_disk, "fix": None,
    }  # fmt: skip
    listed = run("models", "list").stdout.splitlines()
    assert listed[1].split()[:2] == [installed, "ready"]
    assert listed[1].endswith(str(folder))


def test_verify(installed: str, tmp_path: Path) -> None:
    result = run("models", "verify", "--json")
    folder = str(tmp_path / installed)
    assert json.loads(result.stdout) == [{"name": installed, "folder": folder, "is_ok": True}]
    (tmp_path / installed / "config.json").write_text("[]")
    broken = run("models", "verify", "--json")
    assert (broken.exit_code, broken.stdout) == (1, "")
    assert "does not match its checksum" in broken.stderr


def test_explain_shows_every_model(url: str) -> None:
    assert spoken("explain", "--json", "--url", url) == {**TOLD["toy"], "models": TOLD}
    text = run("explain", "--url", url).stdout
    assert text.index("model toy") < text.index("model big")
    assert text.count("target paceline#TargetReplica#aaaa1111") == 2


def test_explain_of_one_model_has_no_headline() -> None:
    assert shown(two_targets_two_drafts()).startswith("target ")
    assert explain_view.CHOSEN not in shown(two_targets_two_drafts())


@pytest.mark.parametrize("command", WITH_JSON, ids=" ".join)
def test_json_is_an_option_of(command: tuple[str, ...]) -> None:
    """By name, so that a script's line works with each."""
    found: Any = get_command(app)
    for name in command:
        found = found.commands[name]
    assert any("--json" in option.opts for option in found.params)


# -- help and exit codes ------------------------------------------------------------------------


def test_help_says_what_exit_codes_mean() -> None:
    text = " ".join(run("--help").stdout.split())
    for code in ("0 all is well", "1 it failed", "2 the command line is wrong", "130 interrupted"):
        assert code in text
    assert "NO_COLOR" in text


def test_commands_are_in_panels() -> None:
    text = run("--help").stdout
    places = [text.index(f" {panel} ") for panel in (SERVE, TRY, MEASURE, OPERATE)]
    assert places == sorted(places)
    commands: Any = get_command(app).commands  # type: ignore[attr-defined]
    visible = {name for name, command in commands.items() if not command.hidden}
    assert visible == {
        "serve", "models", "chat", "demo", "bench", "simulate", "doctor", "top", "explain",
        "dashboards", "trace", "distill", "rejections",
        "key", "certs", "version",
    }  # fmt: skip
    assert {"config-table", "api-table"} <= set(commands)


@pytest.mark.parametrize("command", ["serve", "demo", "chat", "doctor", "top", "trace"])
def test_help_has_examples_on_lines_of_their_own(command: str) -> None:
    lines = [line.strip() for line in run(command, "--help").stdout.splitlines()]
    begun = lines.index("Examples:")
    assert lines[begun + 1].startswith(f"paceline {command}")


def test_help_is_instant() -> None:
    """No command's own imports are made for another's help: Ray and torch take seconds."""
    code = (
        "import sys; from typer.testing import CliRunner; from paceline.cli.main import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "print([m for m in ('ray', 'torch', 'httpx', 'transformers') if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "[]\n"


@pytest.mark.parametrize("command", ["chat", "top", "doctor", "explain"])
def test_usage_errors_exit_2(command: str) -> None:
    assert run(command, "--no-such-option").exit_code == 2


# -- values ---------------------------------------------------------------------------------------


def test_values_of_anybody() -> None:
    assert [figure(v) for v in (None, "4", True, 4.0, 0.123456, float("inf"))] == [
        "-", "-", "-", "4", "0.1235", "-",
    ]  # fmt: skip
    assert (number(1), number("1"), number(float("nan"))) == (1.0, None, None)
    assert word("a\x1b[2J\nb") == "a\ufffd[2J\ufffdb"


def test_sizes() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "5.0 GiB", "3072.0 TiB",
    ]  # fmt: skip
