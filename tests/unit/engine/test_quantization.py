"""Weights in 8 and 4 bits: how near they come, that drafts change nothing, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine import quantization
from paceline.engine.base import StepItem
from paceline.engine.packed_linear import PackedLinear
from paceline.engine.quantization import (
    Int4Linear,
    Int8Linear,
    check_quantization,
    loading_arguments,
    quantize_int4,
    torchao_config,
)
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.generation import GenerateRequest
from paceline.models import check_folder, gguf_file
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.unit.engine.conftest import save_tiny, write_tokenizer
from tests.unit.engine.families import save_family

GREEDY = SamplingParams(temperature=0.0)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Widths that the 4-bit kernel takes: multiples of 32 in, of 16 out.
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2", tmp_path_factory.mktemp("wide"), **WIDTHS)  # has biases


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(**{"source": "tiny", "max_model_len": 128, "device": "cpu", **fields})


def layers_of(engine: TorchEngine) -> list[torch.nn.Module]:
    return list(engine._runner._model.modules())


def prompt_logits(engine: TorchEngine) -> torch.Tensor:
    engine.add(1)
    text = tuple(range(3, 43))
    logits = engine.logits([StepItem(1, 0, text, len(text), GREEDY)])
    engine.free(1)
    return logits.float()


def divergence(exact: torch.Tensor, near: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of the rows' laws, nats."""
    gap = exact.log_softmax(-1) - near.log_softmax(-1)
    return float((exact.softmax(-1) * gap).sum(-1).mean())


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_an_int8_layer_is_its_rounded_weights(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(64, 48, bias=bias)
    packed = Int8Linear(plain)
    weight = packed.levels.float() * packed.scale.float()[:, None]
    assert (weight - plain.weight).abs().max() <= 0.51 * packed.scale.float().max()
    hidden = torch.randn(1, rows, 64).bfloat16().float()
    with torch.inference_mode():
        expected = torch.nn.functional.linear(hidden, weight, plain.bias)
        torch.testing.assert_close(packed(hidden), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_an_int4_layer_is_its_rounded_weights(rows: int, is_symmetric: bool) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(64, 48)
    levels, scales = quantize_int4(plain.weight.detach(), is_symmetric=is_symmetric)
    scale, zero = scales.float().repeat_interleave(32, 1).unbind(2)
    weight = (levels - 8) * scale + zero
    # A symmetric grid has no level 16: what lies there is clipped by a whole step.
    most = 1.02 if is_symmetric else 0.52
    assert ((weight - plain.weight).abs() <= most * scale.abs()).all()
    hidden = torch.randn(1, rows, 64).bfloat16().float()
    with torch.inference_mode():
        expected = torch.nn.functional.linear(hidden, weight, plain.bias)
        packed = Int4Linear(plain, levels, scales)(hidden)
        torch.testing.assert_close(packed, expected, rtol=0.01, atol=0.01)


def test_a_constant_group_stays_what_it_is() -> None:
    levels, scales = quantize_int4(torch.full((16, 32), 0.75), is_symmetric=False)
    assert levels.unique().tolist() == [8]
    assert scales[..., 0].unique().tolist() == [0.0]
    assert scales[..., 1].unique().tolist() == [0.75]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_does_not_depend_on_how_many_rows_there_are(kind: str) -> None:
    """Bitwise: a verify pass must not move a token that a decode pass would choose."""
    torch.manual_seed(1)
    plain = torch.nn.Linear(96, 64)
    levels = quantize_int4(plain.weight.detach(), is_symmetric=False)
    packed = Int8Linear(plain) if kind == "int8" else Int4Linear(plain, *levels)
    hidden = torch.randn(1, 9, 96)
    with torch.inference_mode():
        together = packed(hidden)
        for row in range(9):
            assert torch.equal(packed(hidden[:, row : row + 1]), together[:, row : row + 1])


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "int8":
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight.data = weight
        packed = Int8Linear(linear)
        return packed.levels.float() * packed.scale.float()[:, None]
    levels, scales = quantize_int4(weight, is_symmetric=False)
    scale, zero = scales.float().repeat_interleave(32, 1).unbind(2)
    return (levels - 8) * scale + zero


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "layer"), [("int8", Int8Linear), ("int4", Int4Linear)])
def test_a_quantised_model_is_the_one_with_rounded_weights(
    folder: Path, kind: str, layer: type[torch.nn.Module], dtype: str
) -> None:
    engine = load_torch_engine(config(quantization=kind, dtype=dtype), folder)
    layers = layers_of(engine)
    assert sum(isinstance(module, layer) for module in layers) == 3 * 7
    assert sum(isinstance(module, PackedLinear) for module in layers) == 1  # the output layer
    assert not any(type(module) is torch.nn.Linear for module in layers)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        exact = reference(torch.arange(3, 43)[None]).logits[0]
        for module in reference.base_model.modules():
            if type(module) is torch.nn.Linear:
                module.weight.data = rounded(module.weight.detach(), kind)
        expected = reference(torch.arange(3, 43)[None]).logits[0]
    # 16-bit rows add little; a whole model in 16 bits drifts more, as without quantisation
    logits = prompt_logits(engine)
    assert divergence(expected, logits) < (0.03 if dtype == "float32" else 0.5)
    assert divergence(exact, logits) < (0.2 if kind == "int8" else 2.0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "coupled"])
def test_a_draft_changes_no_token_of_a_quantised_target(
    folder: Path, kind: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    requests = [
        GenerateRequest(f"r{i}", tuple(range(5 + i, 20 + 3 * i)), 24, params, ignore_eos=True)
        for i in range(3)
    ]

    def run(draft: ModelConfig | None) -> tuple[list[list[int]], int]:
        target = load_torch_engine(config(quantization=kind), folder)
        engine = None if draft is None else load_torch_engine(draft, folder)
        runs = Loopback(target, engine, SpeculationConfig()).run(requests)
        return [run.token_ids for run in runs], sum(run.num_accepted_tokens for run in runs)

    alone, _ = run(None)
    for draft in (config(), config(quantization="int8"), config(quantization="int4")):
        texts, num_accepted = run(draft)
        assert texts == alone
        assert num_accepted > 0


def test_torchao_rounds_int8_weights_as_we_do(folder: Path) -> None:
    """The CUDA path's configuration, on a CPU: the same numbers by another kernel."""
    pytest.importorskip("torchao")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=torchao_config("int8")
    )
    engine = load_torch_engine(config(quantization="int8"), folder)
    weights = [layer.mlp.up_proj.weight for layer in model.model.layers]
    packed = [layer.mlp.up_proj for layer in engine._runner._model.model.layers]
    for theirs, ours in zip(weights, packed, strict=True):
        assert type(theirs).__name__ == "Int8Tensor"
        gap = (theirs.qdata.int() - ours.levels.int()).abs()
        assert gap.max() <= 1  # our scale is rounded to 16 bits before the weights are
        assert (gap > 0).float().mean() < 0.2
        torch.testing.assert_close(theirs.scale.flatten(), ours.scale.float(), rtol=0.01, atol=0)


def test_a_cpu_model_is_packed_after_loading_and_a_cuda_model_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert loading_arguments("int4", CPU) == loading_arguments("none", CUDA) == {}
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[quantization\]'"):
        loading_arguments("int4", CUDA)


def test_the_cuda_arguments_name_the_device() -> None:
    pytest.importorskip("torchao")
    for kind, name in (("int8", "Int8WeightOnlyConfig"), ("int4", "Int4WeightOnlyConfig")):
        arguments = loading_arguments(kind, CUDA)
        assert arguments["device_map"] == {"": CUDA}
        assert type(arguments["quantization_config"].quant_type).__name__ == name


@pytest.mark.parametrize(
    ("fields", "device", "file", "sentence"),
    [
        (
            {"quantization": "int8", "dtype": "float16"},
            CPU,
            None,
            "needs dtype float32 or bfloat16",
        ),
        ({"quantization": "int4", "dtype": "float16"}, CUDA, None, "needs dtype bfloat16"),
        ({"quantization": "int8", "tensor_parallel_size": 2}, CPU, None, "tensor_parallel_size"),
        ({"quantization": "int8"}, torch.device("mps"), None, "not supported on mps"),
        ({"quantization": "gguf"}, CPU, None, "has no GGUF file"),
        ({"quantization": "gguf"}, CUDA, Path("m.gguf"), "gguf is not supported on cuda"),
        ({"quantization": "none"}, CPU, Path("m.gguf"), "set quantization: gguf"),
    ],
)
def test_what_cannot_be_held_so_is_refused(
    fields: dict[str, Any], device: torch.device, file: Path | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_quantization(config(**fields), device, file)


def test_shapes_and_layers_that_cannot_be_packed_are_refused(
    llama_folder: Path, tmp_path: Path
) -> None:
    narrow = save_tiny("llama", tmp_path / "narrow", intermediate_size=48)
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down_proj is 48, no multiple of 32"):
        load_torch_engine(config(quantization="int4"), narrow)
    gpt2 = save_family("gpt2", tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="has no plain linear layer to pack"):
        load_torch_engine(config(quantization="int8"), gpt2)
    experts = save_family("mixtral", tmp_path / "mixtral")
    with pytest.raises(ConfigError, match="mixtures of experts are not supported"):
        load_torch_engine(config(quantization="int8"), experts)


# ------------------------------------------------------------------------------------------ GGUF


def blocks(weight: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
    return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])


def write_gguf(folder: Path, kind: str) -> Path:
    """A Llama of two layers with weights of one GGUF type; the tokenizer beside it."""
    folder.mkdir()
    rng, hidden, inner, vocab, heads = np.random.default_rng(5), 64, 96, 96, 4
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    shapes = {"attn_q": (hidden, hidden), "attn_k": (32, hidden), "attn_v": (32, hidden)}
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (inner, hidden)}
    shapes |= {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    for layer in range(2):
        for name, shape in shapes.items():
            weight = rng.normal(0, 0.2, shape).astype(np.float32)
            data = blocks(weight, kind)
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=quantised)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, dtype=np.float32))
    table = rng.normal(0, 0.5, (vocab, hidden)).astype(np.float32)
    writer.add_tensor("token_embd.weight", table)
    writer.add_tensor("output.weight", table[::-1].copy())
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tokenizer(folder, vocab)
    return folder


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_gguf_file_keeps_its_levels(tmp_path: Path, kind: str) -> None:
    folder = write_gguf(tmp_path / "m", kind)
    check_folder(folder)
    engine = load_torch_engine(config(quantization="gguf"), folder)
    assert sum(isinstance(module, Int4Linear) for module in layers_of(engine)) == 2 * 7
    exact = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf").eval()
    with torch.inference_mode():
        expected = exact(torch.arange(3, 43)[None]).logits[0]
    # 16-bit rows and scales, but not one level lost: far nearer than fresh 4-bit rounding is
    assert divergence(expected, prompt_logits(engine)) < 0.002


def test_gguf_files_that_cannot_be_kept_packed_are_refused(tmp_path: Path) -> None:
    folder = write_gguf(tmp_path / "m", "Q8_0")
    with pytest.raises(ConfigError, match="has no Q4_0 or Q4_1 tensor to pack"):
        load_torch_engine(config(quantization="gguf"), folder)
    with pytest.raises(ConfigError, match="holds only a GGUF file: set quantization: gguf"):
        load_torch_engine(config(), folder)
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="has 2 GGUF files"):
        gguf_file(folder)
    (folder / "tiny.gguf").unlink()
    (folder / "other.gguf").write_bytes(b"PK")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        check_folder(folder)


def test_loading_the_engine_says_nothing() -> None:
    """transformers imports torchao when it is there, and torchao has a lot to say."""
    pytest.importorskip("torchao")
    code = "from paceline.engine import torch_loader; import torchao.quantization"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
