"""`paceline key`: shown once, and what it prints admits exactly that key."""

from __future__ import annotations

import hashlib
import re

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner, Result

from paceline.cli.keys import new_key
from paceline.cli.main import app
from paceline.config import AppConfig, GatewayConfig


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", ["alice", "007", "yes", "1e5", "null", "a.b_c-d", "x" * 64])
def test_the_lines_admit_the_key(name: str) -> None:
    result = run("key", name)
    assert result.exit_code == 0
    key = result.stdout.removesuffix("\n")
    assert re.fullmatch(r"sk-paceline-[A-Za-z0-9_-]{43}", key)
    assert key not in result.stderr
    lines = result.stderr.split("\n", 1)[1]
    config = GatewayConfig.model_validate(yaml.safe_load(lines))
    assert [known.name for known in config.api_keys] == [name]
    assert config.api_keys[0].sha256 == hashlib.sha256(key.encode()).hexdigest()
    for shown in (repr(config), str(config), config.model_dump_json()):
        assert key not in shown


def test_every_key_is_another() -> None:
    keys = {new_key("same").secret for _ in range(100)}
    assert len(keys) == 100


def test_an_accident_does_not_show_it() -> None:
    made = new_key("alice")
    assert made.secret not in repr(made)
    assert made.secret not in made.yaml
    assert made.config.sha256 in repr(made)


def test_a_key_pasted_in_place_of_its_hash_is_not_shown() -> None:
    """Serve logs what the configuration says about it."""
    made = new_key("alice")
    with pytest.raises(ValidationError) as refused:
        AppConfig.model_validate(
            {"gateway": {"api_keys": [{"name": "alice", "sha256": made.secret}]}}
        )
    assert "gateway.api_keys.0.sha256" in str(refused.value)
    assert made.secret not in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "-a", ".", "x" * 65, "a\nb", "é", "a:b"])
def test_names_that_the_configuration_refuses(name: str) -> None:
    result = run("key", "--", name)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: a key's name has 1 to 64 letters")
    assert "Traceback" not in result.stderr
