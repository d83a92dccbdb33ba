"""A distilled draft's asset on top of its target, against the same sum written out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.convert import compose_draft
from paceline.engine.packed import pack_int8, unpack
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.sampling.params import SamplingParams

PROMPT = [5, 90, 33, 2, 71]
TOKEN_IDS = [0, 2, 3, 17, 33, 64, 90, 100]


def make_asset(target: Path, folder: Path, hidden: int = 32) -> LlamaForCausalLM:
    """Two random layers, norm and map; returns the model that holds the layers."""
    config = LlamaConfig.from_pretrained(target)
    config.num_hidden_layers = 2
    torch.manual_seed(11)
    student = LlamaForCausalLM(config).eval()
    torch.nn.init.uniform_(student.model.norm.weight, 0.5, 1.5)
    layers = {
        name: tensor.clone()
        for name, tensor in student.state_dict().items()
        if name.startswith(("model.layers.", "model.norm."))
    }
    layers |= {"head_map": torch.randn(hidden, hidden), "draft_vocab": torch.tensor(TOKEN_IDS)}
    folder.mkdir()
    save_file(layers, folder / "layers.safetensors")
    (folder / "draft.json").write_text('{"num_hidden_layers": 2}', encoding="utf-8")
    return student


@pytest.fixture
def composed(llama_folder: Path, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """The folder, and the logits of PROMPT over all ids by hand: head(map(norm(layers(embed))))."""
    student = make_asset(llama_folder, tmp_path / "asset")
    head_map = load_file(tmp_path / "asset" / "layers.safetensors")["head_map"]
    embeddings = load_file(llama_folder / "model.safetensors")["model.embed_tokens.weight"]
    with torch.inference_mode():
        hidden = student.model(inputs_embeds=embeddings[PROMPT][None]).last_hidden_state[0]
        logits = (hidden @ head_map.T) @ embeddings.T
    return compose_draft(llama_folder, tmp_path / "asset", tmp_path / "out"), logits


def test_a_composed_draft_is_an_ordinary_llama(composed: tuple[Path, torch.Tensor]) -> None:
    folder, expected = composed
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(loaded) is LlamaForCausalLM
    with torch.inference_mode():
        logits = loaded(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_engine_computes_the_draft_vocabulary_alone(
    composed: tuple[Path, torch.Tensor],
) -> None:
    folder, expected = composed
    engine = load_torch_engine(ModelConfig(source="x", max_model_len=64, device="cpu"), folder)
    assert engine.info.vocab_size == expected.shape[1]
    engine.add(1)
    item = StepItem(1, 0, tuple(PROMPT), 5, SamplingParams(temperature=0.0))
    logits = engine.logits([item])
    assert logits.isfinite().nonzero()[:, 1].tolist() == TOKEN_IDS * 5
    torch.testing.assert_close(logits[:, TOKEN_IDS], expected[:, TOKEN_IDS], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_tokens_of_the_draft_vocabulary_are_sampled(
    composed: tuple[Path, torch.Tensor], temperature: float
) -> None:
    engine = load_torch_engine(ModelConfig(source="x", max_model_len=64, device="cpu"), composed[0])
    engine.add(1)
    sampling = SamplingParams(temperature=temperature, seed=3)
    (result,) = engine.step([StepItem(1, 0, tuple(PROMPT), 5, sampling)])
    assert set(result.token_ids) <= set(TOKEN_IDS)


def test_an_asset_of_another_model_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    make_asset(llama_folder, tmp_path / "asset", hidden=16)
    with pytest.raises(ConfigError, match="was not made for"):
        compose_draft(llama_folder, tmp_path / "asset", tmp_path / "out")


@pytest.mark.parametrize("token_ids", [[], [3, 2], [0, 101], [-1], "x", [[1]]])
def test_a_damaged_draft_vocabulary_is_refused(
    composed: tuple[Path, torch.Tensor], token_ids: object
) -> None:
    (composed[0] / "draft_vocab.json").write_text(json.dumps(token_ids), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"draft_vocab\.json (does not fit|is no list)"):
        load_torch_engine(ModelConfig(source="x", max_model_len=64, device="cpu"), composed[0])


def test_packed_matrices_come_back_within_half_a_step() -> None:
    torch.manual_seed(4)
    tensors = {"a": torch.randn(5, 40), "zero": torch.zeros(2, 3), "vector": torch.randn(7)}
    packed = pack_int8(tensors)
    assert packed["a"].dtype == torch.int8
    back = unpack(packed)
    assert set(back) == set(tensors)
    step = tensors["a"].abs().amax(dim=1, keepdim=True) / 127
    assert bool(((back["a"] - tensors["a"]).abs() <= 0.5001 * step).all())
    assert torch.equal(back["zero"], tensors["zero"])
    assert torch.equal(back["vector"], tensors["vector"])
