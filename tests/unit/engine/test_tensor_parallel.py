"""Two ranks over gloo, this process being rank 0, against the same model in one process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from paceline.engine import tensor_parallel as tp
from paceline.engine.base import EngineBroken, StepItem
from paceline.engine.draft_head import DRAFT_VOCAB
from paceline.engine.loader import load_engine
from paceline.engine.pass_plan import SequenceRows
from paceline.errors import ConfigError
from paceline.sampling.params import SamplingParams
from tests.unit.engine.conftest import VOCAB_SIZE, save_tiny
from tests.unit.engine.families import save_family
from tests.unit.engine.ranks import LOOPBACK, alone, config, needs_no_gpu, two_ranks

pytestmark = needs_no_gpu

GREEDY = SamplingParams(temperature=0.0)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


# -- plans on the wire --------------------------------------------------------------------------

numbers = st.integers(0, 2**31 - 1)
rows = st.builds(
    SequenceRows,
    start=numbers,
    token_ids=st.lists(numbers, min_size=1, max_size=9).map(tuple),
    num_samples=st.integers(0, 9),
    blocks=st.lists(numbers, max_size=9).map(tuple),
    copied_block=st.none() | numbers,
    tree_parents=st.lists(st.integers(-1, 63), max_size=9).map(tuple),
)


@given(st.lists(rows, max_size=6))
def test_rows_survive_packing(items: list[SequenceRows]) -> None:
    assert tp.unpack(tp.pack_rows(items)) == items


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6))
def test_moves_survive_packing(slots: list[tuple[int, int]]) -> None:
    assert tp.unpack(tp.pack_moves(slots)) == tp.Moves(slots)


# -- equal to one process -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tp"), initializer_range=0.1)


def passes() -> list[list[StepItem]]:
    """Prefill, decode and verify rows mixed, rewinds with other tokens, a pass without samples."""
    random = SamplingParams(temperature=0.8, seed=11)

    def ids(seed: int, length: int) -> tuple[int, ...]:
        return tuple((seed * 31 + 7 * i) % VOCAB_SIZE for i in range(length))

    return [
        [StepItem(1, 0, ids(1, 150), 0, GREEDY)],
        [StepItem(1, 150, ids(2, 1), 1, GREEDY), StepItem(2, 0, ids(3, 40), 1, random)],
        [
            StepItem(1, 151, ids(4, 5), 5, GREEDY, 1),
            StepItem(2, 40, ids(5, 3), 3, random, 1),
            StepItem(3, 0, ids(6, 9), 9, random),
        ],
        [StepItem(1, 152, ids(7, 4), 4, random, 2), StepItem(2, 12, ids(8, 6), 6, GREEDY, 0)],
        [StepItem(n, start, ids(n, 1), 1, random, 9) for n, start in ((1, 156), (2, 18), (3, 9))],
    ]


# 3 x (950 tokens + 475 blocks) are more than MESSAGE_WORDS.
OVERSIZE = [StepItem(n, 0, tuple(range(95)) * 10, 1, GREEDY) for n in (11, 12, 13)]


def test_two_ranks_equal_one(folder: Path) -> None:
    one, reference = alone(folder), alone(folder)
    with two_ranks(folder) as two:
        for engine in (one, reference, two.engine):
            for sequence_id in (1, 2, 3, 11, 12, 13):
                engine.add(sequence_id)
        sampled = 0
        for items in [*passes(), OVERSIZE]:
            logits = two.engine.logits(items)
            torch.testing.assert_close(logits, reference.logits(items), **TOLERANCE)
            # The same pass once more: a rewind to where it began.
            tokens = two.engine.step(items)
            assert tokens == one.step(items)
            sampled += sum(len(result.token_ids) for result in tokens)
        for engine in (reference, two.engine):
            engine.add(20)
        fork = [StepItem(20, 11, (3,), 1, GREEDY, fork_of=1)]  # half of a block is copied
        torch.testing.assert_close(two.engine.logits(fork), reference.logits(fork), **TOLERANCE)
        assert sampled == sum(item.num_samples for items in [*passes(), OVERSIZE] for item in items)
        assert two.engine._runner._runner._kv.keys[0].shape[1] == 1  # half of the KV heads each
        two.engine.check_integrity()
        two.runner.close()
        two.other.join(timeout=10)
        assert two.other.exitcode == 0


def test_trees_are_verified_on_all_ranks(folder: Path) -> None:
    one = alone(folder)
    prompt, sampling = tuple(range(9)), SamplingParams(temperature=0.8, seed=3)
    with two_ranks(folder) as two:
        for engine in (one, two.engine):
            engine.add(1)
        [first] = one.step([StepItem(1, 0, (*prompt, 1), 1, sampling)])
        true = first.token_ids[0]
        rows, parents = (*prompt, 1, 50, true, 60), (-1, -1, 0)  # the second node is accepted
        tree = StepItem(1, 0, rows, 4, sampling, tree_parents=parents)
        [result] = two.engine.step([tree])
        assert (result.num_accepted, result.cached_len) == (1, 11)
        assert [result] == one.step([tree])
        after = [StepItem(1, 11, result.token_ids[-1:], 1, sampling)]
        torch.testing.assert_close(two.engine.logits(after), one.logits(after), **TOLERANCE)


def test_the_oversize_pass_is_one() -> None:
    words = tp.pack_rows([SequenceRows(0, item.token_ids, 1, (0,) * 475) for item in OVERSIZE])
    assert len(words) > tp.MESSAGE_WORDS


def test_qwen2_with_biases_and_a_cut_output_layer(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path, initializer_range=0.1)
    kept = list(range(0, VOCAB_SIZE, 3))
    (tmp_path / DRAFT_VOCAB).write_text(json.dumps(kept), encoding="utf-8")
    item = StepItem(1, 0, tuple(range(30)), 30, GREEDY)
    one = alone(tmp_path)
    one.add(1)
    with two_ranks(tmp_path) as two:
        two.engine.add(1)
        logits = two.engine.logits([item])
        torch.testing.assert_close(logits, one.logits([item]), **TOLERANCE)
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "mixtral"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Norms over heads, sliding windows, fused projections, experts."""
    save_family(family, tmp_path, initializer_range=0.1, num_key_value_heads=2)
    fields = {"max_model_len": 256}
    items = [StepItem(1, 0, tuple(range(30)), 30, GREEDY), StepItem(1, 25, (7, 8, 9), 3, GREEDY)]
    one = alone(tmp_path, **fields)
    one.add(1)
    with two_ranks(tmp_path, **fields) as two:
        two.engine.add(1)
        for item in items:
            logits = two.engine.logits([item])
            torch.testing.assert_close(logits, one.logits([item]), **TOLERANCE)


# -- broken groups ------------------------------------------------------------------------------


def test_a_killed_rank_breaks_the_engine_at_once_and_for_good(folder: Path) -> None:
    # Longer than this test may take: the death itself has to be noticed.
    with two_ranks(folder, tensor_parallel_timeout_s=600.0) as two:
        two.engine.add(1)
        two.engine.step([StepItem(1, 0, (1, 2, 3), 1, GREEDY)])
        os.kill(two.other.pid or 0, signal.SIGKILL)
        two.other.join()
        with pytest.raises(EngineBroken, match="failed"):
            two.engine.step([StepItem(1, 3, (4,), 1, GREEDY)])
        with pytest.raises(EngineBroken, match="lost before"):
            two.engine.step([StepItem(1, 3, (4,), 1, GREEDY)])
        assert two.engine.cached_len(1) == 3
        two.runner.close()  # does not talk to a dead rank


def test_a_stopped_rank_breaks_the_engine_after_the_timeout(folder: Path) -> None:
    with two_ranks(folder, tensor_parallel_timeout_s=1.0) as two:
        two.engine.add(1)
        os.kill(two.other.pid or 0, signal.SIGSTOP)
        with pytest.raises(EngineBroken):
            two.engine.step([StepItem(1, 0, (1, 2, 3), 1, GREEDY)])


def test_a_rank_that_fails_a_pass_ends_and_breaks_the_engine(folder: Path) -> None:
    with two_ranks(folder, other_blocks=2) as two:
        two.engine.add(1)
        with pytest.raises(EngineBroken):
            two.engine.step([StepItem(1, 0, tuple(range(20)), 1, GREEDY)])
        two.other.join(timeout=10)
        assert two.other.exitcode == 1


# -- refusals -----------------------------------------------------------------------------------


def test_one_process_alone_refuses_a_shared_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Serve replica"):
        load_engine(config(folder), folder)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="gpt2: transformers has no tensor parallel plan"):
        tp.check_folder(config(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 4}, "4 attention heads and 2 KV heads cannot be shared"),
        ({"tensor_parallel_size": 3}, "cannot be shared by tensor_parallel_size 3"),
        ({"quantization": "int8"}, "quantization int8 does not work"),
        ({"device": "mps"}, "ranks use the first device that they see"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    tp.check_shardable(config(folder), AutoConfig.from_pretrained(folder))
    with pytest.raises(ConfigError, match=message):
        tp.check_shardable(config(folder, **fields), AutoConfig.from_pretrained(folder))


def test_interface_of_an_address() -> None:
    assert tp.interface_of(LOOPBACK) == "lo"
    assert tp.interface_of("203.0.113.7") is None
