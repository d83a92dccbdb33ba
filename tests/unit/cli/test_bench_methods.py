"""`paceline bench methods` from the command line, over the real gateway with the toy pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.main import app
from paceline.config import Offer
from tests.unit.cli.toy_service import gateway, serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(gateway(None)) as address:
        yield address


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "methods", *arguments], env={"COLUMNS": "120"})


def test_a_draft_beside_none(url: str, tmp_path: Path) -> None:
    file = tmp_path / "new" / "methods.json"
    arguments = ("--methods", "model", "--sets", "chat,repeat", "--limit", "2", "--rounds", "2")
    result = run("--url", url, *arguments, "--max-tokens", "24", "--json", str(file))
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written["sets"] == {"chat": 2, "repeat": 2}
    rows = {(row["set"], row["method"]): row for row in written["rows"]}
    assert len(rows) == 4
    for name in ("chat", "repeat"):
        assert rows[name, "off"]["mean_acceptance_length"] == 1.0
        assert rows[name, "model"]["mean_acceptance_length"] > 1.5
        assert rows[name, "model"]["texts"] == {"compared": 4, "equal": 4}
    lines = [line.split() for line in result.output.splitlines()]
    assert sum("model" in line and "equal" in line for line in lines) == 2


def test_without_methods_it_is_all_that_the_deployment_offers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    alone = Offer("ngram", has_drafts=False)
    few = ("--sets", "repeat", "--limit", "1", "--rounds", "1", "--max-tokens", "8")
    with serving(gateway(None, offer=alone)) as address:
        result = run("--url", address, *few, "--json", str(out))
        assert result.exit_code == 0, result.output
        rows = json.loads(out.read_text())["rows"]
        assert [row["method"] for row in rows] == ["off", "ngram", "suffix", "auto"]
        assert "medusa was refused: this model has no Medusa heads" in result.stderr
        asked = run("--url", address, *few, "--methods", "suffix,model")
    assert asked.exit_code == 1
    assert asked.stderr == (
        "error: toy has no model: this model has no draft replicas; it offers ngram, suffix, auto\n"
    )


def test_nothing_to_compare() -> None:
    with serving(gateway(None, offer=Offer("off", has_drafts=False))) as address:
        result = run("--url", address)
    said = "error: toy offers no method: speculation is off in this deployment\n"
    assert (result.exit_code, result.stderr) == (1, said)


def test_sets_of_a_file(url: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": text, "category": text[0]} for text in ("a1", "b1", "b2")]
    file.write_text("\n".join(map(json.dumps, records)))
    out = tmp_path / "out.json"
    arguments = ("--prompts", str(file), "--sets", "b", "--methods", "model", "--rounds", "1")
    result = run("--url", url, *arguments, "--max-tokens", "8", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["sets"] == {"b": 2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a running service with --url, or a Serve YAML with --config"),
        (("--url", "http://x", "--config", "y.yaml"), "name a running service with --url, or"),
        (("--url", "http://x", "--methods", "magic"), "'magic' is none of them"),
        (("--url", "http://x", "--sets", "poems"), "there is no set 'poems'"),
        (("--url", "http://x", "--rounds", "0"), "--rounds must be above 0"),
        (("--url", "http://x", "--concurrency", "0"), "--concurrency must be above 0"),
        (("--url", "http://x", "--prompts", "/none.jsonl"), "cannot read /none.jsonl"),
        (("--url", "http://127.0.0.1:1", "--json", "/proc/no/file"), "cannot write /proc/no/file"),
        (("--url", "http://127.0.0.1:1"), "no answer from http://127.0.0.1:1"),
        (("--config", "/none.yaml"), "/none.yaml"),
    ],
)
def test_errors_are_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert said in str(result.exception) + result.output
