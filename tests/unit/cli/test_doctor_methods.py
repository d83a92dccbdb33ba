"""What the doctor says of methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.doctor_checks import Finding
from paceline.cli.doctor_methods import check_heads, check_methods
from paceline.config import AppConfig, Offer


def test_everything_is_offered() -> None:
    found = check_methods("toy", Offer("auto", has_drafts=True, has_heads=True))
    assert (found.name, found.status, found.fix) == ("toy methods", "ok", "")
    assert found.fact == (
        "requests may ask for model, ngram, suffix, medusa, hybrid, auto (default), off"
    )


def test_what_is_missing_comes_with_its_reason_and_what_to_set() -> None:
    found = check_methods("toy", Offer("ngram", has_drafts=False, has_heads=False))
    assert found.fact == (
        "requests may ask for ngram (default), suffix, auto, off; not for model, hybrid: this "
        "model has no draft replicas (draft.deploy: always, and a draft.model); not for medusa: "
        "this model has no Medusa heads (target.medusa: the folder of its heads)"
    )


def test_off_is_off_for_all() -> None:
    found = check_methods("toy", Offer("off", has_drafts=False))
    assert found.fact == (
        "requests may ask for off (default); not for model, ngram, suffix, medusa, hybrid, auto: "
        "speculation is off in this deployment (speculation.method: auto, or another one)"
    )


def heads(source: str, model: str = "some/model") -> list[Finding]:
    target = {"medusa": source, "model": {"source": model}}
    config = AppConfig.model_validate({"models": {"m": {"target": target}}})
    return list(check_heads(config.pools[1]))


def test_heads_are_looked_for_where_they_are_named(tmp_path: Path) -> None:
    (missing,) = heads(str(tmp_path))
    assert (missing.name, missing.status) == ("models.m.target.medusa", "fail")
    assert missing.fact == f"{tmp_path} has no config.json: it is no folder of Medusa heads"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"")
    (found,) = heads(str(tmp_path))
    assert (found.status, found.fact) == ("ok", f"heads in {tmp_path}")


@pytest.mark.parametrize("source", ["/nope", "toy", "a\0b", "~/nope", "./nope/heads"])
def test_heads_that_cannot_load(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (found,) = heads(source)
    assert found.status == "fail"
    assert found.fact.startswith(f"target.medusa {source!r} is neither a folder here, nor a Hub id")


def test_a_hub_id_is_not_asked_for() -> None:
    (found,) = heads("org/heads")
    assert found.status == "ok"
    assert "asks the Hub" in found.fact
    assert heads("") == heads("toy", model="toy") == []
