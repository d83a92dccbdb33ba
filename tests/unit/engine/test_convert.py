from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.convert import convert_gguf, prune_layers
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.sampling.params import SamplingParams

PROMPT = [5, 90, 33, 2, 71]
GREEDY = SamplingParams(temperature=0.0)
WORDS = ["<|endoftext|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "ĠĠ"]


def test_pruning_equals_leaving_the_layers_out(model_folder: Path, tmp_path: Path) -> None:
    out = prune_layers(model_folder, [0, 2], tmp_path / "pruned")
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    engine = load_torch_engine(ModelConfig(source="x", max_model_len=64, device="cpu"), out)
    engine.add(1)
    logits = engine.logits([StepItem(1, 0, tuple(PROMPT), 5, GREEDY)])
    whole = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager").eval()
    del whole.model.layers[1]
    with torch.inference_mode():
        dense = whole(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, dense, rtol=1e-4, atol=1e-4)
    assert (out / "tokenizer.json").read_bytes() == (model_folder / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").is_file()


def test_pruning_keeps_tied_weights_tied_and_drops_no_other(
    llama_folder: Path, tmp_path: Path
) -> None:
    before = set(load_file(llama_folder / "model.safetensors"))
    after = set(load_file(prune_layers(llama_folder, [1], tmp_path) / "model.safetensors"))
    assert "lm_head.weight" not in after
    assert after == {name for name in before if not name.startswith("model.layers.")} | {
        name for name in before if name.startswith("model.layers.0.")
    }


@pytest.mark.parametrize("keep", [[], [0, 0], [0, 3], [-1]])
def test_layers_that_are_not_there_are_refused(
    llama_folder: Path, tmp_path: Path, keep: list[int]
) -> None:
    with pytest.raises(ConfigError, match=r"distinct and in \[0, 3\)"):
        prune_layers(llama_folder, keep, tmp_path)
    assert list(tmp_path.iterdir()) == []


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, *[1] * (len(WORDS) - 2)])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if tensor.ndim == 2 else None
        data = tensor if kind is None else gguf.quants.quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_tensors() -> dict[str, np.ndarray]:
    shapes = {
        "token_embd.weight": (len(WORDS), 64),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_gate.weight": (32, 64),
        "blk.0.ffn_up.weight": (32, 64),
        "blk.0.ffn_down.weight": (64, 32),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "output_norm.weight": (64,),
    }
    rng = np.random.default_rng(3)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_gguf_file_becomes_a_folder_that_loads(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_gguf(tmp_path / "tiny.gguf", tensors)
    out = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32")
    saved = load_file(out / "model.safetensors")
    quantized = gguf.quants.quantize(
        tensors["blk.0.ffn_down.weight"], gguf.GGMLQuantizationType.Q4_1
    )
    exact = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q4_1)
    assert torch.equal(saved["model.layers.0.mlp.down_proj.weight"], torch.tensor(exact))
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    engine = load_torch_engine(ModelConfig(source="x", max_model_len=64, device="cpu"), out)
    assert (engine.info.vocab_size, engine.info.eos_token_ids) == (len(WORDS), (1,))
    tokenizer = AutoTokenizer.from_pretrained(out)
    # every digit on its own, and the spaces in front of it stay together
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_bfloat16_is_written_when_asked_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", random_tensors())
    out = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="bfloat16")
    kinds = {tensor.dtype for tensor in load_file(out / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}


def test_a_gguf_file_without_all_weights_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["blk.0.ffn_up.weight"]
    write_gguf(tmp_path / "tiny.gguf", tensors)
    with pytest.raises(ConfigError, match="up_proj"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", dtype="float32")
    with pytest.raises(ConfigError, match="does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out", dtype="float32")
