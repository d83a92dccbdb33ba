"""Medusa heads beside a real model: which candidates they name, for which place, at what price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.config import ModelConfig
from paceline.engine import toy_rules
from paceline.engine.base import Propose, StepItem, StepResult, Verify
from paceline.engine.checks import MAX_HEAD_CANDIDATES
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.loader import load_engine
from paceline.engine.medusa import HEAD_TOP_N, HeadRow, rank_rows, read_heads
from paceline.engine.packed import pack_int8, unpack
from paceline.engine.pass_plan import SequenceRows
from paceline.engine.step_rows import deciding_row, head_sampling
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.torch_loader import load_hf_model, load_runner, probe_model
from paceline.engine.toy_rules import ToyRow
from paceline.errors import ConfigError, LocalProtocolError
from paceline.sampling.params import SamplingParams, VerificationMode
from tests.unit.engine.conftest import VOCAB_SIZE, save_tiny
from tests.unit.engine.medusa_heads import (
    load_medusa,
    output_layer,
    random_heads,
    rolled_heads,
    save_heads,
    save_pickled,
)
from tests.unit.engine.subjects import COUPLED, EVERYTHING, GREEDY, dense, law_around, tokens

FILTERED = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, seed=5, choice=1)
SMALL_VOCAB = [*range(3, 40), 60, 99]


def load(base: Path, medusa: Path | str = "", **fields: Any) -> TorchEngine:
    model = {"max_model_len": 256, "block_size": 4, "num_kv_blocks": 256, "device": "cpu"}
    config = ModelConfig(source=str(base), **{**model, **fields})
    engine = load_engine(config, base, medusa=str(medusa))
    assert isinstance(engine, TorchEngine)
    return engine


@pytest.fixture(scope="module")
def rolled(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    return save_heads(folder, rolled_heads(llama_folder))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return save_heads(folder, random_heads(3, 2, SMALL_VOCAB), medusa_num_layers=2)


def decided(engine: TorchEngine, item: StepItem, text: Sequence[int]) -> StepResult:
    """The item's result after a text that is in the cache."""
    engine.add(item.sequence_id)
    if text:
        engine.step([StepItem(item.sequence_id, 0, tuple(text), 0, item.sampling)])
    [result] = engine.step([item])
    return result


def rolled_candidates(
    row: Sequence[float], sampling: SamplingParams, first_index: int, count: int
) -> tuple[tuple[int, ...], ...]:
    """What `rolled_heads` name where the target's logits are `row`, in plain Python: the best of
    the HEAD_TOP_N most likely ids."""
    found = []
    least = sorted(row)[-HEAD_TOP_N]
    row = [logit if logit >= least else float("-inf") for logit in row]
    for head in range(3):
        logits = [row[(token_id - head - 1) % len(row)] for token_id in range(len(row))]
        toy_row = ToyRow(logits, head_sampling(sampling), first_index + head)
        found.append(toy_rules.best_tokens(toy_row, count))
    return tuple(found)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, FILTERED], ids=["greedy", "T", "filters"])
def test_a_published_checkpoint(
    llama_folder: Path, tmp_path: Path, suffix: str, sampling: SamplingParams
) -> None:
    """Head h names the target's own candidates, moved by h + 1 ids."""
    save = save_heads if suffix == "safetensors" else save_pickled
    tensors = rolled_heads(llama_folder)
    if suffix == "pt":  # as some exports name them
        tensors = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    engine = load(llama_folder, save(tmp_path / "heads", tensors, medusa_num_heads=3))
    assert engine.info.num_heads == 3
    text = tokens(1, 17)
    item = StepItem(1, 16, text[16:], 1, sampling, output_index=4, num_head_candidates=5)
    result = decided(engine, item, text[:16])
    row = dense(llama_folder, VOCAB_SIZE)(text)[-1]
    assert result.head_token_ids == rolled_candidates(row, sampling, 5, 5)
    if sampling == GREEDY:
        best = sorted(range(VOCAB_SIZE), key=lambda i: (-row[i], i))[:5]
        expected = [tuple((i + head + 1) % VOCAB_SIZE for i in best) for head in range(3)]
        assert list(result.head_token_ids) == expected
        assert result.token_ids == (best[0],)


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED, EVERYTHING], ids=["greedy", "T", "all"])
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_behind_what_is_accepted_of_a_chain(
    llama_folder: Path, rolled: Path, num_right: int, sampling: SamplingParams
) -> None:
    """The heads look at the row that decides the last committed token, not at the last row."""
    engine, text = load(llama_folder, rolled), tokens(2, 12)
    committed: list[int] = []
    engine.add(7)
    engine.step([StepItem(7, 0, text[:-1], 0, sampling)])
    for index in range(4):
        ids = (text[-1], *committed)[-1:]
        step = StepItem(7, 11 + index, ids, 1, sampling, output_index=index)
        committed.append(engine.step([step])[0].token_ids[0])
    proposals = committed[:num_right] + [(i + 1) % VOCAB_SIZE for i in committed[num_right:3]]
    item = StepItem(8, 11, (text[-1], *proposals), 4, sampling, num_head_candidates=3)
    result = decided(engine, item, text[:-1])
    assert result.token_ids[: num_right + 1] == tuple(committed[: num_right + 1])
    row = dense(llama_folder, VOCAB_SIZE)([*text, *committed[:num_right]])[-1]
    assert result.head_token_ids == rolled_candidates(row, sampling, num_right + 1, 3)


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
def test_behind_what_is_accepted_by_laws(
    llama_folder: Path, rolled: Path, mode: VerificationMode
) -> None:
    engine, text = load(llama_folder, rolled), tokens(3, 12)
    seen, likely = set(), dense_row(llama_folder, text)
    for seed in range(20):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        drafts = (likely.index(max(likely)), *tokens(seed, 2))
        rule = Verify(mode, tuple(law_around(token_id, seed) for token_id in drafts), 1)
        item = StepItem(seed, 11, (text[-1], *drafts), 4, sampling, 2, rule)
        result = decided(engine, replace(item, num_head_candidates=2), text[:-1])
        assert result.num_accepted is not None
        seen.add(result.num_accepted)
        row = dense_row(llama_folder, (*text, *drafts[: result.num_accepted]))
        expected = rolled_candidates(row, sampling, 3 + result.num_accepted, 2)
        assert result.head_token_ids == expected
    assert len(seen) > 1


def dense_row(folder: Path, text: Sequence[int]) -> list[float]:
    return dense(folder, VOCAB_SIZE)(text)[-1]


def test_the_row_of_a_tree() -> None:
    """Nodes: 10 and 11 behind the text, 12 behind each of them, 13 behind the second 12."""
    ids, parents = (5, 10, 11, 12, 12, 13), (-1, -1, 0, 1, 3)
    item = StepItem(1, 9, ids, 6, GREEDY, tree_parents=parents)
    assert deciding_row(item, (20,), 0) == 0
    assert deciding_row(item, (10, 20), 1) == 1
    assert deciding_row(item, (10, 12, 20), 2) == 3
    assert deciding_row(item, (11, 12, 13, 20), 3) == 5


def plain_logits(base: Path, tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> Any:
    """[heads, rows, vocabulary] by the formula."""
    rows = output_layer(base)[tensors["draft_vocab"].long()]
    found = []
    for head in range(3):
        x = hidden
        for layer in range(2):
            name = f"{head}.{layer}.linear"
            x = x + F.silu(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
        logits = torch.full((len(hidden), VOCAB_SIZE), float("-inf"))
        logits[:, tensors["draft_vocab"].long()] = x @ tensors[f"{head}.map.weight"].T @ rows.T
        found.append(logits)
    return torch.stack(found)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_small_form_is_the_dense_computation(
    llama_folder: Path, tmp_path: Path, is_packed: bool
) -> None:
    tensors = random_heads(3, 2, SMALL_VOCAB)
    stored = dict(tensors)
    if is_packed:
        vocab = stored.pop("draft_vocab")
        stored = {**pack_int8(stored), "draft_vocab": vocab}
        tensors = unpack(stored)
    folder = save_heads(tmp_path / "heads", stored, medusa_num_layers=2)
    model = load_hf_model(ModelConfig(source="tiny"), llama_folder, torch.device("cpu"))
    heads = load_medusa(model, folder)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = heads(hidden)
    expected = plain_logits(llama_folder, tensors, hidden)
    assert torch.equal(logits.isinf(), expected.isinf())
    is_real = ~expected.isinf()
    torch.testing.assert_close(logits[is_real], expected[is_real], rtol=1e-4, atol=1e-2)


def test_heads_without_an_output_layer_use_the_targets(llama_folder: Path, tmp_path: Path) -> None:
    """Some published files have ResBlocks alone."""
    tensors = {k: v for k, v in rolled_heads(llama_folder).items() if "linear" in k}
    engine, text = load(llama_folder, save_heads(tmp_path / "heads", tensors)), tokens(4, 9)
    item = StepItem(1, 0, text, 1, GREEDY, num_head_candidates=2)
    row = dense_row(llama_folder, text)
    best = tuple(sorted(range(VOCAB_SIZE), key=lambda i: (-row[i], i))[:2])
    assert decided(engine, item, ()).head_token_ids == (best,) * 3


def test_a_file_may_have_more_heads_than_its_config(llama_folder: Path, tmp_path: Path) -> None:
    """The first published configs say 2 beside files of 5."""
    folder = save_heads(tmp_path / "heads", rolled_heads(llama_folder, 5), medusa_num_heads=2)
    assert load(llama_folder, folder).info.num_heads == 5


def items_of_all_kinds(num_candidates: int) -> list[StepItem]:
    rule = Verify(VerificationMode.REJECTION, (law_around(4, 1),), 1)
    return [
        StepItem(1, 8, tokens(9, 4), 4, EVERYTHING, 3, num_head_candidates=num_candidates),
        StepItem(2, 8, tokens(8, 1), 1, GREEDY, 3),
        StepItem(3, 8, (7, 4), 2, COUPLED, 3, rule, num_head_candidates=num_candidates),
        StepItem(4, 8, tokens(7, 30), 0, COUPLED, num_head_candidates=num_candidates),
        StepItem(5, 8, tokens(6, 30), 1, COUPLED, max_rows=4, num_head_candidates=num_candidates),
    ]


@pytest.mark.parametrize(
    "fields",
    [{}, {"reproducible": True}, {"quantization": "int8"}, {"dtype": "bfloat16"}],
    ids=["float32", "reproducible", "int8", "bfloat16"],
)
@pytest.mark.parametrize("form", ["published", "small"])
def test_heads_change_no_token(
    llama_folder: Path, rolled: Path, small: Path, fields: dict[str, Any], form: str
) -> None:
    """An engine without heads, one whose heads nobody asks and one that is asked: equal bits."""
    found, logits = [], []
    for medusa, count in (("", 0), (rolled if form == "published" else small, 0), (rolled, 4)):
        engine = load(llama_folder, medusa, **fields)
        for sequence_id in range(1, 6):
            engine.add(sequence_id)
            text = tokens(sequence_id, 8)
            engine.step([StepItem(sequence_id, 0, text, 0, GREEDY)])
        results = engine.step(items_of_all_kinds(count))
        engine.check_integrity()
        assert [len(result.head_token_ids) for result in results] == (
            [3, 0, 3, 0, 0] if count else [0] * 5
        )
        assert all(
            len(ids) == 4 for ids in (*results[0].head_token_ids, *results[2].head_token_ids)
        )
        found.append([replace(result, head_token_ids=()) for result in results])
        logits.append(engine.logits([StepItem(1, 8, tokens(9, 4), 4, GREEDY)]))
    assert found[0] == found[1] == found[2]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_rows_that_are_no_numbers_name_nothing() -> None:
    logits = torch.randn(4, 90)
    logits[0, 7] = float("nan")
    logits[1] = float("-inf")
    logits[2, [4, 80]] = 100.0
    for sampling in (GREEDY, COUPLED):
        found = rank_rows(logits, [HeadRow(sampling, index) for index in range(4)], 3)
        assert found[:2] == [(), ()]
        assert [len(ids) for ids in found[2:]] == [3, 3]
        assert sampling != GREEDY or found[2][:2] == (4, 80)


def test_a_bias_beyond_the_vocabulary_does_nothing() -> None:
    logits, bias = torch.zeros(1, 90), ((5, 1.0), (70, 2.0), (90, 9.0), (500, 9.0))
    sampling = SamplingParams(temperature=0.0, logit_bias=bias)
    assert rank_rows(logits, [HeadRow(sampling, 0)], 2) == [(70, 5)]
    assert not logits.any()


def test_ids_that_no_tokenizer_knows_are_not_named(tmp_path: Path) -> None:
    """The output layer is wider than the tokenizer."""
    from tests.unit.engine.conftest import write_tokenizer

    base = save_tiny("llama", tmp_path / "base")
    write_tokenizer(base, VOCAB_SIZE - 41)
    engine = load(base, save_heads(tmp_path / "heads", rolled_heads(base)))
    item = StepItem(1, 0, (1, 2, 3), 1, GREEDY, num_head_candidates=16)
    for ids in decided(engine, item, ()).head_token_ids:
        assert len(ids) == 16
        assert max(ids) < VOCAB_SIZE - 41


def test_the_small_form_names_no_other_ids(llama_folder: Path, tmp_path: Path) -> None:
    folder = save_heads(tmp_path / "heads", random_heads(2, 1, [3, 50, 70]))
    engine = load(llama_folder, folder)
    for sequence_id, sampling in enumerate((GREEDY, COUPLED)):
        item = StepItem(sequence_id, 0, tokens(1, 5), 1, sampling, num_head_candidates=8)
        for ids in decided(engine, item, ()).head_token_ids:
            assert sorted(ids) == [3, 50, 70]


def test_padded_passes_have_the_same_hidden_states(llama_folder: Path, small: Path) -> None:
    model = ModelConfig(source="tiny", max_model_len=64, device="cpu", block_size=4)
    plain, _ = load_runner(model, llama_folder, medusa=small)
    hf_model = load_hf_model(model, llama_folder, torch.device("cpu"))
    heads = load_medusa(hf_model, small)
    heads.attach(hf_model)
    probe, _ = probe_model(hf_model)
    padded = GraphRunner(hf_model, probe, 1024, 4, max_model_len=64, use_varlen=False, heads=heads)
    rows = [SequenceRows(0, (3, 4, 5), 2, (7,), None), SequenceRows(0, (9,), 1, (2,), None)]
    with torch.inference_mode():
        for runner in (plain, padded):
            runner.forward(rows)
        assert padded._passes
        logits = [runner.head_logits([0, 2]) for runner in (plain, padded)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-2)
        padded.forward(list(reversed(rows)))
        torch.testing.assert_close(padded.head_logits([1, 0]), logits[0], rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", ["published", "small"])
def test_captured_passes_on_a_gpu(llama_folder: Path, rolled: Path, small: Path, form: str) -> None:
    """Replayed twice, with other texts: the heads see what the graph computed last."""
    fields = {"device": "cuda", "dtype": "float32", "attention_backend": "sdpa"}
    medusa = rolled if form == "published" else small
    graphs, eager = load(llama_folder, medusa, **fields), load(llama_folder, medusa)
    assert isinstance(graphs._runner, GraphRunner)
    for sequence_id in range(4):
        text = tokens(sequence_id, 12)
        item = StepItem(sequence_id, 10, text[10:], 2, GREEDY, num_head_candidates=4)
        captured, expected = (decided(each, item, text[:10]) for each in (graphs, eager))
        assert captured.head_token_ids == expected.head_token_ids
    assert any(static.graph is not None for static in graphs._runner._passes.values())


def test_refused(llama_folder: Path, rolled: Path) -> None:
    engine, bare = load(llama_folder, rolled), load(llama_folder)
    for each in (engine, bare):
        each.add(1)
    item = StepItem(1, 0, (1, 2), 1, GREEDY, num_head_candidates=1)
    with pytest.raises(LocalProtocolError, match="no heads"):
        bare.step([item])
    with pytest.raises(LocalProtocolError, match="17 candidates"):
        engine.step([replace(item, num_head_candidates=MAX_HEAD_CANDIDATES + 1)])
    with pytest.raises(LocalProtocolError, match="not a draft"):
        engine.step([replace(item, rule=Propose(1), sampling=COUPLED)])
    result = engine.step([replace(item, num_head_candidates=MAX_HEAD_CANDIDATES)])[0]
    assert [len(ids) for ids in result.head_token_ids] == [MAX_HEAD_CANDIDATES] * 3


def test_a_model_without_a_plain_output_layer_is_refused(llama_folder: Path, small: Path) -> None:
    hf_model = load_hf_model(ModelConfig(source="tiny"), llama_folder, torch.device("cpu"))
    hf_model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(ConfigError, match="no plain output layer"):
        read_heads(hf_model, small)
