"""A draft that goes on from another one: the same to begin with, for its own target only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.engine import distill_init
from paceline.engine.distill import Budget
from paceline.engine.distill_run import DistillJob, Watch, distill
from paceline.engine.draft_report import load_dense
from paceline.errors import ConfigError
from tests.unit.engine.test_distill_run import RECIPE, job, run, stopping, weights
from tests.unit.engine.tiny_chat import save_chat_model

STILL: dict[str, Any] = {
    "recipe": replace(RECIPE, rate=1e-9, map_rate=1e-9, average=0.0),
    "budget": Budget(steps=1),
    "num_layers": 0,
}
NARROW = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def draft(target: Path, tmp_path: Path) -> Path:
    run(job(target, tmp_path / "first"))
    return tmp_path / "first/draft"


def logits(folder: Path) -> torch.Tensor:
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        return load_dense(folder)(input_ids=ids).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shape", [{}, NARROW], ids=["its layers", "narrower"])
def test_it_begins_as_the_draft_that_it_goes_on_from(
    family: str, shape: dict[str, int], tmp_path: Path
) -> None:
    target = save_chat_model(family, tmp_path / "target")
    run(job(target, tmp_path / "first", recipe=replace(RECIPE, student_config=shape)))
    first = tmp_path / "first/draft"
    run(job(target, tmp_path / "next", init=first, **STILL))
    before, after = logits(first), logits(tmp_path / "next/draft")
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
    assert (logits(target) - before).abs().max() > 0.1


def test_a_step_later_nothing_is_left_of_the_noise(target: Path, tmp_path: Path) -> None:
    """The average of the weights begins with those of the draft, not with a new student's."""
    narrow = replace(RECIPE, student_config=NARROW)
    run(job(target, tmp_path / "first", recipe=narrow))
    first = tmp_path / "first/draft"
    still = {**STILL, "recipe": replace(STILL["recipe"], average=0.99)}
    run(job(target, tmp_path / "next", init=first, **still))
    after = logits(tmp_path / "next/draft")
    torch.testing.assert_close(after, logits(first), rtol=1e-3, atol=1e-3)


class LargestDouble(TorchDispatchMode):
    """How many float64 numbers a tensor had at most."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.numbers = max(self.numbers, result.numel())
        return result


def test_maps_are_found_a_few_rows_at_a_time(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large target's matrices are never in float64 as a whole."""
    monkeypatch.setattr(distill_init, "_ROWS_AT_ONCE", 7)
    run(job(target, tmp_path / "first", recipe=replace(RECIPE, student_config=NARROW)))
    first = tmp_path / "first/draft"
    with LargestDouble() as seen:
        run(job(target, tmp_path / "next", init=first, **STILL))
    assert 32 * 32 <= seen.numbers < 101 * 16  # a Gram matrix; less than the output layer
    after = logits(tmp_path / "next/draft")
    torch.testing.assert_close(after, logits(first), rtol=1e-3, atol=1e-3)


def test_training_goes_on(target: Path, draft: Path, tmp_path: Path) -> None:
    """20 more steps bring what 20 steps from the target's layers alone do not."""
    divergences: dict[str, list[float]] = {"anew": [], "on": []}
    for name, init in (("anew", None), ("on", draft)):
        watch = Watch(step=lambda report, name=name: divergences[name].append(report.divergence))
        run(job(target, tmp_path / name, init=init), watch)
    assert divergences["on"][0] < divergences["anew"][0]
    assert sum(divergences["on"]) < sum(divergences["anew"])


def test_the_same_bytes_after_a_stop(target: Path, draft: Path, tmp_path: Path) -> None:
    run(job(target, tmp_path / "through", init=draft))
    assert distill(job(target, tmp_path / "stopped", init=draft), stopping(7)) is None
    run(job(target, tmp_path / "stopped", init=draft))
    assert weights(tmp_path / "through/draft") == weights(tmp_path / "stopped/draft")


def test_its_vocabulary_is_kept_unless_another_is_asked_for(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    kept = (draft / "draft_vocab.json").read_text()
    report = run(job(target, tmp_path / "kept", init=draft, recipe=replace(RECIPE, vocab=9)))
    assert (tmp_path / "kept/draft/draft_vocab.json").read_text() == kept
    assert report["made"]["recipe"]["vocab"] == 64
    recipe = replace(RECIPE, vocab=32)
    run(job(target, tmp_path / "other", init=draft, recipe=recipe, own_vocab=False))
    assert len(json.loads((tmp_path / "other/draft/draft_vocab.json").read_text())) == 32
    run(job(target, tmp_path / "all", recipe=replace(RECIPE, vocab=0)))
    run(job(target, tmp_path / "still all", init=tmp_path / "all/draft"))
    assert not (tmp_path / "still all/draft/draft_vocab.json").exists()


def test_only_a_draft_of_the_same_target(target: Path, draft: Path, tmp_path: Path) -> None:
    def refused(said: str, given: DistillJob) -> None:
        with pytest.raises(ConfigError, match=said):
            distill(given, Watch())

    other = save_chat_model("llama", tmp_path / "other", seed=9)
    refused("was not distilled from this target", job(other, tmp_path / "a", init=draft))
    narrow = replace(RECIPE, student_config=NARROW)
    run(job(target, tmp_path / "narrow", recipe=narrow))
    init = tmp_path / "narrow/draft"
    refused("was not distilled from this target", job(other, tmp_path / "b", init=init))
    family = save_chat_model("qwen2", tmp_path / "family")
    refused("does not fit the target's kind", job(family, tmp_path / "c", init=draft))
    empty = tmp_path / "empty"
    empty.mkdir()
    refused("cannot read the model config", job(target, tmp_path / "d", init=empty))
    (empty / "config.json").write_bytes((draft / "config.json").read_bytes())
    refused("has no safetensors", job(target, tmp_path / "e", init=empty))
    (empty / "model.safetensors").write_bytes(b"none")
    refused("cannot be read", job(target, tmp_path / "f", init=empty))
    inside = job(target, tmp_path / "g", init=draft, out=draft / "next")
    refused("--out .* is in --init's own folder", inside)


def test_a_work_folder_knows_the_draft_that_it_began_with(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    assert distill(job(target, tmp_path / "next", init=draft), stopping(2)) is None
    run(job(target, tmp_path / "second", budget=Budget(steps=3)))
    other = job(target, tmp_path / "next", init=tmp_path / "second/draft")
    with pytest.raises(ConfigError, match="begun with another init"):
        distill(other, Watch())
