"""The rows of a tree: each node's logits are those of its own path, whatever else is in the tree.

The paths' logits come from transformers, with its own attention, masks and positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.config import ModelConfig
from paceline.engine.base import StepItem
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.pass_plan import MAX_TILE_ROWS, SequenceRows
from paceline.engine.runner import ModelRunner
from paceline.engine.token_tree import node_paths
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_hf_model, load_torch_engine, probe_model
from paceline.sampling.params import SamplingParams
from tests.unit.engine.conftest import VOCAB_SIZE
from tests.unit.engine.families import save_family
from tests.unit.engine.subjects import dense, tokens
from tests.unit.engine.trees import random_parents

GREEDY = SamplingParams(temperature=0.0)
FAMILIES = ["llama", "qwen2", "qwen2-window", "gemma3", "mistral", "gpt2"]
MAX_LEN, BLOCK_SIZE = 192, 4
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}

Dense = Callable[[Sequence[int]], list[list[float]]]


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Dense]:
    folder = save_family(request.param, tmp_path_factory.mktemp(request.param))
    return folder, dense(folder, VOCAB_SIZE)


def load(folder: Path, **fields: object) -> TorchEngine:
    config = ModelConfig.model_validate(
        {
            "source": str(folder),
            "max_model_len": MAX_LEN,
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": 256,
            "device": "cpu",
            **fields,
        }
    )
    return load_torch_engine(config, folder)


def expected_rows(
    logits: Dense, text: Sequence[int], nodes: Sequence[int], parents: Sequence[int]
) -> torch.Tensor:
    """[1 + nodes, vocab_size]: after `text`, and after each node's path behind it."""
    rows = [logits(text)[-1]]
    for path in node_paths(parents):
        rows.append(logits([*text, *(nodes[node] for node in path)])[-1])
    return torch.tensor(rows)


@settings(max_examples=12, deadline=None)
@example(seed=1, length=9, num_tail=1, num_nodes=1)
@example(seed=2, length=30, num_tail=3, num_nodes=12)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 30),
    num_tail=st.integers(1, 4),
    num_nodes=st.integers(1, 10),
)
def test_a_node_sees_its_path_alone(
    model: tuple[Path, Dense], seed: int, length: int, num_tail: int, num_nodes: int
) -> None:
    folder, logits = model
    engine, rng = load(folder), random.Random(seed)
    mates = {}
    for sequence_id in (1, 2, 3):  # blocks interleave
        engine.add(sequence_id)
        mates[sequence_id] = tokens(seed + sequence_id, length + rng.randint(0, 5))
    for start in range(0, 40, 3):
        parts = [(n, text[start:-1][:3]) for n, text in mates.items()]
        engine.logits([StepItem(n, start, part, 0, GREEDY) for n, part in parts if part])
    trees, expected = [], []
    for sequence_id, text in mates.items():
        parents = random_parents(rng, num_nodes if sequence_id < 3 else 3)
        nodes = tokens(seed - sequence_id, len(parents))
        start = max(0, len(text) - num_tail)
        rows, num_samples = (*text[start:], *nodes), len(nodes) + 1
        trees.append(StepItem(sequence_id, start, rows, num_samples, GREEDY, tree_parents=parents))
        expected.append(expected_rows(logits, text, nodes, parents))
    found = engine.logits(trees)
    torch.testing.assert_close(found, torch.cat(expected), **TOLERANCE)
    # no node is in the cache: the text goes on as if there had been none
    engine.check_integrity()
    for sequence_id, text in mates.items():
        assert engine.cached_len(sequence_id) == len(text)
        after = engine.logits([StepItem(sequence_id, len(text), (7,), 1, GREEDY)])
        torch.testing.assert_close(after, torch.tensor([logits([*text, 7])[-1]]), **TOLERANCE)


@pytest.mark.parametrize("num_tail", [MAX_TILE_ROWS - 3, MAX_TILE_ROWS, MAX_TILE_ROWS + 2])
@pytest.mark.parametrize("num_nodes", [1, 4, 9])
def test_a_tree_over_two_tiles(model: tuple[Path, Dense], num_tail: int, num_nodes: int) -> None:
    folder, logits = model
    engine = load(folder)
    text = tokens(1, num_tail + 6)
    parents, nodes = random_parents(random.Random(5), num_nodes), tokens(2, num_nodes)
    engine.add(1)
    engine.step([StepItem(1, 0, text[:6], 0, GREEDY)])
    item = StepItem(1, 6, (*text[6:], *nodes), num_nodes + 1, GREEDY, tree_parents=parents)
    found = engine.logits([item])
    torch.testing.assert_close(found, expected_rows(logits, text, nodes, parents), **TOLERANCE)


@pytest.mark.parametrize("use_varlen", [False, True])
def test_where_passes_are_padded_or_use_a_kernel_a_tree_runs_as_it_is(
    model: tuple[Path, Dense], use_varlen: bool
) -> None:
    folder, logits = model
    hf_model = load_hf_model(ModelConfig(source="tiny"), folder, torch.device("cpu"))
    probe, _ = probe_model(hf_model)
    runner: ModelRunner = GraphRunner(
        hf_model, probe, 32, BLOCK_SIZE, max_model_len=MAX_LEN, use_varlen=use_varlen
    )
    text, nodes, parents = tokens(3, 21), tokens(4, 5), (-1, -1, 0, 1, 2)
    rows = SequenceRows(0, (*text, *nodes), 6, tuple(range(31, 20, -1)), tree_parents=parents)
    with torch.inference_mode():
        found = runner.forward([rows])[:, :VOCAB_SIZE]
    torch.testing.assert_close(found, expected_rows(logits, text, nodes, parents), **TOLERANCE)
