"""Medusa heads trained on a tiny target, written in both layouts, and their figures by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.engine.chat_files import Chat
from paceline.engine.distill import Budget
from paceline.engine.distill_data import hidden_states
from paceline.engine.distill_report import MeasureJob, measure
from paceline.engine.distill_run import Watch, distill
from paceline.engine.draft_card import card
from paceline.engine.draft_report import load_dense
from paceline.engine.medusa_folder import HeadTensors, MedusaTensors, read_medusa
from paceline.engine.medusa_training import (
    HeadsObjective,
    accepted,
    best_tree,
    head_logits,
    measure_heads,
)
from paceline.engine.student import Example, Loss, Recipe
from paceline.errors import ConfigError
from tests.unit.engine.test_distill_run import RECIPE, job, stopping
from tests.unit.engine.tiny_chat import random_chats, save_chat_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model("llama", tmp_path_factory.mktemp("llama"))


def test_heads_in_the_small_form(target: Path, tmp_path: Path) -> None:
    report = distill(job(target, tmp_path, num_heads=2), Watch())
    assert report is not None
    folder = tmp_path / "draft"
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "tiny",
        "medusa_draft_vocab_size": 64,
    }
    read = read_medusa(folder, 32, 101)
    assert read.draft_vocab is not None
    assert len(read.draft_vocab) == 64
    assert len(report["heads"]) == 2
    for head in report["heads"]:
        assert 0.0 <= head["top"][0] <= head["top"][1] <= head["top"][2] <= 1.0
        assert 0.0 < head["coupled"]["1.0"] < 1.0
    assert report["accepted_chain"] <= report["accepted_tree"] <= 2.0
    card = (folder / "README.md").read_text()
    assert f"{report['accepted_chain']:.2f} for the chain" in card
    assert "head 1: token t + 3" in card


def test_a_head_without_a_row_to_measure_has_no_figure(target: Path, tmp_path: Path) -> None:
    given = job(target, tmp_path, num_heads=2, budget=Budget(steps=1))
    report = distill(given, Watch())
    assert report is not None
    heads = read_medusa(tmp_path / "draft", 32, 101)
    two = [Chat((3, 6, 50, 4, 51, 52), 4)]  # the second head would need a third answer token
    found = measure_heads(load_dense(target), heads, random_chats(4), two)
    assert found.heads[1].coupled == {0.7: None, 1.0: None}
    assert None not in found.heads[0].coupled.values()
    text = card(report | json.loads(json.dumps(asdict(found))))
    (row,) = [line for line in text.splitlines() if line.startswith("| head 1:")]
    assert row.endswith("| - | - |")


def test_the_published_layout_computes_the_same(target: Path, tmp_path: Path) -> None:
    whole = replace(RECIPE, vocab=0)
    for place, published in (("small", False), ("published", True)):
        given = job(target, tmp_path / place, num_heads=2, recipe=whole, published=published)
        assert distill(given, Watch()) is not None
    config = json.loads((tmp_path / "published/draft/config.json").read_text())
    assert "medusa_draft_vocab_size" not in config
    names = load_file(tmp_path / "published/draft/medusa_lm_head.safetensors").keys()
    parts = ("0.linear.weight", "0.linear.bias", "1.weight")
    assert names == {f"{head}.{part}" for head in range(2) for part in parts}
    output = load_dense(target).get_output_embeddings().weight.detach()
    small, published = (
        read_medusa(tmp_path / place / "draft", 32, 101) for place in ("small", "published")
    )
    hidden = torch.randn(5, 32)
    for left, right in zip(small.heads, published.heads, strict=True):
        a, _ = head_logits(left, small, output)(hidden)
        b, _ = head_logits(right, published, output)(hidden)
        assert float((a - b).abs().max()) < 0.05 * float(b.abs().max())  # int8


def test_a_stopped_run_gives_the_same_bytes(target: Path, tmp_path: Path) -> None:
    for place in ("through", "stopped"):
        if place == "stopped":
            assert distill(job(target, tmp_path / place, num_heads=1), stopping(6)) is None
        assert distill(job(target, tmp_path / place, num_heads=1), Watch()) is not None
    a, b = (
        (tmp_path / place / "draft/medusa_lm_head.safetensors").read_bytes()
        for place in ("through", "stopped")
    )
    assert a == b


def test_a_draft_and_heads_share_a_work_folder(target: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    assert distill(job(target, tmp_path), Watch()) is not None
    again = job(target, tmp_path, num_heads=1, out=tmp_path / "heads")
    watch = Watch(progress=lambda what, done, total: stages.append(what))
    assert distill(again, watch) is not None
    assert not any(stage.startswith("reading") for stage in stages)
    with pytest.raises(ConfigError, match="another num_heads"):
        distill(job(target, tmp_path, num_heads=2, out=tmp_path / "heads"), Watch())


def test_training_brings_a_head_to_the_law_so_many_places_on() -> None:
    """Hidden states that walk in a circle: a map alone can tell where they will be."""
    angle = torch.tensor(0.7)
    turn = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
    states = [torch.tensor([3.0, 0.0])]
    for _ in range(30):
        states.append(turn @ states[-1])
    hidden = torch.stack(states).bfloat16()
    rows = torch.randn(11, 2, generator=torch.Generator().manual_seed(1))
    recipe = Recipe(skip=0)
    objective = HeadsObjective(3, 2, Loss(rows, recipe), recipe)
    example = Example(torch.arange(31), hidden)
    objective.fit_maps([example])
    power = torch.eye(2)
    for head in objective.heads:
        power = turn @ power
        torch.testing.assert_close(head.map.weight.detach(), power, rtol=0.1, atol=0.05)
    _, divergence, num_rows = objective.loss([example], 0.0)
    assert divergence < 0.02
    assert num_rows == 30


def test_figures_are_those_of_a_loop(target: Path) -> None:
    """Each head is the target itself, guessing too early: right where a token repeats."""
    model = load_dense(target)
    identity = MedusaTensors(tuple(HeadTensors((), None, torch.eye(32)) for _ in range(2)))
    chats = random_chats(6, seed=2)
    found = measure_heads(model, identity, chats, chats)
    hits, total = [[0, 0, 0], [0, 0, 0]], 0
    states = dict(hidden_states(model.model, chats))
    for index, chat in enumerate(chats):
        with torch.inference_mode():
            logits = model.lm_head(states[index].float())
        for row in range(chat.prompt_len - 1, len(chat.ids) - 1 - 2):
            total += 1
            best = logits[row].topk(3).indices.tolist()
            for head in range(2):
                truth = int(logits[row + head + 1].argmax())
                for k in range(3):
                    hits[head][k] += truth in best[: k + 1]
    assert found.num_tokens == total
    for head in range(2):
        assert found.heads[head].top == pytest.approx([hit / total for hit in hits[head]])


def test_accepted_lengths_of_chains_and_trees() -> None:
    ranks = torch.tensor([[0, 0], [0, 1], [1, 0], [3, 0]])  # 3: none of the first three
    assert accepted(ranks, [(0,), (0, 0)]) == (2 + 1 + 0 + 0) / 4
    assert accepted(ranks, [(0,), (0, 0), (0, 1), (1,)]) == (2 + 2 + 1 + 0) / 4


def test_a_tree_has_the_likeliest_nodes_and_their_parents() -> None:
    tree = best_tree([[0.6, 0.2, 0.05], [0.5, 0.1, 0.0]], 4)
    assert tree == [(0,), (0, 0), (1,), (1, 0)]
    for chances in ([[0.9, 0.05, 0.01]] * 16, [[0.0, 0.0, 0.0]] * 3):
        nodes = best_tree(chances, 8)
        assert len(nodes) == 8
        assert all(node[:-1] in nodes for node in nodes if len(node) > 1)


def test_no_more_heads_than_can_be_loaded() -> None:
    recipe = Recipe()
    loss = Loss(torch.randn(5, 4), recipe)
    HeadsObjective(16, 4, loss, recipe)
    with pytest.raises(ConfigError, match="may be 1 to 16"):
        HeadsObjective(17, 4, loss, recipe)


def test_chats_without_an_answer_cannot_be_measured_on(target: Path, tmp_path: Path) -> None:
    assert distill(job(target, tmp_path, num_heads=1), Watch()) is not None
    chats = tmp_path / "long.jsonl"
    row = {"ids": [5] * 256, "prompt_len": 255}  # all 256 positions: no room for an answer
    chats.write_text(json.dumps(row))
    given = MeasureJob(target, "tiny", chats, 1, heads=tmp_path / "draft")
    with pytest.raises(ConfigError, match="answers none of the chats"):
        measure(given)
