"""The command line: exit codes, one-line errors, no traceback for what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline import __version__, models
from paceline.cli.config_table import markdown_table
from paceline.cli.main import DEMO_CONFIG, app
from paceline.cli.serve import curl_line


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path))


def test_version() -> None:
    result = run("version")
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_config_table_is_printed_as_it_is() -> None:
    result = run("config-table")
    assert (result.exit_code, result.stdout) == (0, markdown_table())


def test_list_says_what_is_missing_and_how_to_get_it() -> None:
    result = run("models", "list")
    assert result.exit_code == 0
    for name in models.ALIASES:
        assert f"run `paceline models fetch {name}`" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models", "verify"), "error: model smollm2-135m is not in"),
        (("models", "fetch", "x"), "error: no alias 'x'; the aliases are"),
        (("serve", "none.yaml"), "error: cannot read none.yaml: No such file or directory"),
        (("demo", "--config", "none.yaml"), "error: none.yaml is not there; name a Serve YAML"),
        (("demo", "--url", "http://127.0.0.1:9"), "error: no answer from http://127.0.0.1:9: "),
    ],
)
def test_expected_errors_are_one_line_and_exit_1(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_usage_errors_exit_2() -> None:
    assert run("serve").exit_code == 2
    assert run("serve", "x.yaml", "--port", "70000").exit_code == 2
    assert run("nonsense").exit_code == 2


def test_the_demo_finds_its_config_in_a_clone() -> None:
    assert DEMO_CONFIG.is_file()


def test_the_curl_line_can_be_pasted() -> None:
    assert curl_line("http://127.0.0.1:8000", "m") == (
        "curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
        '-d \'{"model": "m", "messages": [{"role": "user", "content": "Why is the sky blue?"}], '
        '"max_tokens": 64, "temperature": 0, "stream": true}\''
    )


def test_the_curl_line_takes_the_key_from_the_environment() -> None:
    line = curl_line("http://127.0.0.1:8000", "m", needs_key=True)
    assert '-H "Authorization: Bearer $PACELINE_API_KEY" ' in line
