"""Tiny targets distilled from nothing to a draft with its card, stopped, resumed, refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.chat_files import read_chats
from paceline.engine.distill import Budget
from paceline.engine.distill_data import DataSettings
from paceline.engine.distill_run import DistillJob, Watch, distill
from paceline.engine.draft_report import load_dense, measure_acceptance
from paceline.engine.student import Recipe
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.sampling.params import SamplingParams
from tests.unit.engine.tiny_chat import chats_file, save_chat_model

RECIPE = Recipe(vocab=64, batch_tokens=200)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model("llama", tmp_path_factory.mktemp("llama"))


def job(target: Path, place: Path, **changes: Any) -> DistillJob:
    """20 steps on chats of a file, unless changed."""
    place.mkdir(exist_ok=True)
    made = DistillJob(
        target=target,
        name="tiny",
        out=place / "draft",
        work=place / "work",
        data=DataSettings(num_chats=0, length=60, held_out=4),
        recipe=RECIPE,
        budget=Budget(steps=20),
        num_layers=2,
        command="paceline distill tiny",
    )
    if "data" not in changes:
        chats = place / "chats.jsonl"
        if not chats.exists():
            chats_file(chats)
        made = replace(made, data=replace(made.data, chats=chats))
    return replace(made, **changes)


def run(given: DistillJob, watch: Watch | None = None) -> dict[str, Any]:
    report = distill(given, watch or Watch())
    assert report is not None
    return report


def stopping(steps: int) -> Watch:
    left = iter(range(steps))
    return Watch(should_stop=lambda: next(left, None) is None)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_from_a_target_to_a_draft_whose_card_is_true(target: Path, tmp_path: Path) -> None:
    data = DataSettings(num_chats=24, length=60, held_out=4)
    report = run(job(target, tmp_path, data=data))
    folder = tmp_path / "draft"
    engine = load_torch_engine(ModelConfig(source="x", max_model_len=64, device="cpu"), folder)
    engine.add(1)
    sampling = SamplingParams(temperature=1.0, seed=3)
    (result,) = engine.step([StepItem(1, 0, (3, 6, 50), 2, sampling)])
    assert len(result.token_ids) == 2
    assert len(json.loads((folder / "draft_vocab.json").read_text())) == 64
    chats = read_chats(folder / "held_out.jsonl")
    assert len(chats) == 4
    direct = measure_acceptance(load_dense(target), load_dense(folder), chats)
    found = report["acceptance"]
    assert found["num_tokens"] == direct.num_tokens
    assert found["agreement"] == direct.agreement
    assert found["coupled"] == {str(key): value for key, value in direct.coupled.items()}
    assert report["speedup"].keys() == {"0", "0.7", "1.0"}
    assert report["made"]["progress"]["steps"] == 20
    assert json.loads((folder / "report.json").read_text()) == report
    card = (folder / "README.md").read_text()
    assert f"| {direct.agreement:.3f} | {direct.coupled[0.7]:.3f} |" in card
    for said in (
        "24 chats that the target made up",
        "the last 4 are held out",
        "20 steps were asked for",
        "`paceline distill tiny`",
        "--report-only --draft",
    ):
        assert said in card


def test_the_same_command_gives_the_same_bytes(target: Path, tmp_path: Path) -> None:
    data = DataSettings(num_chats=12, length=50, held_out=4, seed=3)
    for place in ("a", "b"):
        run(job(target, tmp_path / place, data=data))
    assert weights(tmp_path / "a/draft") == weights(tmp_path / "b/draft")
    run(job(target, tmp_path / "c", data=replace(data, seed=4)))
    assert weights(tmp_path / "a/draft") != weights(tmp_path / "c/draft")


def test_a_stopped_run_gives_the_same_bytes(target: Path, tmp_path: Path) -> None:
    run(job(target, tmp_path / "through"))
    for _ in range(2):
        assert distill(job(target, tmp_path / "stopped"), stopping(7)) is None
    assert not (tmp_path / "stopped/draft/model.safetensors").exists()
    report = run(job(target, tmp_path / "stopped"))
    assert report["made"]["progress"]["steps"] == 20
    assert weights(tmp_path / "through/draft") == weights(tmp_path / "stopped/draft")


def test_stages_that_are_done_are_kept(target: Path, tmp_path: Path) -> None:
    given = job(target, tmp_path, data=DataSettings(num_chats=12, length=50, held_out=4))

    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("reading") and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(given, Watch(progress=interrupt))
    stages: list[str] = []
    run(given, Watch(progress=lambda what, done, total: stages.append(what)))
    assert not any(stage.startswith(("making up", "reading")) for stage in stages)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen2-window", "qwen3"])
def test_families(family: str, tmp_path: Path) -> None:
    folder = save_chat_model(family, tmp_path / "target", num_hidden_layers=4)
    recipe = replace(RECIPE, layers=(0, 3), vocab=0)
    report = run(job(folder, tmp_path / "place", recipe=recipe, budget=Budget(steps=3)))
    draft = load_dense(tmp_path / "place/draft")
    assert type(draft) is type(load_dense(folder))
    assert 0.0 < report["acceptance"]["coupled"]["1.0"] < 1.0
    target_kinds, kinds = (
        getattr(model.config, "layer_types", None) for model in (load_dense(folder), draft)
    )
    if target_kinds:
        assert kinds == [target_kinds[0], target_kinds[3]]
    assert not (tmp_path / "place/draft/draft_vocab.json").exists()


def test_all_layers_and_the_whole_vocabulary_make_the_target(target: Path, tmp_path: Path) -> None:
    """One step at a tiny rate: what is folded together still computes what the target does."""
    recipe = replace(RECIPE, layers=(0, 1, 2), vocab=0, rate=1e-7, map_rate=1e-7)
    report = run(job(target, tmp_path, recipe=recipe, budget=Budget(steps=1)))
    assert report["acceptance"]["coupled"]["0.7"] > 0.85


def test_a_smaller_shape(target: Path, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24}
    recipe = replace(RECIPE, student_config=shape)
    asset = tmp_path / "asset"
    run(job(target, tmp_path / "place", recipe=recipe, asset=asset))
    config = json.loads((tmp_path / "place/draft/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (16, 1)
    tensors = load_file(asset / "layers.safetensors")
    assert tensors["embed_map"].shape == (16, 32)
    assert tensors["embed_map"].dtype == torch.int8
    assert not any(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in tensors)
    engine = load_torch_engine(
        ModelConfig(source="x", max_model_len=64, device="cpu"), tmp_path / "place/draft"
    )
    assert engine.info.vocab_size == 101


def test_the_small_form_is_the_same_draft(target: Path, tmp_path: Path) -> None:
    from paceline.engine.convert import compose_draft

    run(job(target, tmp_path / "place", asset=tmp_path / "asset"))
    again = compose_draft(target, tmp_path / "asset", tmp_path / "again")
    assert weights(again) == weights(tmp_path / "place/draft")
    description = json.loads((tmp_path / "asset/draft.json").read_text())
    assert description["recipe"]["layers"] == [0, 1]
    size = (tmp_path / "asset/layers.safetensors").stat().st_size
    assert size < (again / "model.safetensors").stat().st_size / 2


def test_a_base_model_and_text_files(tmp_path: Path) -> None:
    folder = save_chat_model("llama", tmp_path / "base", template=None)
    text = tmp_path / "text"
    text.write_text(" ".join(f"t{30 + number % 60}" for number in range(900)))
    data = DataSettings(num_chats=10, texts=(text,), length=40, held_out=3)
    report = run(job(folder, tmp_path / "place", data=data))
    assert "10 chats that the target made up, 22 pieces of text files" in report["made"]["data"]
    assert not (tmp_path / "place/draft/held_out.jsonl").exists()  # the user's text stays his
    only = DataSettings(num_chats=0, texts=(text,), length=40, held_out=3)
    report = run(job(folder, tmp_path / "only", data=only))
    assert report["num_chats"] == 3


def test_a_result_that_is_not_measured_has_no_card(target: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("measuring"):
            raise KeyboardInterrupt

    folder = tmp_path / "draft"
    for steps in (20, 25):
        with pytest.raises(KeyboardInterrupt):
            distill(job(target, tmp_path, budget=Budget(steps=steps)), Watch(progress=interrupt))
        assert (folder / "model.safetensors").exists()
        assert not (folder / "README.md").exists()
        assert json.loads((folder / "report.json").read_text()) == {"unfinished": True}
        run(job(target, tmp_path, budget=Budget(steps=steps)))
        assert f"{steps} steps were asked for" in (folder / "README.md").read_text()


def test_a_work_folder_goes_on_only_with_its_own_settings(target: Path, tmp_path: Path) -> None:
    assert distill(job(target, tmp_path), stopping(2)) is None
    others = [
        (job(target, tmp_path, recipe=replace(RECIPE, vocab=32)), "another vocab (64, now 32)"),
        (job(target, tmp_path, num_layers=1), "another layers"),
        (job(target, tmp_path, recipe=replace(RECIPE, rate=1e-4)), "another rate"),
    ]
    data = job(target, tmp_path).data
    others += [
        (job(target, tmp_path, data=replace(data, held_out=5)), "another held_out (4, now 5)"),
        (job(target, tmp_path, data=replace(data, seed=9)), "another seed"),
    ]
    for other, said in others:
        with pytest.raises(ConfigError, match="was begun with") as caught:
            distill(other, Watch())
        assert said in str(caught.value)
    longer = run(job(target, tmp_path, budget=Budget(steps=5)))  # more of the same is welcome
    assert longer["made"]["progress"]["steps"] == 5
    chats_file(tmp_path / "chats.jsonl", seed=8)
    with pytest.raises(ConfigError, match="another files"):
        distill(job(target, tmp_path), Watch())
    (tmp_path / "work/data.json").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"data.json is damaged"):
        distill(job(target, tmp_path), Watch())


def test_what_cannot_be_done_is_a_sentence(target: Path, tmp_path: Path) -> None:
    def refused(said: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            distill(job(target, tmp_path, **changes), Watch())

    refused("from 0 to 2", recipe=replace(RECIPE, layers=(0, 3)))
    refused("may keep 1 to 3", num_layers=4)
    for device in ("cuda", "cuda:7"):
        refused(f"no CUDA device here that is {device}:", device=device)
    refused("--device 'cpu:abc' is no device", device="cpu:abc")
    long = DataSettings(num_chats=9, length=257)
    refused("--length 257 is more than the 256 positions", data=long)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("mine")
    refused("holds something else", out=tmp_path / "mine")
    few = replace(job(target, tmp_path).data, chats=None, num_chats=8, held_out=8)
    refused("there are 8 chats: 8 held out", data=few, work=tmp_path / "w1")
    assert not list((tmp_path / "w1").glob("chats-*"))
    refused("Not a directory", work=tmp_path / "chats.jsonl" / "work")
    refused("leave nothing to train on", data=replace(job(target, tmp_path).data, held_out=40))
    chats = tmp_path / "other.jsonl"
    chats.write_text('{"ids": [1, 101], "prompt_len": 1}\n')
    data = DataSettings(chats=chats)
    refused("made with another tokenizer", data=data, work=tmp_path / "w2")
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"ids": [1, 2], "prompt_len": 1}\n' * 3)
    data = DataSettings(chats=empty)
    refused("no chat is longer", data=data, work=tmp_path / "w3", num_heads=1)


def test_nothing_is_written_into_the_target_or_into_another_stage(
    target: Path, tmp_path: Path
) -> None:
    run(job(target, tmp_path / "first"))
    draft = tmp_path / "first/draft"  # has a report, so a name alone would let it be overwritten
    before = {path: path.read_bytes() for path in draft.iterdir()}
    (tmp_path / "link").symlink_to(draft)
    for said, changes in (
        ("--out .* is in the target's own folder", {"out": draft}),
        ("--out .* is in the target's own folder", {"out": tmp_path / "link"}),
        ("--out .* is in the target's own folder", {"out": draft / "sub"}),
        ("--work .* is in the target's own folder", {"work": draft}),
        ("--asset .* is in the target's own folder", {"asset": draft}),
        ("--out .* is in --work's folder", {"out": tmp_path / "x", "work": tmp_path / "x"}),
        ("--work .* is in --out's folder", {"work": tmp_path / "second/draft/work"}),
        ("--out .* is in --work's folder", {"out": tmp_path / "second/work/draft"}),
        ("--asset .* is in --out's folder", {"asset": tmp_path / "second/draft/a"}),
    ):
        with pytest.raises(ConfigError, match=said):
            distill(job(draft, tmp_path / "second", **changes), Watch())
    assert {path: path.read_bytes() for path in draft.iterdir()} == before
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("family", "said"),
    [("gemma3", "is a gemma3_text: only llama, mistral"), ("mixtral", "is a mixtral: only")],
)
def test_other_families_are_refused(family: str, said: str, tmp_path: Path) -> None:
    folder = save_chat_model(family, tmp_path / "target")
    with pytest.raises(ConfigError, match=said):
        distill(job(folder, tmp_path / "place"), Watch())


def test_a_target_that_lacks_weights_is_refused(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match="lacks weights that its config"):
        distill(job(folder, tmp_path / "place"), Watch())


@pytest.mark.parametrize("name", ["teacher-0000", "draft/vocab", "draft/checkpoint"])
def test_a_damaged_file_of_a_work_folder_is_named_and_can_be_deleted(
    name: str, target: Path, tmp_path: Path
) -> None:
    assert distill(job(target, tmp_path), stopping(2)) is None
    path = tmp_path / f"work/{name}.safetensors"
    path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(ConfigError, match=f"{name}.safetensors is damaged .*: delete it"):
        distill(job(target, tmp_path), Watch())
    path.unlink()
    assert run(job(target, tmp_path))["made"]["progress"]["steps"] == 20


def test_a_full_disk_is_seen_before_the_work(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(ConfigError, match="needs 0 MiB for hidden states and has 0 MiB"):
        distill(job(target, tmp_path), Watch())


def test_reports_are_steps_in_order(target: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    run(job(target, tmp_path), Watch(step=lambda report: seen.append(report.progress.steps)))
    assert all(right == left + 1 for left, right in pairwise(seen))
    assert seen[-1] == 20
