"""Folders of Medusa heads: whatever is bent is refused, with a sentence."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig
from paceline.engine import medusa_source
from paceline.engine.loader import load_engine
from paceline.engine.medusa_folder import (
    MAX_CONFIG_BYTES,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_OTHER_BYTES,
    read_medusa,
)
from paceline.engine.medusa_source import MEDUSA_ALIASES, resolve_medusa, verify_medusa
from paceline.errors import ConfigError
from paceline.models import sha256_of
from paceline.rank_actors import load_replica_engine
from tests.unit.engine.medusa_heads import random_heads, save_heads, save_pickled

SIZE, WIDTH = 32, 40
VOCAB = [1, 5, 39]
Tensors = dict[str, torch.Tensor]


def published(num_heads: int = 2, num_layers: int = 1) -> Tensors:
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.ones(SIZE, SIZE) * head
            tensors[f"{head}.{layer}.linear.bias"] = torch.ones(SIZE)
        tensors[f"{head}.{num_layers}.weight"] = torch.ones(WIDTH, SIZE)
    return tensors


def read(folder: Path, **fields: Any) -> Any:
    return read_medusa(folder, SIZE, WIDTH, **fields)


def changed(**tensors: torch.Tensor | None) -> Callable[[Path], object]:
    """The published file with some tensors others, or gone; `_` stands for a dot."""

    def bend(folder: Path) -> None:
        found: dict[str, torch.Tensor | None] = {**published()}
        found |= {name.replace("_", ".").strip("."): value for name, value in tensors.items()}
        save_heads(folder, {n: t for n, t in found.items() if t is not None}, medusa_num_heads=2)

    return bend


def small(tensors: Tensors | None = None, **config: Any) -> Callable[[Path], object]:
    """The small file with some tensors others."""
    return lambda folder: save_heads(
        folder, {**random_heads(2, 1, VOCAB), **(tensors or {})}, medusa_num_heads=2, **config
    )


def config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: save_heads(folder, published(), **fields)


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def pickled(content: Any) -> Callable[[Path], object]:
    return lambda folder: save_pickled(folder, content, medusa_num_heads=2)


def raw(name: str, content: bytes) -> Callable[[Path], object]:
    def bend(folder: Path) -> None:
        (folder / "medusa_lm_head.safetensors").unlink()
        (folder / name).write_bytes(content)

    return bend


def cut(folder: Path) -> None:
    path = folder / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def cut_pickle(folder: Path) -> None:
    path = save_pickled(folder, published()) / "medusa_lm_head.pt"
    path.write_bytes(path.read_bytes()[:-3000])


def dangling(folder: Path) -> None:
    path = folder / "medusa_lm_head.safetensors"
    path.unlink()
    path.symlink_to(folder / "nowhere")


def endless(folder: Path) -> None:
    path = folder / "medusa_lm_head.safetensors"
    path.unlink()
    path.symlink_to("/dev/zero")


def too_large(folder: Path) -> None:
    """Sparse: takes no room."""
    size = MAX_HEADS * ((MAX_LAYERS + 1) * (SIZE + 1) + WIDTH) * SIZE * 4 + 8 * WIDTH
    os.truncate(folder / "medusa_lm_head.safetensors", size + MAX_OTHER_BYTES + 1)


def compressed(folder: Path) -> None:
    """A bomb would look like this."""
    path = save_pickled(folder, published()) / "medusa_lm_head.pt"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


class _Trap:
    """Its pickle, when trusted, makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


NAN = torch.full((SIZE, SIZE), float("nan"))
SCALE = torch.ones(SIZE, 1)
INT8 = torch.ones(SIZE, SIZE, dtype=torch.int8)
LAYER = "0.0.linear.weight"

BENT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "no json": (text("config.json", "{"), "cannot be read"),
    "deep json": (text("config.json", "[" * 100_000), "cannot be read"),
    "a list": (text("config.json", "[1]"), "no medusa_num_heads"),
    "another model's": (text("config.json", '{"model_type": "llama"}'), "no medusa_num_heads"),
    "no heads": (config(medusa_num_heads=0), "must be 1 to 16"),
    "many heads": (config(medusa_num_heads=MAX_HEADS + 1), "must be 1 to 16, got 17"),
    "true heads": (config(medusa_num_heads=True), "must be 1 to 16, got True"),
    "half a head": (config(medusa_num_heads=1.5), "must be 1 to 16"),
    "a long number": (config(medusa_num_heads="9" * 5000), "must be 1 to 16, got 9{60}$"),
    "no layers": (config(medusa_num_layers=None), "medusa_num_layers must be 0 to 8, got None"),
    "many layers": (config(medusa_num_layers=MAX_LAYERS + 1), "must be 0 to 8, got 9"),
    "negative": (config(medusa_num_layers=-1), "must be 0 to 8"),
    "more heads than there are": (config(medusa_num_heads=3), r"heads \[0, 1\] where .* is 3"),
    "fewer layers": (config(medusa_num_layers=0), "does not fit medusa_num_layers 0"),
    "more layers": (config(medusa_num_layers=2), "lacks 0.1.linear.weight"),
    "no weights": (lambda f: (f / "medusa_lm_head.safetensors").unlink(), "has neither"),
    "a link to nowhere": (dangling, "has neither"),
    "a link without end": (endless, "has neither"),
    "cut": (cut, "cannot be read"),
    "too large": (too_large, "larger than any heads"),
    "a missing bias": (changed(_1_0_linear_bias=None), "lacks 1.0.linear.bias"),
    "a missing output": (changed(_1_1_weight=None), "lacks 1.1.weight"),
    "an output's bias": (changed(_1_1_bias=torch.ones(WIDTH)), "1.1.bias does not fit"),
    "another hidden size": (changed(_0_0_linear_weight=torch.ones(64, 64)), "another model"),
    "another vocabulary": (changed(_1_1_weight=torch.ones(WIDTH + 1, SIZE)), r"\[41, 32\] where"),
    "not a matrix": (changed(_0_0_linear_bias=torch.ones(1, SIZE)), r"\[1, 32\] where .* \[32\]"),
    "NaN": (changed(_0_0_linear_weight=NAN), "no torch.float32 numbers"),
    "whole numbers": (changed(_1_1_weight=torch.ones(WIDTH, SIZE).int()), "type torch.int32"),
    "doubles": (changed(_1_1_weight=torch.ones(WIDTH, SIZE).double()), "type torch.float64"),
    "int8 alone": (changed(_0_0_linear_weight=INT8), "type torch.int8"),
    "a scale alone": (changed(_0_0_linear_weight_scale=SCALE), "type torch.float32: save"),
    "a scale of a row": (
        changed(_0_0_linear_weight=INT8, _0_0_linear_weight_scale=SCALE.T.contiguous()),
        "type torch.int8",
    ),
    "a half scale": (
        changed(_0_0_linear_weight=INT8, _0_0_linear_weight_scale=SCALE.half()),
        "type torch.int8",
    ),
    "an odd name": (changed(model_layers=torch.ones(1)), "no part of Medusa heads"),
    "too many in the file": (
        lambda f: save_heads(f, published(MAX_HEADS + 1), medusa_num_heads=2),
        "17 heads: at most 16",
    ),
    "a head left out": (
        lambda f: save_heads(
            f, {k.replace("1.", "2.", 1) if k[0] == "1" else k: v for k, v in published().items()}
        ),
        r"heads \[0, 2\] where",
    ),
    "twice": (
        lambda f: save_heads(
            f, {**published(), f"medusa_head.{LAYER}": torch.ones(SIZE, SIZE)}, medusa_num_heads=2
        ),
        f"has {LAYER} twice",
    ),
    "outputs and a vocabulary": (small({"0.1.weight": torch.ones(WIDTH, SIZE)}), "use one"),
    "a size of nothing": (config(medusa_draft_vocab_size=3), "shape None where .* is 3"),
    "another size": (small(medusa_draft_vocab_size=4), r"shape \[3\] where .* is 4"),
    "no size": (small(medusa_draft_vocab_size=None), r"shape \[3\] where .* is None"),
    "an absurd size": (small(medusa_draft_vocab_size=0), "must be 1 to"),
    "ids in a square": (
        small({"draft_vocab": torch.ones(3, 1).int()}, medusa_draft_vocab_size=3),
        r"shape \[3, 1\]",
    ),
    "ids that are no numbers": (small({"draft_vocab": torch.ones(3)}), "type torch.float32"),
    "ids twice": (small({"draft_vocab": torch.tensor([1, 1, 2]).int()}), "must be ascending"),
    "a negative id": (small({"draft_vocab": torch.tensor([-1, 1, 2]).int()}), "ids below"),
    "an id beyond": (small({"draft_vocab": torch.tensor([1, 2, WIDTH]).int()}), "below .* 40"),
    "one map only": (
        lambda f: save_heads(
            f,
            {k: v for k, v in random_heads(2, 1, VOCAB).items() if k != "1.map.weight"},
            medusa_num_heads=2,
        ),
        "lacks 1.map.weight",
    ),
    "a pickle of nothing": (pickled(None), "no state dict"),
    "a pickle of a list": (pickled([torch.ones(2)]), "no state dict"),
    "numbers as names": (pickled({1: torch.ones(2)}), "no state dict"),
    "a pickle of texts": (pickled({"0.1.weight": "x"}), "no plain tensor"),
    "a sparse tensor": (
        pickled({**published(), LAYER: torch.eye(SIZE).to_sparse()}),
        "no plain tensor|something else",
    ),
    "on no device": (
        pickled({**published(), LAYER: torch.ones(SIZE, SIZE, device="meta")}),
        "no plain tensor|something else",
    ),
    "not a zip": (raw("medusa_lm_head.pt", pickle.dumps({})), "something else"),
    "an empty pickle": (raw("medusa_lm_head.pt", b""), "something else"),
    "a cut pickle": (cut_pickle, "something else"),
    "a compressed pickle": (compressed, "is compressed"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_heads(tmp_path / "heads", published())


@pytest.mark.parametrize("name", sorted(BENT))
def test_bent(folder: Path, name: str) -> None:
    bend, sentence = BENT[name]
    read(folder)
    bend(folder)
    with pytest.raises(ConfigError, match=sentence) as caught:
        read(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_pickle_that_would_run_something(folder: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    save_pickled(folder, {**published(), "0.2.weight": _Trap(trap)}, medusa_num_heads=2)
    with pytest.raises(ConfigError, match="something else than plain tensors, which is not loaded"):
        read(folder)
    assert not trap.exists()


def test_a_pickle_whose_tensors_overlap_costs_no_memory(folder: Path) -> None:
    """A shape far larger than what the file holds is never written out: shapes are checked."""
    wide = torch.ones(1).expand(1 << 40)
    save_pickled(folder, {**published(), LAYER: wide}, medusa_num_heads=2)
    with pytest.raises(ConfigError, match="another model"):
        read(folder)


@pytest.mark.parametrize("num_layers", [0, 1, MAX_LAYERS])
def test_as_many_heads_and_layers_as_there_may_be(tmp_path: Path, num_layers: int) -> None:
    tensors = published(MAX_HEADS, num_layers)
    folder = save_heads(tmp_path, tensors, medusa_num_layers=num_layers)
    found = read(folder)
    assert len(found.heads) == MAX_HEADS
    assert {len(head.blocks) for head in found.heads} == {num_layers}
    if num_layers:
        assert torch.equal(found.heads[2].blocks[0][0], tensors["2.0.linear.weight"])


def test_a_config_as_long_as_allowed(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().ljust(MAX_CONFIG_BYTES))
    read(folder)
    path.write_text(path.read_text() + " ")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read(folder)


def test_types(folder: Path) -> None:
    """What is too large for the target's type is no number there."""
    tensors = published()
    tensors[LAYER] = torch.full((SIZE, SIZE), 1e6)
    save_heads(folder, tensors)
    assert read(folder, dtype=torch.bfloat16).heads[0].blocks[0][0].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"no torch\.float16 numbers"):
        read(folder, dtype=torch.float16)


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
@pytest.mark.parametrize("wrap", [dict, OrderedDict])
def test_both_formats_hold_the_same(tmp_path: Path, prefix: str, wrap: Any) -> None:
    tensors = {prefix + name: tensor for name, tensor in random_heads(2, 1, VOCAB).items()}
    tensors["draft_vocab"] = tensors.pop(prefix + "draft_vocab").long()
    fields = {"medusa_num_heads": 2, "medusa_draft_vocab_size": 3}
    one = read(save_heads(tmp_path / "a", tensors, **fields))
    other = read(save_pickled(tmp_path / "b", wrap(tensors), **fields))
    assert one.draft_vocab.tolist() == other.draft_vocab.tolist() == VOCAB
    for left, right in zip(one.heads, other.heads, strict=True):
        assert torch.equal(left.map, right.map)
        assert torch.equal(left.blocks[0][1], right.blocks[0][1])


# -- where they come from -------------------------------------------------------------------


def test_sources(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(medusa_source, "ASSETS", tmp_path)
    assert resolve_medusa(str(folder)) == folder
    for source, sentence in {
        str(folder / "config.json"): "is a file",
        "nowhere at all": "neither a folder here, nor a Hub id",
        "\0": "neither a folder here",
        "nobody/has-these-heads": "cannot be downloaded|not in the local Hub cache",
        "smollm2-135m-medusa": "not part of this installation",
        str(tmp_path): "no config.json",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            resolve_medusa(source)
    (folder / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no heads"):
        resolve_medusa(str(folder))


def test_the_heads_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [alias] = MEDUSA_ALIASES.values()
    monkeypatch.setattr(medusa_source, "ASSETS", tmp_path)
    assert not alias.is_here
    folder = save_heads(tmp_path / alias.asset, published())
    assert alias.is_here
    assert resolve_medusa(alias.name) == verify_medusa(alias.name) == folder
    path = folder / "config.json"
    stated = {"weights_sha256": sha256_of(folder / "medusa_lm_head.safetensors")}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    verify_medusa(alias.name)
    cut(folder)
    with pytest.raises(ConfigError, match="does not match its checksum"):
        verify_medusa(alias.name)


def test_toys_and_models_have_heads_of_their_own(folder: Path, llama_folder: Path) -> None:
    assert load_engine(ModelConfig()).info.num_heads == 0
    assert load_engine(ModelConfig(), medusa="toy").info.num_heads == 3
    assert load_engine(ModelConfig(source="timed"), medusa="toy").info.num_heads == 3
    with pytest.raises(ConfigError, match="heads of model toy are named toy"):
        load_engine(ModelConfig(), medusa=str(folder))
    model = ModelConfig(source=str(llama_folder), max_model_len=64, device="cpu")
    with pytest.raises(ConfigError, match="'toy' is neither a folder"):
        load_engine(model, llama_folder, medusa="toy")
    with pytest.raises(ConfigError, match="made for another model"):  # 101 ids, not 40
        load_engine(model, llama_folder, medusa=str(folder))


async def test_heads_that_are_not_there_end_a_replica_before_its_ranks_begin() -> None:
    model = ModelConfig(source="/models/m", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"target\.medusa '/nope' is neither a folder here"):
        await load_replica_engine(model, medusa="/nope")
