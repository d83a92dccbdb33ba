"""Drafts that a training cannot go on from: one sentence, before anything is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.engine.distill import Budget
from paceline.engine.distill_run import Watch, distill
from paceline.errors import ConfigError
from paceline.models import ASSETS
from tests.unit.engine.test_distill_run import job, run
from tests.unit.engine.tiny_chat import save_chat_model

EMBEDDINGS, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def good(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("good")
    run(job(target, place, num_layers=1, budget=Budget(steps=1)))
    return place / "draft"


@pytest.fixture
def draft(good: Path, tmp_path: Path) -> Path:
    """One to spoil."""
    shutil.copytree(good, tmp_path / "init")
    return tmp_path / "init"


def refused(said: str, target: Path, draft: Path, tmp_path: Path) -> None:
    given = job(target, tmp_path / "next", init=draft)
    with pytest.raises(ConfigError, match=said):
        distill(given, Watch())
    assert not given.work.exists()
    assert not given.out.exists()


def with_tensor(draft: Path, name: str, change: Change) -> None:
    tensors = load_file(draft / "model.safetensors")
    tensors[name] = change(tensors[name] if name in tensors else torch.ones(101)).contiguous()
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})


def with_config(draft: Path, **values: Any) -> None:
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (HEAD, lambda t: t * float("nan"), "lm_head.weight has numbers that are none"),
        (HEAD, lambda t: t * float("inf"), "lm_head.weight has numbers that are none"),
        (EMBEDDINGS, lambda t: t * float("nan"), "embed_tokens.weight has numbers that are none"),
        (NORM, lambda t: t * float("nan"), "norm.weight has numbers that are none"),
        (HEAD, lambda t: t[:, :16], r"its lm_head.weight is \[101, 16\], not \[101, 32\]"),
        (HEAD, lambda t: t[:, 0], r"its lm_head.weight is \[101\], not \[101, 32\]"),
        (HEAD, lambda t: t[None], r"its lm_head.weight is \[1, 101, 32\], not"),
        (HEAD, lambda t: t[:99], r"its lm_head.weight is \[99, 32\], not"),
        (EMBEDDINGS, lambda t: t[:, 0], r"its model.embed_tokens.weight is \[101\], not"),
        (NORM, lambda t: t[:1], r"its model.norm.weight is \[1\], not \[32\]"),
        (HEAD, lambda t: t.to(torch.int8), "lm_head.weight is torch.int8"),
        (HEAD, lambda t: t * 0, "was not distilled from this target"),
        (EMBEDDINGS, lambda t: -t, "was not distilled from this target"),
        ("lm_head.bias", lambda t: t, "it has lm_head.bias"),
        ("model.layers.1.mlp.up_proj.weight", lambda t: t, "it has model.layers.1.mlp"),
    ],
)
def test_tensors_that_a_draft_for_this_target_has_not(
    name: str, change: Change, said: str, target: Path, draft: Path, tmp_path: Path
) -> None:
    with_tensor(draft, name, change)
    refused(said, target, draft, tmp_path)


def test_a_tensor_too_few_or_twice(target: Path, draft: Path, tmp_path: Path) -> None:
    with_config(draft, num_hidden_layers=2)
    refused("it has no model.layers.1.", target, draft, tmp_path)
    with_config(draft, num_hidden_layers=1)
    save_file({HEAD: torch.zeros(101, 32)}, draft / "zz.safetensors")
    refused("has lm_head.weight in two files", target, draft, tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": "abc"}, "cannot read the model config"),
        ({"hidden_size": 32.0}, "cannot read the model config"),
        ({"num_attention_heads": [4]}, "cannot read the model config"),
        ({"num_attention_heads": 0}, "cannot read the model config"),
        ({"model_type": "weird"}, "cannot read the model config"),
        ({"hidden_size": -4}, "hidden_size of the student's config must be a whole number"),
        ({"hidden_size": 64}, "--init .*/init: the student may not be wider than the target"),
        ({"num_hidden_layers": 10**9}, "--init .*/init: num_hidden_layers"),
        ({"rms_norm_eps": 0.5}, "its rms_norm_eps is 0.5, not 1e-06"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            'its rope_parameters is {"rope_type": "default", "rope_theta": 5.0}, not',
        ),
        ({"hidden_act": "relu"}, 'its hidden_act is "relu", not "silu"'),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its quantization_config"),
    ],
)
def test_configs_that_a_draft_for_this_target_has_not(
    values: dict[str, Any], said: str, target: Path, draft: Path, tmp_path: Path
) -> None:
    with_config(draft, **values)
    refused(said, target, draft, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "config.json cannot be read"),
        ("[]", "it is no JSON object"),
        ("{", "config.json cannot be read"),
    ],
    ids=["deep", "list", "torn"],
)
def test_a_config_that_is_none(
    text: str, said: str, target: Path, draft: Path, tmp_path: Path
) -> None:
    (draft / "config.json").write_text(text)
    refused(said, target, draft, tmp_path)
    spoiled = tmp_path / "target"
    shutil.copytree(target, spoiled)
    (spoiled / "config.json").write_text(text)
    refused(said, spoiled, draft, tmp_path)


def test_a_target_whose_config_has_wrong_types(target: Path, draft: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "target"
    shutil.copytree(target, spoiled)
    with_config(spoiled, hidden_size="abc")
    refused("cannot read the model config in .*/target", spoiled, draft, tmp_path)


def test_proposable_tokens_that_the_target_has_not(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    (draft / "draft_vocab.json").write_text("[1, 5, 100, 101, 200]")
    refused("has the token 200: the target has 101", target, draft, tmp_path)
    (draft / "draft_vocab.json").write_text("[1, 5, 100]")
    run(job(target, tmp_path / "next", init=draft, budget=Budget(steps=1)))


def test_what_is_no_whole_draft(target: Path, tmp_path: Path) -> None:
    refused("is the small form of a draft", target, ASSETS / "smollm2-draft", tmp_path)
    refused("holds Medusa heads", target, ASSETS / "smollm2-medusa", tmp_path)
    small = tmp_path / "small"
    made = job(target, tmp_path / "first", asset=small, budget=Budget(steps=1), num_layers=1)
    run(made)
    refused("is the small form of a draft: .* --out or an alias", target, small, tmp_path)
    run(job(target, tmp_path / "next", init=made.out, budget=Budget(steps=1)))


def test_a_refused_draft_leaves_a_work_folder_as_it_was(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    """Mended, the same command goes on."""
    kept = (draft / "model.safetensors").read_bytes()
    with_tensor(draft, HEAD, lambda t: t[:, :16])
    refused("its lm_head.weight", target, draft, tmp_path)
    (draft / "model.safetensors").write_bytes(kept)
    run(job(target, tmp_path / "next", init=draft, budget=Budget(steps=1)))
