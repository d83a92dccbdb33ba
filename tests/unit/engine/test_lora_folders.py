"""Adapter folders that cannot be served as they were trained are refused, with a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig
from paceline.engine.loader import load_engine
from paceline.engine.lora import MAX_ADAPTERS, attach_adapters
from paceline.engine.peft_folder import (
    MAX_CONFIG_BYTES,
    MAX_RANK,
    read_lora_config,
    read_lora_shapes,
)
from paceline.errors import ConfigError
from tests.unit.engine.adapters import edit_config, edit_weights, save_adapter
from tests.unit.engine.conftest import write_tokenizer
from tests.unit.engine.families import save_family

KEY = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN, UP = f"{KEY}.lora_A.weight", f"{KEY}.lora_B.weight"


@pytest.fixture(scope="module")
def saved(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(llama_folder, tmp_path_factory.mktemp("saved"), seed=1)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def load(base: Path, *folders: Path, **fields: Any) -> Any:
    config = ModelConfig(source=str(base), max_model_len=64, device="cpu", **fields)
    return load_engine(config, base, adapters={f"a{i}": str(f) for i, f in enumerate(folders)})


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def weights(**named: torch.Tensor | None) -> Callable[[Path], object]:
    """`down` and `up` of one layer, or another key."""
    names = {"down": DOWN, "up": UP, "dora": f"{KEY}.lora_magnitude_vector"}
    names["embedding"] = "base_model.model.model.embed_tokens.weight"
    names["head"] = "base_model.model.lm_head.base_layer.weight"
    return lambda folder: edit_weights(folder, {names[k]: v for k, v in named.items()})


def config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_config(folder, **changes)


def other_tokenizer(folder: Path) -> None:
    write_tokenizer(folder, 90)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no folder", shutil.rmtree, "is no folder: name the one that PEFT saved"),
    ("no config", lambda f: (f / "adapter_config.json").unlink(), "has no adapter_config.json"),
    ("broken config", text("adapter_config.json", '{"r": 4'), "cannot be read"),
    ("not UTF-8", lambda f: (f / "adapter_config.json").write_bytes(b"\xff"), "be read"),
    ("deep config", text("adapter_config.json", "[" * 100_000), "cannot be read"),
    ("a list", text("adapter_config.json", "[]"), "is no JSON object"),
    ("long config", text("adapter_config.json", " " * (MAX_CONFIG_BYTES + 1)), "has more than"),
    ("another method", config(peft_type="IA3"), "peft_type is 'IA3', not 'LORA'"),
    ("no method", config(peft_type=None), "peft_type is None"),
    ("bias", config(bias="lora_only"), "bias is 'lora_only': train it with bias='none'"),
    ("DoRA", config(use_dora=True), "use_dora is set: DoRA is not supported: merge it"),
    ("whole layers", config(modules_to_save=["lm_head"]), "it has whole layers of its own"),
    ("tokens", config(trainable_token_indices=[5]), "it has embeddings of its own"),
    ("parameters", config(target_parameters=["w"]), "only linear layers can be adapted"),
    ("fan", config(fan_in_fan_out=True), "fan_in_fan_out is set: layers that keep"),
    ("lora bias", config(lora_bias=True), "train it with lora_bias=False"),
    ("replication", config(layer_replication=[[0, 2]]), "it changes the model's layers"),
    ("aLoRA", config(alora_invocation_tokens=[1]), "alora_invocation_tokens is set: not supp"),
    ("the future", config(use_warp=True), "use_warp is set: not supported here"),
    ("PiSSA", config(init_lora_weights="pissa"), "path_initial_model_for_weight_conversion"),
    ("classifier", config(task_type="SEQ_CLS"), "only adapters of causal language models"),
    ("rank 0", config(r=0), f"r must be a whole number from 1 to {MAX_RANK}, got 0"),
    ("large rank", config(r=MAX_RANK + 1), f"r must be a whole number from 1 to {MAX_RANK}"),
    ("rank of words", config(r="4"), "r must be a whole number"),
    ("alpha", config(lora_alpha=float("nan")), "lora_alpha must be a number, got nan"),
    ("rank pattern", config(rank_pattern={"q_proj": 1000}), r"rank_pattern\['q_proj'\] must be"),
    ("patterns", config(alpha_pattern=[1]), "alpha_pattern must be an object"),
    ("expression", config(target_modules="(q_proj"), "is no regular expression"),
    ("expression 2", config(rank_pattern={"(": 2}), "is no regular expression"),
    ("targets", config(target_modules=[1]), "target_modules must be names of modules"),
    ("no targets", config(target_modules=None), "names no target_modules"),
    ("layers", config(layers_to_transform=["1"]), "layers_to_transform must be numbers"),
    ("embeddings", config(target_modules=["embed_tokens"]), "embed_tokens, which is no linear"),
    ("fewer", config(target_modules=["q_proj"]), "only its weights names"),
    ("more", config(target_modules=["q_proj", "v_proj", "o_proj"]), "adapter_config.json names"),
    ("other layers", config(layers_to_transform=[0]), "only its weights names"),
    ("other rank", config(r=8), r"matrices of \(4, 32\) and \(32, 4\) where this model and r 8"),
    ("no weights", lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model"),
    ("a pickle", pickled, "pickles are not read: save it with safe_serialization=True"),
    ("cut weights", cut, "cannot be read"),
    ("half a pair", weights(up=None), "lacks .*lora_B.weight: copy it again"),
    ("shape", weights(down=torch.zeros(4, 31)), r"matrices of \(4, 31\)"),
    ("vector", weights(down=torch.zeros(4)), r"matrices of \(4,\)"),
    ("integers", weights(down=torch.zeros(4, 32, dtype=torch.int64)), "is of type I64"),
    ("NaN", weights(down=torch.full((4, 32), float("nan"))), "weights that are no numbers"),
    ("DoRA weights", weights(dora=torch.zeros(32)), "is no matrix of a LoRA"),
    ("embedding", weights(embedding=torch.zeros(101, 32)), "is a layer of the model itself"),
    ("head", weights(head=torch.zeros(101, 32)), "save_embedding_layers=False"),
    ("tokenizer", other_tokenizer, "has other token ids than the model's"),
]


@pytest.mark.parametrize(
    ("damage", "sentence"), [each[1:] for each in DAMAGES], ids=[each[0] for each in DAMAGES]
)
def test_damaged(
    llama_folder: Path, folder: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(folder)
    with pytest.raises(ConfigError, match=f"adapter a0: .*{sentence}"):
        load(llama_folder, folder)


def test_the_same_folder_undamaged(llama_folder: Path, folder: Path) -> None:
    write_tokenizer(folder, 101)  # the model's own
    edit_config(folder, eva_config={"rho": 2}, megatron_core="other", use_warp=False)
    assert load(llama_folder, folder, folder).info.adapters == ("a0", "a1")


def test_for_another_model(llama_folder: Path, tmp_path: Path) -> None:
    other = save_family("llama", tmp_path / "other", num_hidden_layers=4)
    adapter = save_adapter(other, tmp_path / "adapter", seed=1)
    with pytest.raises(ConfigError, match=r"adapts model\.layers\.3\..*q_proj, which is no"):
        load(llama_folder, adapter)


def test_the_largest_rank(llama_folder: Path, tmp_path: Path) -> None:
    adapter = save_adapter(llama_folder, tmp_path, seed=1, r=MAX_RANK, target_modules=["q_proj"])
    assert load(llama_folder, adapter).info.adapters == ("a0",)


def test_adapters_are_bounded(llama_folder: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"a target holds at most {MAX_ADAPTERS}"):
        load(llama_folder, *[folder] * (MAX_ADAPTERS + 1))
    # each is a set of weights of its own
    assert len(load(llama_folder, *[folder] * MAX_ADAPTERS).info.adapters) == MAX_ADAPTERS


def test_models_with_other_layers(tmp_path: Path) -> None:
    base = save_family("gpt2", tmp_path / "gpt2")
    adapter = save_adapter(base, tmp_path / "adapter", seed=1, target_modules=["c_attn"])
    with pytest.raises(ConfigError, match="fan_in_fan_out"):
        load(base, adapter)
    edit_config(adapter, fan_in_fan_out=False)
    with pytest.raises(ConfigError, match="c_attn, which is no linear layer"):
        load(base, adapter)


class Aside(torch.nn.Module):
    """A model that computes with a layer's weights, or calls it with some of the rows."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, way: str) -> None:
        super().__init__()
        self.q_proj, self.v_proj = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.way = way

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids: torch.Tensor, **_: Any) -> None:
        hidden = torch.zeros(1, input_ids.shape[1], 4)
        self.v_proj(hidden)
        if self.way == "by itself":
            torch.nn.functional.linear(hidden, self.q_proj.weight)
        elif self.way != "never":
            self.q_proj(hidden[:, : 2 if self.way == "some rows" else None])
        if self.way == "twice":
            self.q_proj(hidden)


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("by itself", "does not call its layers so that they can be adapted: .*weight"),
        ("some rows", "an adapted layer got 2 rows of 3"),
        ("never", "a pass calls q_proj 0 times"),
        ("twice", "a pass calls q_proj 2 times"),
        ("once", ""),
    ],
)
def test_a_model_that_would_leave_an_adapter_out(
    folder: Path, tmp_path: Path, way: str, sentence: str
) -> None:
    (folder / "adapter_model.safetensors").unlink()
    tensors: dict[str, torch.Tensor | None] = {}
    for name in ("q_proj", "v_proj"):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.ones(4, 4)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(4, 4)
    edit_weights(folder, tensors)
    if not sentence:
        assert attach_adapters(Aside(way), {"a": str(folder)}, tmp_path) is not None
        return
    with pytest.raises(ConfigError, match=sentence):
        attach_adapters(Aside(way), {"a": str(folder)}, tmp_path)


def test_what_is_read(folder: Path) -> None:
    edit_config(folder, rank_pattern={"q_proj": 2}, use_rslora=True, r=16, lora_alpha=8)
    config = read_lora_config(folder)
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.1.self_attn.xq_proj") == 16  # a whole part of a name
    assert config.scale_of("model.layers.1.self_attn.v_proj") == 8 / 4
    assert len(read_lora_shapes(folder)) == 6
