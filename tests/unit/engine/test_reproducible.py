"""A token's logits are the same bits, whatever else is in the pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.config import ModelConfig, SpeculationConfig
from paceline.engine.base import StepItem
from paceline.engine.reproducible import TILE_ROWS
from paceline.engine.token_tree import node_paths
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_torch_engine
from paceline.errors import ConfigError
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from paceline.testing.loopback import Loopback
from tests.e2e import matrix
from tests.unit.engine.conftest import VOCAB_SIZE, save_tiny
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


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_tree_changes_no_bit_of_its_paths(tmp_path: Path, family: str) -> None:
    folder = save_family(family, tmp_path)
    engine = load(folder, "bfloat16", "int8", max_model_len=128, block_size=4)
    text, nodes, parents = TEXT[:13], (5, 6, 7, 8, 9, 5), (-1, 0, -1, 1, 2, 4)
    for sequence_id in (1, 2):
        engine.add(sequence_id)
        engine.step([StepItem(sequence_id, 0, text[:-1], 0, GREEDY)])
    tree = StepItem(1, 12, (text[-1], *nodes), 7, GREEDY, tree_parents=parents)
    mate = StepItem(3, 0, TEXT[:9], 1, GREEDY)
    engine.add(3)
    found = engine.logits([mate, tree])[1:]
    for node, path in enumerate(node_paths(parents)):
        for depth, token_id in enumerate((text[-1], *(nodes[step] for step in path))):
            alone = engine.logits([StepItem(2, 12 + depth, (token_id,), 1, GREEDY)])
        assert torch.equal(found[node + 1 : node + 2], alone)


def test_what_is_kept_of_a_tree_has_the_bits_of_decoding(model_folder: Path) -> None:
    engine = load(model_folder, "bfloat16", "none", block_size=4, enable_prefix_caching=False)
    for sequence_id in (1, 2):
        engine.add(sequence_id)
        engine.step([StepItem(sequence_id, 0, TEXT[:12], 0, GREEDY)])
    text = list(TEXT[:13])
    for _ in range(9):
        start = len(text) - 1
        [alone] = engine.step([StepItem(1, start, (text[-1],), 1, GREEDY)])
        wrong, right = (alone.token_ids[0] + 1) % VOCAB_SIZE, alone.token_ids[0]
        rows = (text[-1], wrong, 5, right, 6)
        tree = StepItem(1, start, rows, 5, GREEDY, tree_parents=(-1, 0, -1, 2))
        [result] = engine.step([tree])
        assert (result.num_accepted or 0) >= 1
        text += result.token_ids
    engine.logits([StepItem(2, 12, tuple(text[12:-1]), 0, GREEDY)])
    last = [StepItem(n, len(text) - 1, (text[-1],), 1, GREEDY) for n in (1, 2)]
    assert torch.equal(engine.logits(last[:1]), engine.logits(last[1:]))


def test_a_pass_may_have_rows_and_no_sample(model_folder: Path) -> None:
    engine = load(model_folder, "bfloat16", "none")
    engine.add(1)
    assert engine.step([StepItem(1, 0, TEXT, 1, GREEDY, max_rows=20)])[0].cached_len == 20


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
