"""Padded passes, and the paged kernel's call, against the plain runner. No GPU here: the padded
pass runs as it is, and torch's CUDA kernel is stood in for by its documentation."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.config import ModelConfig
from paceline.engine import varlen_attention
from paceline.engine.graph_runner import (
    MAX_GRAPHS,
    GraphRunner,
    Shape,
    pad_rows,
    pick_shape,
)
from paceline.engine.pass_plan import SequenceRows
from paceline.engine.runner import ModelRunner
from paceline.engine.torch_loader import load_hf_model, load_torch_engine, probe_model
from paceline.engine.varlen_attention import kernel_error, try_kernel, varlen_problem
from paceline.errors import ConfigError
from tests.unit.engine.families import VOCAB_SIZE, save_family

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 96, 128
CPU = torch.device("cpu")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(request.param, tmp_path_factory.mktemp(request.param))


def runners(folder: Path, *, use_varlen: bool = False) -> tuple[ModelRunner, GraphRunner]:
    """Two runners of one model, each with its own cache."""
    model = load_hf_model(ModelConfig(source="tiny"), folder, CPU)
    probe, _ = probe_model(model)
    padded = GraphRunner(
        model, probe, NUM_BLOCKS, BLOCK_SIZE, max_model_len=MAX_LEN, use_varlen=use_varlen
    )
    return ModelRunner(model, probe, NUM_BLOCKS, BLOCK_SIZE), padded


class Texts:
    """Growing sequences on shuffled blocks, and the rows of passes over them."""

    def __init__(self, seed: int, num_seqs: int) -> None:
        self.rng = random.Random(seed)
        blocks = self.rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        share = NUM_BLOCKS // num_seqs
        self.blocks = [tuple(blocks[i * share : (i + 1) * share]) for i in range(num_seqs)]
        self.lengths = [0] * num_seqs

    def rows(self, index: int, num_rows: int, num_samples: int, rewind: int = 0) -> SequenceRows:
        start = max(0, self.lengths[index] - rewind)
        self.lengths[index] = start + num_rows
        # id 0 is the padding id, whose keys are all 0: not to be told from an unwritten slot
        ids = tuple(self.rng.choices(range(1, VOCAB_SIZE), k=num_rows))
        return SequenceRows(start, ids, num_samples, self.blocks[index])


def passes(seed: int) -> list[list[SequenceRows]]:
    """Prefill, then decode and verify passes of random sequences, rewinds included."""
    texts = Texts(seed, 4)
    made = [[texts.rows(i, n, 1) for i, n in enumerate((20, 1, 3, 9))]]
    for _ in range(8):
        picked = texts.rng.sample(range(4), texts.rng.randint(1, 4))
        made.append([])
        for index in picked:
            num_rows = texts.rng.randint(1, 5)
            samples = texts.rng.choice((num_rows, 1))
            made[-1].append(texts.rows(index, num_rows, samples, texts.rng.randint(0, 3)))
    return made


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_padded_pass_gives_the_plain_runners_logits(family: Path, seed: int) -> None:
    plain, padded = runners(family)
    with torch.inference_mode():
        # stale cache of others must not leak in: NaN wherever nothing was written
        for pool in (*padded._kv.keys, *padded._kv.values):
            pool.fill_(float("nan"))
        for rows in passes(seed):
            expected = plain.forward(rows)
            torch.testing.assert_close(padded.forward(rows), expected, **TOLERANCE)
    assert len(padded._passes) > 2
    for mine, theirs in zip(padded._kv.keys, plain._kv.keys, strict=True):
        written = theirs.flatten(1).any(dim=1).nonzero().flatten()
        assert 0 < len(written) < len(theirs)
        torch.testing.assert_close(mine[written], theirs[written], **TOLERANCE)
        untouched = mine[: len(theirs)].isnan().all(dim=2).all(dim=1)
        assert int(untouched.sum()) == len(theirs) - len(written)  # pads write to scratch alone


def test_a_copied_block_is_copied_before_a_padded_pass(family: Path) -> None:
    """Block 5 becomes a copy of 9, to which the same pass writes, and 3 a copy of 8."""
    prompt = tuple(range(1, 8))
    forked = [
        SequenceRows(6, (7,), 1, (8, 5), copied_block=9),
        SequenceRows(6, (2, 3), 1, (8, 9)),
        SequenceRows(2, (4,), 1, (3,), copied_block=8),
    ]
    with torch.inference_mode():
        for runner in runners(family):
            [expected] = runner.forward([SequenceRows(0, prompt, 1, (20, 21))])
            runner.forward([SequenceRows(0, prompt, 1, (8, 9))])
            torch.testing.assert_close(runner.forward(forked)[0], expected, **TOLERANCE)
            [other] = runner.forward([SequenceRows(0, (1, 2, 4), 1, (22,))])
            [again] = runner.forward([SequenceRows(2, (4,), 1, (3,))])
            torch.testing.assert_close(again, other, **TOLERANCE)


def test_shapes_are_few_and_hold_the_pass() -> None:
    def rows(start: int, count: int, samples: int = 1) -> SequenceRows:
        return SequenceRows(start, (1,) * count, samples, tuple(range(64)))

    assert pick_shape([rows(0, 1)], 16, 128) == Shape(1, 1, 16)
    assert pick_shape([rows(255, 1)], 16, 128) == Shape(1, 1, 16)
    assert pick_shape([rows(256, 1)], 16, 128) == Shape(1, 1, 32)
    assert pick_shape([rows(600, 5), rows(3, 1), rows(3, 2)], 16, 128) == Shape(4, 6, 64)
    assert pick_shape([rows(1030, 5)], 16, 70) == Shape(1, 6, 70)
    assert pick_shape([rows(0, 16)] * 16, 16, 128) == Shape(16, 16, 16)
    assert pick_shape([rows(0, 4)] * 64, 16, 128) == Shape(64, 4, 16)
    assert pick_shape([rows(0, 16)] * 17, 16, 128) is None
    assert pick_shape([rows(0, 5)] * 64, 16, 128) is None
    assert pick_shape([rows(0, 17)], 16, 128) is None
    assert pick_shape([rows(0, 1)] * 65, 16, 128) == Shape(96, 1, 16)
    assert pick_shape([rows(0, 3)] * 65, 16, 128) is None
    assert pick_shape([rows(0, 1)] * 257, 16, 128) is None
    assert pick_shape([rows(0, 4, samples=0)], 16, 128) is None


def test_padding_touches_only_the_scratch_block() -> None:
    shape = Shape(num_seqs=2, num_rows=3, num_blocks=3)
    item = SequenceRows(5, (11, 12), 2, (7, 9))
    numbers = torch.tensor(pad_rows([item], shape, block_size=4, scratch=20))
    ids, positions, slots, samples, lengths, table = numbers.split(shape.sizes)
    assert ids.tolist() == [0, 11, 12, 0, 0, 0]
    assert positions.tolist() == [0, 5, 6, 0, 0, 0]
    assert slots.tolist() == [80, 9 * 4 + 1, 9 * 4 + 2, 80, 80, 80]
    assert samples.tolist() == [1, 2, 0, 0, 0, 0]
    assert lengths.tolist() == [7, 1]
    assert table.tolist() == [7, 9, 9, 20, 20, 20]


def test_the_number_of_shapes_is_bounded(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_GRAPHS == 64
    monkeypatch.setattr("paceline.engine.graph_runner.MAX_GRAPHS", 1)
    plain, padded = runners(family)
    texts = Texts(1, 2)
    with torch.inference_mode():
        for num_rows in (1, 2, 1, 4):
            rows = [texts.rows(0, num_rows, num_rows)]
            expected = plain.forward(rows)
            torch.testing.assert_close(padded.forward(rows), expected, **TOLERANCE)
    assert list(padded._passes) == [Shape(1, 1, MAX_LEN // BLOCK_SIZE)]


# ---------------------------------------------------------------------------- the paged kernel


def documented_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """What torch says `varlen_attn` computes: `window_size` (left, right) around a row, rows
    aligned with the end of the keys, nothing visible = zeros."""
    assert cu_seq_k is None
    assert num_splits == 1
    for index in (cu_seq_q, seqused_k, block_table):
        assert index.dtype == torch.int32
        assert index.is_contiguous()
    output = torch.zeros(query.shape[0], query.shape[1], value.shape[3], dtype=query.dtype)
    left, right = window_size
    for index, (start, stop) in enumerate(pairwise(cu_seq_q.tolist())):
        length, count = int(seqused_k[index]), stop - start
        assert count <= max_q
        assert length <= max_k == block_table.shape[1] * key.shape[1]
        keys, values = (
            pool[block_table[index].long()].flatten(0, 1)[:length].transpose(0, 1)[None]
            for pool in (key, value)
        )
        row = torch.arange(length - count, length)[:, None]
        position = torch.arange(length)[None]
        is_seen = position <= row + right
        if left >= 0:
            is_seen &= position >= row - left
        attended = F.scaled_dot_product_attention(
            query[start:stop].transpose(0, 1)[None],
            keys,
            values,
            attn_mask=is_seen,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        attended = attended[0].transpose(0, 1)
        output[start:stop] = attended.where(is_seen.any(dim=1)[:, None, None], 0.0)
    return output


@pytest.mark.parametrize("use_graphs", [True, False])
def test_the_kernels_call_means_what_we_mean(
    family: Path, monkeypatch: pytest.MonkeyPatch, use_graphs: bool
) -> None:
    monkeypatch.setattr(varlen_attention, "varlen_attn", documented_varlen_attn)
    plain, paged = runners(family, use_varlen=True)
    paged._use_graphs = use_graphs
    with torch.inference_mode():
        for rows in passes(5):
            expected = plain.forward(rows)
            torch.testing.assert_close(paged.forward(rows), expected, **TOLERANCE)
    assert bool(paged._passes) == use_graphs
    assert all(shape.num_blocks == MAX_LEN // BLOCK_SIZE for shape in paged._passes)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_the_trial_at_start_finds_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    def off_by_one(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> torch.Tensor:
        wider = (window_size[0] + (window_size[0] >= 0), window_size[1])
        return documented_varlen_attn(*args, window_size=wider, **kwargs)

    def unaligned(*args: Any, seqused_k: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return documented_varlen_attn(*args, seqused_k=seqused_k - 1, **kwargs)

    def refusing(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("block_table is not supported")

    trial = ({(2, 8)}, torch.float32, CPU, block_size)
    monkeypatch.setattr(varlen_attention, "varlen_attn", documented_varlen_attn)
    assert kernel_error(2, 8, torch.float32, CPU, block_size, 5) < 1e-5
    assert try_kernel(*trial) is None
    monkeypatch.setattr(varlen_attention, "varlen_attn", unaligned)
    assert "is off by" in str(try_kernel(*trial))
    monkeypatch.setattr(varlen_attention, "varlen_attn", refusing)
    assert try_kernel(*trial) == "refused: block_table is not supported"
    if block_size > 2:  # two blocks are shorter than the window otherwise
        monkeypatch.setattr(varlen_attention, "varlen_attn", off_by_one)
        assert "(window 5)" in str(try_kernel(*trial))


def test_the_kernel_is_not_used_where_it_cannot_work(family: Path) -> None:
    assert varlen_problem({(2, 8)}, torch.bfloat16, CPU, 16) == "it needs a CUDA device, not cpu"
    cuda = torch.device("cuda")
    assert "float16 or bfloat16" in str(varlen_problem({(2, 8)}, torch.float32, cuda, 16))
    assert "multiple of 8" in str(varlen_problem({(2, 12)}, torch.bfloat16, cuda, 16))
    model = ModelConfig(source="tiny", max_model_len=64, device="cpu", attention_backend="varlen")
    with pytest.raises(ConfigError, match="varlen cannot be used here: it needs a CUDA device"):
        load_torch_engine(model, family)
    engine = load_torch_engine(model.model_copy(update={"attention_backend": "auto"}), family)
    assert type(engine._runner) is ModelRunner


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["sdpa", "auto"])
def test_captured_passes_on_a_gpu(family: Path, backend: str) -> None:
    fields = {"source": "tiny", "dtype": "bfloat16", "device": "cuda", "block_size": BLOCK_SIZE}
    fields |= {"num_kv_blocks": NUM_BLOCKS, "max_model_len": MAX_LEN, "attention_backend": backend}
    captured = load_torch_engine(ModelConfig(**fields), family)._runner
    eager = load_torch_engine(
        ModelConfig(**{**fields, "enforce_eager": True, "attention_backend": "sdpa"}), family
    )._runner
    assert isinstance(captured, GraphRunner)
    with torch.inference_mode():
        for rows in [*passes(1), *passes(1)]:
            expected = eager.forward(rows).float()
            torch.testing.assert_close(
                captured.forward(rows).float(), expected, rtol=0.05, atol=0.3
            )
    assert any(static.graph is not None for static in captured._passes.values())
