"""Training on stored hidden states: order of the data, checkpoints, the maps of a student."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engine import distill
from paceline.engine.distill import Budget, DraftObjective, Progress, StepReport, Trainer
from paceline.engine.student import (
    Example,
    Loss,
    Recipe,
    Student,
    choose_vocab,
    draft_config,
    spread_layers,
)
from paceline.errors import ConfigError
from tests.unit.engine.conftest import SHAPE

RECIPE = Recipe(layers=(0, 2), vocab=64, skip=2, batch_tokens=64, hidden_weight=0.1)
TARGET_CONFIG = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def tiny_target() -> Any:
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()


@torch.no_grad()
def made_examples(target: Any, num: int = 12) -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in range(6, 6 + num):
        ids = torch.randint(101, (length,), generator=generator)
        hidden = target.model(input_ids=ids[None]).last_hidden_state[0]
        found.append(Example(ids, hidden.bfloat16()))
    return found


def trainer(work: Path, recipe: Recipe = RECIPE) -> tuple[Trainer, list[Example]]:
    target = tiny_target()
    examples = made_examples(target)
    torch.manual_seed(recipe.seed)
    head = target.get_output_embeddings().weight.detach()
    loss = Loss(head[choose_vocab(head, examples, recipe)], recipe)
    work.mkdir(exist_ok=True)
    return Trainer(DraftObjective(Student(target, recipe), loss, recipe), recipe, work), examples


def train(work: Path, steps: int, stop_after: int | None = None, recipe: Recipe = RECIPE) -> bool:
    """One call of the command: goes on from the folder's checkpoint."""
    made, examples = trainer(work, recipe)
    made.resume()
    left = [stop_after if stop_after is not None else steps + 1]

    def should_stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    budget = Budget(steps=steps)
    return distill.train(made, examples, recipe, budget, should_stop=should_stop)


def test_a_stopped_run_ends_in_the_bytes_of_one_that_ran_through(tmp_path: Path) -> None:
    assert train(tmp_path / "through", 14)
    for calls in (1, 2):
        assert not train(tmp_path / "stopped", 14, stop_after=5), calls
    assert distill.read_progress(tmp_path / "stopped").steps == 10
    assert train(tmp_path / "stopped", 14)
    runs = [load_file(tmp_path / run / distill.CHECKPOINT) for run in ("through", "stopped")]
    assert runs[0].keys() == runs[1].keys()
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name
    averages = [distill.read_average(tmp_path / run) for run in ("through", "stopped")]
    assert averages[0].keys() == averages[1].keys() != set()


def test_training_comes_closer_to_the_target(tmp_path: Path) -> None:
    made, examples = trainer(tmp_path)
    seen: list[StepReport] = []
    distill.train(made, examples, RECIPE, Budget(steps=60), seen.append)
    first, last = (sum(r.divergence for r in part) for part in (seen[:8], seen[-8:]))
    assert last < 0.8 * first
    assert [report.progress.steps for report in seen[-1:]] == [60]
    assert seen[-1].share == 1.0
    assert seen[-1].remaining_s == 0.0


def test_another_seed_gives_another_draft(tmp_path: Path) -> None:
    other = Recipe(layers=(0, 2), vocab=64, skip=2, batch_tokens=64, hidden_weight=0.1, seed=1)
    train(tmp_path / "a", 3)
    train(tmp_path / "b", 3, recipe=other)
    a, b = (distill.read_average(tmp_path / run) for run in ("a", "b"))
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_time_is_a_budget_too() -> None:
    assert Budget(seconds=60.0).share(Progress(steps=9, seconds=15.0)) == 0.25
    assert Budget(steps=10).share(Progress(steps=5, seconds=99.0)) == 0.5
    assert Budget(steps=10).share(Progress(steps=50)) == 1.0


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 1)
    made, _ = trainer(tmp_path, Recipe(layers=(0, 1, 2), vocab=64, skip=2))
    with pytest.raises(ConfigError, match="is of another draft"):
        made.resume()


def test_what_does_not_converge_is_said(tmp_path: Path) -> None:
    made, examples = trainer(tmp_path)
    examples[0].hidden.fill_(float("nan"))
    with pytest.raises(ConfigError, match="went astray at step"):
        distill.train(made, examples, RECIPE, Budget(steps=30))


def test_the_order_of_the_data_depends_on_the_seed_and_survives_a_resume() -> None:
    ids = [torch.arange(length) for length in (5, 9, 4, 7, 8, 6)]
    examples = [distill.Example(row, torch.zeros(len(row), 1)) for row in ids]
    recipe = Recipe(layers=(0,), batch_tokens=16)

    def first(num: int, skip: int) -> list[list[int]]:
        stream = distill.batches(examples, recipe, skip)
        return [[len(example.ids) for example in next(stream)] for _ in range(num)]

    assert first(9, skip=0)[4:] == first(5, skip=4)


# --------------------------------------------------------------------------------- the student


def test_the_embeddings_are_the_targets_own() -> None:
    target = tiny_target()
    student = Student(target, RECIPE)
    assert student.embed.weight.data_ptr() == target.model.embed_tokens.weight.data_ptr()
    assert not any("embed" in name for name in student.trained())
    # nothing else has a row for every token
    assert all(101 not in parameter.shape for parameter in student.trained().values())


def test_it_begins_as_the_chosen_layers() -> None:
    target = tiny_target()
    student = Student(target, Recipe(layers=(2, 0)))
    for layer, source in zip(student.trunk.layers, (2, 0), strict=True):
        for name, tensor in target.model.layers[source].state_dict().items():
            assert torch.equal(layer.state_dict()[name], tensor)


def test_all_layers_are_the_target_itself() -> None:
    target = tiny_target()
    student = Student(target, Recipe(layers=(0, 1, 2)))
    student.trunk.norm.load_state_dict(target.model.norm.state_dict())
    ids = torch.tensor([[5, 90, 33]])
    with torch.inference_mode():
        expected = target.model(input_ids=ids).last_hidden_state
        found = student.features(ids)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # bfloat16


def test_a_narrower_student_sees_projected_embeddings() -> None:
    target = tiny_target()
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    student = Student(target, Recipe(student_config={**shape, "num_key_value_heads": 1}))
    assert student(torch.tensor([[1, 2, 3]])).shape == (1, 3, 32)
    assert student.embed_map is not None
    weight = student.embed_map.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(16), rtol=1e-4, atol=1e-4)
    rows = target.model.embed_tokens.weight.detach()
    kept = (rows @ weight.T).square().sum() / rows.square().sum()
    assert kept > 0.6  # half of the directions, and the longer ones


def test_layers_are_spread_over_the_target() -> None:
    assert spread_layers(30, 5) == (0, 1, 16, 17, 18)
    assert spread_layers(4, 4) == (0, 1, 2, 3)
    assert spread_layers(3, 1) == (0,)
    for total in range(1, 40):
        for kept in range(1, total + 1):
            layers = spread_layers(total, kept)
            assert len({*layers}) == kept
            assert {*layers} <= {*range(total)}
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match="may keep 1 to 3"):
            spread_layers(3, wrong)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Recipe(layers=(0, 3)), "from 0 to 2, the target's: 0 3"),
        (Recipe(layers=(1, 1)), "must be distinct"),
        (Recipe(), "none given"),
        (Recipe(student_config={"vocab_size": 9}), "not vocab_size: everything else"),
        (Recipe(student_config={"model_type": 1}), "not model_type"),
        (Recipe(student_config={"hidden_size": 0}), "whole number above 0"),
        (Recipe(student_config=json.loads('{"hidden_size": 1.5}')), "whole number above 0"),
        (Recipe(student_config={"hidden_size": 64}), "not be wider than the target"),
        (Recipe(student_config={"num_attention_heads": 3}), "must divide num_attention_heads"),
        (Recipe(student_config={"head_dim": 7}), "do not fit"),
    ],
)
def test_impossible_students_are_refused(recipe: Recipe, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        draft_config(TARGET_CONFIG, recipe)


def test_the_config_of_a_draft_keeps_the_kinds_of_its_layers() -> None:
    target = {**TARGET_CONFIG, "layer_types": ["full", "sliding", "other"]}
    changes = draft_config(target, Recipe(layers=(2, 0)))
    assert changes["layer_types"] == ["other", "full"]
    assert changes["num_hidden_layers"] == 2
    smaller = draft_config(target, Recipe(student_config={"hidden_size": 16}))
    assert smaller["layer_types"] == ["full"] * 3
    assert (smaller["hidden_size"], smaller["num_attention_heads"]) == (16, 4)


def test_the_vocabulary_is_whole_unless_cut() -> None:
    target = tiny_target()
    examples = made_examples(target, 3)
    head = target.get_output_embeddings().weight.detach()
    for vocab in (0, 101, 500):
        chosen = choose_vocab(head, examples, Recipe(layers=(0,), vocab=vocab, skip=1))
        assert chosen.tolist() == list(range(101))
    chosen = choose_vocab(head, examples, Recipe(layers=(0,), vocab=9, skip=1))
    assert chosen.tolist() == sorted({*chosen.tolist()})
    assert len(chosen) == 9
