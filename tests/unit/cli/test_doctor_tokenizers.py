"""`paceline doctor` on a draft with a tokenizer of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import doctor_facts
from paceline.cli.doctor_checks import Finding, ModelFacts, PoolFacts, check_pair
from paceline.cli.doctor_tokenizers import MIN_SAMPLE_SHARE, SAMPLE, OverlapFacts
from paceline.cli.model_facts import read_shape
from paceline.config import ModelConfig
from paceline.engine.translated_folder import load_translation
from paceline.models import tokenizer_hash
from tests.unit.engine.two_tokenizers import save_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def facts(key: str, folder: Path, **fields: object) -> ModelFacts:
    config = ModelConfig.model_validate({"source": str(folder), "max_model_len": 64, **fields})
    return ModelFacts(key, config, 1, shape=read_shape(folder))


def pool(folders: dict[str, Path], target_tokenizer: str = "", **fields: object) -> PoolFacts:
    draft = facts("draft.model", folders["draft"], target_tokenizer=target_tokenizer, **fields)
    target = facts("target.model", folders["target"])
    return PoolFacts("m", target, draft, overlap=doctor_facts.overlap(draft.config))


def fit(checked: PoolFacts) -> Finding:
    (found,) = (f for f in check_pair(checked) if f.name == "target.model + draft")
    return found


def test_it_is_suggested(folders: dict[str, Path]) -> None:
    found = fit(pool(folders))
    assert (found.status, found.fact) == ("fail", "their tokenizers differ")
    assert found.fix.startswith(f"draft.model.target_tokenizer: {folders['target']}")


def test_what_both_have(folders: dict[str, Path]) -> None:
    checked = pool(folders, str(folders["target"]))
    translation = load_translation(folders["draft"], folders["target"])
    overlap = translation.overlap
    assert checked.overlap == OverlapFacts(
        str(folders["target"]),
        overlap.num_common,
        overlap.num_draft,
        overlap.num_target,
        translation.share_of(SAMPLE),
        tokenizer_hash(folders["target"]),
    )
    found = fit(checked)
    assert found.status == "ok"
    for part in (
        f"{overlap.num_common} common tokens",
        f"{overlap.draft_share:.0%} of the draft's {overlap.num_draft}",
        f"{overlap.target_share:.0%} of the target's {overlap.num_target}",
        f"{translation.share_of(SAMPLE):.0%} of a sample text's",
    ):
        assert part in found.fact


def test_too_little_of_a_text(folders: dict[str, Path]) -> None:
    checked = pool(folders, str(folders["target"]))
    assert checked.overlap is not None
    for share, status in ((MIN_SAMPLE_SHARE, "ok"), (MIN_SAMPLE_SHARE - 0.01, "warn")):
        changed = replace(checked, overlap=replace(checked.overlap, sample_share=share))
        assert fit(changed).status == status


def test_another_targets_tokenizer(folders: dict[str, Path]) -> None:
    found = fit(pool(folders, str(folders["draft"])))
    assert found.status == "fail"
    assert "another tokenizer than the target" in found.fact
    assert found.fix == f"draft.model.target_tokenizer: {folders['target']}"


def test_what_is_set_already_is_no_fix(folders: dict[str, Path]) -> None:
    """The draft is what cannot be translated."""
    target = str(folders["target"])
    checked = pool(folders, target)
    assert checked.overlap is not None
    found = fit(replace(checked, overlap=OverlapFacts(target, problem="no bytes")))
    assert (found.status, found.fact) == ("fail", "no bytes")
    assert found.fix.startswith("draft.model.source: a draft made for this target")
    found = fit(replace(checked, overlap=OverlapFacts("another", problem="no bytes")))
    assert found.fix == f"draft.model.target_tokenizer: {target}"


def test_a_needless_translation(folders: dict[str, Path]) -> None:
    draft = facts("draft.model", folders["target"], target_tokenizer=str(folders["target"]))
    target = facts("target.model", folders["target"])
    found = fit(PoolFacts("m", target, draft, overlap=doctor_facts.overlap(draft.config)))
    assert (found.status, found.fix) == ("warn", "no draft.model.target_tokenizer")
    assert "the tokenizers are the same: it costs 20% of the draft's context" in found.fact


@pytest.mark.parametrize("source", ["toy", "/absent", "nobody/has-this"])
def test_one_that_is_not_there(
    source: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = fit(pool(folders, source))
    assert found.status == "fail"
    assert source in found.fact


def test_a_translation_may_be_longer(folders: dict[str, Path]) -> None:
    """64 tokens of the target need room for 80 of the draft's."""
    for length, is_enough in ((79, False), (80, True)):
        checked = pool(folders, str(folders["target"]), max_model_len=length)
        found = [f for f in check_pair(checked) if f.name == "draft.model.max_model_len"]
        assert (found == []) == is_enough
        assert is_enough or found[0].fix == "draft.model.max_model_len: 80"
