"""A token's logits are the same bits, whatever else is in the pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import StepItem
from paceline.engine.reproducible import TILE_ROWS
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.e2e import matrix
from tests.unit.engine.conftest import save_tiny
from tests.unit.engine.families import save_family

GREEDY = SamplingParams(temperature=0.0)
TEXT = tuple((5 * i + 2) % 100 for i in range(60))
WEIGHTS = [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8")]


def load(folder: Path, dtype: str, quantization: str, **changes: object) -> TorchEngine:
    config = ModelConfig.model_validate(
        {
            "source": str(folder),
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": 512,
            "reproducible": True,
            **changes,
        }
    )
    return load_torch_engine(config, folder)


def row_by_row(engine: TorchEngine, sequence_id: int) -> torch.Tensor:
    """Logits of every position of TEXT, one row a pass."""
    engine.add(sequence_id)
    rows = [
        engine.logits([StepItem(sequence_id, start, (token_id,), 1, GREEDY)])
        for start, token_id in enumerate(TEXT)
    ]
    engine.free(sequence_id)
    return torch.cat(rows)


@pytest.mark.parametrize(("dtype", "quantization"), WEIGHTS)
def test_blocks_chunks_and_batch_mates_change_no_bit(
    model_folder: Path, dtype: str, quantization: str
) -> None:
    engine = load(model_folder, dtype, quantization, enable_prefix_caching=False)
    alone = row_by_row(engine, 1)
    engine.add(1)
    whole = engine.logits([StepItem(1, 0, TEXT, len(TEXT), GREEDY)])
    assert torch.equal(whole, alone)
    for start, num_rows in ((7, 5), (20, TILE_ROWS), (30, TILE_ROWS + 1), (59, 1)):
        rows = TEXT[start : start + num_rows]
        engine.add(2)
        mates = [StepItem(2, 0, TEXT[:33], 1, GREEDY)]
        verified = engine.logits([*mates, StepItem(1, start, rows, num_rows, GREEDY)])[1:]
        assert torch.equal(verified, alone[start : start + num_rows])
        engine.logits([StepItem(1, start, TEXT[start:], 1, GREEDY)])
        engine.free(2)


@pytest.mark.parametrize(("dtype", "quantization"), WEIGHTS)
def test_a_prefix_hit_changes_no_bit(model_folder: Path, dtype: str, quantization: str) -> None:
    engine = load(model_folder, dtype, quantization)
    alone = row_by_row(engine, 1)  # fills the prefix cache, too
    engine.add(2)
    hit = engine.logits([StepItem(2, 0, TEXT, 1, GREEDY)])
    assert engine.stats().num_prefix_tokens >= 32
    assert torch.equal(hit, alone[-1:])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("dtype", "quantization"), WEIGHTS)
def test_the_same_bytes_with_any_draft(
    tmp_path: Path, dtype: str, quantization: str, temperature: float
) -> None:
    """Log-probabilities, too: exactly, not nearly."""
    weights = matrix.save_model(tmp_path / "target", seed=1)
    target = load(weights, dtype, quantization)
    drafts = [None, load(weights, dtype, quantization), load(weights, "bfloat16", "none")]
    requests = [
        matrix.request(str(seed), temperature, max_tokens=40, seed=seed, num_logprobs=2)
        for seed in range(4)
    ]
    answers = [_answers(target, draft, requests, k) for draft in drafts for k in (1, 4, 8)]
    assert all(answer == answers[0] for answer in answers)


def _answers(
    target: TorchEngine,
    draft: TorchEngine | None,
    requests: list[GenerateRequest],
    draft_tokens: int,
) -> list[object]:
    loopback = Loopback(target, draft, SpeculationConfig(num_speculative_tokens=draft_tokens))
    return [
        (run.token_ids, [entry for delta in run.deltas for entry in delta.logprobs])
        for run in loopback.run(requests)
    ]


def test_other_matrices_are_refused(tmp_path: Path) -> None:
    folder = save_family("gpt2", tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="Conv1D"):
        load(folder, "float32", "none", max_model_len=128)


def test_the_mode_makes_a_difference(tmp_path: Path) -> None:
    """Without it, some of these bits do differ: the tests above test something."""
    folder = save_tiny("llama", tmp_path, hidden_size=256, intermediate_size=512)
    engine = load(folder, "bfloat16", "none", reproducible=False, enable_prefix_caching=False)
    alone = row_by_row(engine, 1)
    engine.add(1)
    assert not torch.equal(engine.logits([StepItem(1, 0, TEXT, len(TEXT), GREEDY)]), alone)
