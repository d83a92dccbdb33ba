from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3TextConfig, MistralConfig

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import StepItem
from paceline.engine.loader import load_engine
from paceline.engine.paged_attention import ShapeProbe
from paceline.engine.timed import TimedEngine
from paceline.engine.torch_loader import (
    check_windows,
    folder_grammars,
    load_torch_engine,
    pick_device,
)
from paceline.engine.toy import ToyEngine
from paceline.errors import ConfigError
from paceline.generation import GenerateRequest
from paceline.models import tokenizer_hash
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.e2e.structured import save_tokenizer
from tests.unit.engine.conftest import save_tiny, write_tokenizer

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(**{"source": "tiny", "max_model_len": 64, "device": "cpu", **fields})


def edited(folder: Path, out: Path, **changes: Any) -> Path:
    """A copy of a model folder with another config.json."""
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (out / "config.json").write_text(json.dumps({**data, **changes}), encoding="utf-8")
    return out


def test_toy_sources_need_no_folder() -> None:
    engine = load_engine(ModelConfig(toy_error_rate=0.5))
    assert isinstance(engine, ToyEngine)
    assert (engine.info.vocab_size, engine.info.eos_token_ids) == (257, (256,))
    assert (engine.info.max_model_len, engine.info.num_blocks) == (2048, 1024)
    timed = load_engine(ModelConfig(source="timed", toy_step_ms=1.0))
    assert isinstance(timed, TimedEngine)


def test_a_torch_engine_says_what_it_loaded(llama_folder: Path) -> None:
    engine = load_engine(config(num_kv_blocks=9, block_size=8), llama_folder)
    info = engine.info
    assert (info.model_id, info.vocab_size, info.max_model_len) == ("tiny", 101, 64)
    assert (info.block_size, info.num_blocks) == (8, 9)
    assert info.tokenizer_hash == tokenizer_hash(llama_folder)
    assert info.eos_token_ids == (2,)


def test_bfloat16_weights_and_cache(llama_folder: Path) -> None:
    engine = load_torch_engine(config(dtype="bfloat16"), llama_folder)
    engine.add(1)
    greedy = SamplingParams(temperature=0.0)
    logits = engine.logits([StepItem(1, 0, (5, 6, 7), 2, greedy)])
    assert logits.dtype == torch.bfloat16
    assert logits.shape == (2, 101)
    assert engine._runner._kv.keys[0].dtype == torch.bfloat16


def test_a_draft_engine_gets_the_noise_shortcut(llama_folder: Path) -> None:
    engine = load_torch_engine(config(), llama_folder, draft_top_n=64)
    engine.add(1)
    [result] = engine.step([StepItem(1, 0, (5,), 1, SamplingParams(temperature=1.0))])
    assert len(result.token_ids) == 1


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, [5, 6], (5, 6)),
        (None, None, ()),
        (None, 4, (4,)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    llama_folder: Path, tmp_path: Path, eos: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    folder = edited(llama_folder, tmp_path, eos_token_id=eos)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        data = json.dumps({"eos_token_id": generation})
        (folder / "generation_config.json").write_text(data, encoding="utf-8")
    assert load_engine(config(), folder).info.eos_token_ids == expected


def test_grammars_need_a_tokenizer_that_can_be_read_and_an_eos(
    llama_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without them the model is served all the same, and the log says why."""
    assert load_engine(ModelConfig()).info.has_grammars
    vocab_size = save_tokenizer(tmp_path)
    grammars = folder_grammars(tmp_path, vocab_size, (0, 2))
    assert grammars is not None
    assert (grammars.vocab_size, grammars.eos_token_ids) == (vocab_size, (0, 2))
    assert caplog.messages == []
    assert folder_grammars(tmp_path, vocab_size, ()) is None
    assert not load_engine(config(), llama_folder).info.has_grammars
    assert "names no EOS id" in caplog.messages[0]
    assert "no structured output with this model: " in caplog.messages[-1]


def test_a_layer_that_forgets_its_window_is_refused() -> None:
    """transformers itself would apply the window by a mask, which we never see."""
    mistral = MistralConfig(**TINY, sliding_window=8)
    check_windows(mistral, ShapeProbe(windows={0: 8, 1: 8}))
    for windows in ({0: None, 1: None}, {0: 8, 1: 9}):
        with pytest.raises(ConfigError, match=r"layer . attends over a window of .* says 8"):
            check_windows(mistral, ShapeProbe(windows=windows))
    kinds = ["full_attention", "sliding_attention"]
    gemma = Gemma3TextConfig(**TINY, sliding_window=8, layer_types=kinds)
    check_windows(gemma, ShapeProbe(windows={0: None, 1: 8}))
    with pytest.raises(ConfigError, match=r"layer 0 attends over a window of 8 .* says None"):
        check_windows(gemma, ShapeProbe(windows={0: 8, 1: 8}))


@pytest.mark.parametrize(
    ("num_ids", "num_added", "vocab_size"),
    [(100, 0, 100), (100, 3, 100), (101, 0, 101), (102, 1, 101), (105, 4, 101)],
)
def test_padding_of_the_output_layer_is_no_vocabulary(
    llama_folder: Path, tmp_path: Path, num_ids: int, num_added: int, vocab_size: int
) -> None:
    """Of 101 rows, only those count that the tokenizer has an id for."""
    folder = edited(llama_folder, tmp_path)
    write_tokenizer(folder, num_ids, num_added)
    assert load_engine(config(), folder).info.vocab_size == vocab_size


def test_a_tokenizer_of_another_model_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    folder = edited(llama_folder, tmp_path)
    write_tokenizer(folder, 102)
    with pytest.raises(ConfigError, match="has 102 token ids but the model only 101 rows"):
        load_engine(config(), folder)


def test_an_end_that_cannot_be_sampled_is_no_end(llama_folder: Path, tmp_path: Path) -> None:
    folder = edited(llama_folder, tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 99, 100]}')
    write_tokenizer(folder, 100)
    assert load_engine(config(), folder).info.eos_token_ids == (2, 99)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {},
        {"model": {"vocab": {}}},
        {"model": {"vocab": {"a": "0"}}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": True}}},
        {"model": {"vocab": 7}},
        {"model": {"vocab": [[]]}},
        {"model": []},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1.5, "content": "b"}]},
    ],
)
def test_tokenizers_without_usable_ids_are_refused(
    llama_folder: Path, tmp_path: Path, tokenizer: dict[str, Any]
) -> None:
    folder = edited(llama_folder, tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no usable token ids|no tokenizer file"):
        load_engine(config(), folder)


@pytest.mark.parametrize("sampling", [0.0, 1.5], ids=["greedy", "coupled"])
def test_differently_padded_models_of_one_tokenizer_work_together(
    tmp_path: Path, sampling: float
) -> None:
    """Output layers of 104 and 100 columns, 100 real ids: padding is never emitted or proposed."""
    folders = {}
    for width in (104, 100):
        folders[width] = save_tiny("llama", tmp_path / str(width), vocab_size=width)
        write_tokenizer(folders[width], 100, 2)
    params = SamplingParams(temperature=sampling, seed=5)
    requests = [
        GenerateRequest(f"r{i}", (7, 8, 9 + i), 40, params, ignore_eos=True) for i in range(3)
    ]

    def run(draft: Path | None) -> list[list[int]]:
        target = load_torch_engine(config(), folders[104])
        engine = None if draft is None else load_torch_engine(config(), draft)
        assert engine is None or engine.info.vocab_size == target.info.vocab_size == 100
        runs = Loopback(target, engine, SpeculationConfig()).run(requests)
        assert draft is None or sum(run.num_draft_tokens for run in runs) > 0
        return [run.token_ids for run in runs]

    alone = run(None)
    assert alone == run(folders[100]) == run(folders[104])
    assert max(token for text in alone for token in text) < 100


def test_soft_capping_is_refused(tmp_path: Path) -> None:
    gemma = Gemma2Config(**TINY, layer_types=["full_attention"] * 2)
    Gemma2ForCausalLM(gemma).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="soft-capping"):
        load_engine(config(), tmp_path)


def test_a_context_beyond_the_model_is_refused_with_the_limit(llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match="set max_model_len to at most 1024"):
        load_engine(config(max_model_len=1025), llama_folder)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_ropes_that_change_with_length_are_held_below_the_change(
    llama_folder: Path, tmp_path: Path, rope_type: str
) -> None:
    rope = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    folder = edited(llama_folder, tmp_path, rope_parameters=rope)
    with pytest.raises(ConfigError, match="set max_model_len to at most 32"):
        load_engine(config(max_model_len=33), folder)


def test_folders_that_are_no_model_are_refused_with_a_sentence(
    llama_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_engine(config(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no .safetensors file"):
        load_engine(config(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot read"):
        load_engine(config(), tmp_path)
    with pytest.raises(ConfigError, match="needs a folder"):
        load_engine(config(), None)


def test_damaged_or_absent_weights_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    folder = edited(llama_folder, tmp_path, num_hidden_layers=4)
    with pytest.raises(ConfigError, match="lacks weights that its config"):
        load_engine(config(), folder)
    edited(llama_folder, tmp_path, intermediate_size=64)
    with pytest.raises(ConfigError, match=r"cannot load|lacks weights"):
        load_engine(config(), folder)
    (folder / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="cannot load"):
        load_engine(config(), folder)


def test_code_in_a_model_folder_is_not_run(llama_folder: Path, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.Evil"}
    folder = edited(llama_folder, tmp_path, model_type="evil", auto_map=auto_map)
    (folder / "evil.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot read"):
        load_engine(config(), folder)


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(mamba).save_pretrained(tmp_path)
    with pytest.raises(ConfigError):
        load_engine(config(), tmp_path)


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="not a torch device"):
        pick_device("abacus")
