"""A tiny draft trained, stopped, resumed, exported, composed and measured."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from paceline.engine import distill
from paceline.engine.convert import compose_draft
from paceline.engine.draft_report import (
    Chat,
    coupled_acceptance,
    load_dense,
    measure_acceptance,
    measure_cost,
)
from paceline.engine.student import Recipe
from paceline.errors import ConfigError

RECIPE = Recipe(layers=(0, 2), vocab=64, skip=2, batch_tokens=64, hidden_weight=0.0)


def random_chats(num: int) -> list[Chat]:
    rng = random.Random(5)
    return [Chat(tuple(rng.choices(range(101), k=rng.randint(8, 20))), 4) for _ in range(num)]


@pytest.fixture
def target(llama_folder: Path) -> object:
    return distill.load_target(llama_folder, torch.float32)


def test_from_chats_to_a_draft_that_can_be_measured(
    target: object, llama_folder: Path, tmp_path: Path
) -> None:
    chats, work = random_chats(70), tmp_path / "work"
    distill.prepare(target, chats, work)
    first = sorted(work.glob("teacher-*"))
    assert len(first) == 2
    distill.train(target, chats, work, RECIPE, seconds=0.3)
    before = json.loads((work / "progress.json").read_text())
    distill.train(target, chats, work, RECIPE, seconds=before["seconds"] + 0.3)
    after = json.loads((work / "progress.json").read_text())
    assert after["steps"] > before["steps"] > 0
    assert after["tokens"] > before["tokens"]
    distill.export(work, tmp_path / "asset", "tiny")
    draft = compose_draft(llama_folder, tmp_path / "asset", tmp_path / "draft")
    models = load_dense(llama_folder), load_dense(draft)
    result = measure_acceptance(*models, chats[:3])
    assert result.num_tokens == sum(len(chat.ids) - chat.prompt_len for chat in chats[:3])
    for temperature in (0.7, 1.0):
        assert 0.0 < result.coupled[temperature] < result.optimal[temperature] < 1.0
    cost = measure_cost(llama_folder, draft)
    assert cost.ratio > 0.0


def test_a_model_accepts_itself(llama_folder: Path) -> None:
    model = load_dense(llama_folder)
    result = measure_acceptance(model, model, random_chats(2))
    assert result.agreement == 1.0
    assert result.coupled == pytest.approx({0.7: 1.0, 1.0: 1.0}, abs=1e-5)


def test_training_needs_the_prepared_chats(target: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `prepare` first"):
        distill.train(target, random_chats(3), tmp_path, RECIPE, seconds=1.0)


def test_the_order_of_the_data_depends_on_the_seed_and_survives_a_resume() -> None:
    ids = [torch.arange(length) for length in (5, 9, 4, 7, 8, 6)]
    examples = [distill.Example(row, torch.zeros(len(row), 1)) for row in ids]
    recipe = Recipe(layers=(0,), batch_tokens=16)

    def first(num: int, skip: int) -> list[list[int]]:
        stream = distill.batches(examples, recipe, skip)
        return [[len(example.ids) for example in next(stream)] for _ in range(num)]

    assert first(9, skip=0)[4:] == first(5, skip=4)


def test_coupled_acceptance_is_the_sum_of_math_md_2e3() -> None:
    torch.manual_seed(2)
    target, draft = (torch.randn(4, 9).mul(2).log_softmax(-1) for _ in range(2))
    p, q = target.exp().double(), draft.exp().double()
    ratios = torch.maximum(p[:, None] / p[..., None], q[:, None] / q[..., None])
    expected = (1.0 / ratios.sum(-1)).sum(-1)
    torch.testing.assert_close(coupled_acceptance(target, draft), expected, rtol=1e-5, atol=1e-6)


def test_mass_outside_the_draft_vocabulary_is_never_accepted() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]]).log()
    inside = (target[:, :2] - target[:, :2].logsumexp(-1, keepdim=True)).clone()
    # against a draft without the third token, and against one that gives it next to nothing
    cut = coupled_acceptance(target[:, :2], inside)
    whole = coupled_acceptance(target, torch.cat((inside, torch.tensor([[-60.0]])), dim=-1))
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)
