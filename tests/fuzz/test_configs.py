"""The share of `python -m tests.fuzz.configs` that every run affords, and what it has found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline import models
from paceline.cli import servefile
from paceline.errors import ConfigError
from tests.fuzz.configs import RAW_FILES, fuzz, model_folder


def test_whatever_stands_in_a_configuration() -> None:
    outcomes = fuzz(random.SystemRandom().randrange(1 << 32), 600)
    assert outcomes.total() == 600
    for kind in ("config tree", "Serve file", "model folder"):
        assert outcomes[f"{kind}: valid"] > 5
        assert outcomes[f"{kind}: refused"] > 20


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("model.safetensors.index.json", {"weight_map": "x"}, id="map is a string"),
        pytest.param("model.safetensors.index.json", {"weight_map": {"w": 1}}, id="a number"),
        pytest.param("model.safetensors.index.json", {"weight_map": {"w": {}}}, id="an object"),
        pytest.param("model.safetensors.index.json", {"weight_map": {"w": "../a"}}, id="outside"),
        pytest.param("model.safetensors.index.json", b"[" * 100_000, id="deep index"),
        pytest.param("model-1.safetensors", RAW_FILES[13], id="deep header"),
        pytest.param("model-1.safetensors", RAW_FILES[10], id="endless header"),
    ],
)
def test_a_folder_that_cannot_be_served(tmp_path: Path, name: str, content: Any) -> None:
    folder = model_folder(tmp_path / "model")
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=name):
        models.resolve(str(folder))


@pytest.mark.parametrize("source", ["~nobody-here/x", "a" * 5000, "\x00", ""])
def test_a_source_that_is_no_folder(source: str) -> None:
    with pytest.raises(ConfigError):
        models.resolve(source)


def test_a_folder_where_the_weights_should_be(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").mkdir()
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        models.resolve(str(tmp_path))


@pytest.mark.parametrize("ids", [{"a": 0, "b": "1"}, {"a": None}, {"a": -1}, {}])
def test_token_ids_that_are_none(tmp_path: Path, ids: dict[str, Any]) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    for read in (models.tokenizer_hash, models.num_token_ids):
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            read(folder)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a: 2026-13-01", id="no month"),
        pytest.param("[" * 1200, id="deep"),
        pytest.param("applications: [{name: a, import_path: b, deployments: [x]}]", id="type"),
        pytest.param("!!python/object/apply:os.system ['true']", id="python tag"),
    ],
)
def test_serve_files_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"serve\.yaml"):
        servefile.load(path)
