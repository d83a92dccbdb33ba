"""A draft that reads other tokens than its target: the engine against a naive twin."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import ModelConfig
from paceline.engine.base import Propose, StepItem
from paceline.engine.loader import load_engine
from paceline.engine.translated import TranslatedEngine
from paceline.engine.translation import EXPANSION
from paceline.errors import LocalProtocolError
from paceline.sampling.params import SamplingParams
from tests.unit.engine.subjects import COUPLED, EVERYTHING, GREEDY
from tests.unit.engine.translated_twin import NUM_BLOCKS, Twin, held, item, load, reference_token
from tests.unit.engine.two_tokenizers import DRAFT_TEXT, save_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def twin(folders: dict[str, Path]) -> Twin:
    return Twin(folders)


@pytest.fixture
def engine(folders: dict[str, Path]) -> TranslatedEngine:
    return load(folders)


def test_announced_as_the_target(
    folders: dict[str, Path], twin: Twin, engine: TranslatedEngine
) -> None:
    target = load_engine(
        ModelConfig(source=str(folders["target"]), max_model_len=64), folders["target"]
    ).info
    info = engine.info
    assert (info.vocab_size, info.tokenizer_hash) == (target.vocab_size, target.tokenizer_hash)
    assert info.eos_token_ids == target.eos_token_ids == (twin.target.specials["<|end|>"],)
    assert info.model_id == str(folders["draft"])
    assert info.num_blocks == NUM_BLOCKS / EXPANSION == engine.stats().num_free_blocks
    assert info.max_model_len == int(512 / EXPANSION)
    assert info.grammars is not None
    # Only the rows of common tokens are computed.
    head = engine._engine._runner._model.get_output_embeddings()
    assert head.token_ids.tolist() == sorted(twin.translation.draft_ids)


@pytest.mark.parametrize(
    "sampling", [GREEDY, COUPLED, EVERYTHING], ids=["greedy", "coupled", "all"]
)
def test_tokens_are_the_twins(
    sampling: SamplingParams, twin: Twin, engine: TranslatedEngine
) -> None:
    """Prompt in one piece, then its own tokens one by one; penalties count the target's ids."""
    engine.add(1)
    text = list(twin.text(20))
    draft_ids = twin.naive(text)
    feed, start = tuple(text), 0
    for index in range(12):
        result = engine.step([item(start, feed, sampling, output_index=index)])[0]
        row = twin.row(draft_ids)
        assert result.token_ids[0] == reference_token(row, sampling, index, text, 20)
        assert held(engine) == draft_ids
        start, feed = len(text), result.token_ids
        text += feed
        draft_ids += twin.translation.translate(feed, num_apart=1).token_ids
        assert engine.cached_len(1) == start
    assert engine.stats().num_passes == 12
    engine.check_integrity()


def test_corrections_that_the_draft_has_no_token_for(twin: Twin, engine: TranslatedEngine) -> None:
    """A target's token of several of the draft's, and half a character, between its own."""
    engine.add(1)
    foreign = [i for i in range(twin.target.size) if i not in twin.translation.target_ids]
    halves = [i for i, data in enumerate(twin.target.token_bytes) if data in (b"\xe4", b"\xbd")]
    text, draft_ids, feed = [], [], list(twin.text(9))
    for index in range(16):
        apart = min(1, len(text))
        draft_ids += twin.translation.translate(feed, num_apart=apart).token_ids
        result = engine.step([item(len(text), feed)])[0]
        text += feed
        assert result.token_ids[0] == reference_token(
            twin.row(draft_ids), GREEDY, 0, text, len(text)
        )
        feed = [random.Random(index).choice(halves if index % 3 else foreign)]
    assert len(draft_ids) > len(text) + 5
    assert held(engine) == draft_ids


def test_rewind_to_every_position(twin: Twin, engine: TranslatedEngine) -> None:
    """In the prompt, where both cut or not, and behind it: as if the rest had never been."""
    prompt = twin.target.encode(DRAFT_TEXT[0].encode())[:24]
    text = [*prompt, 258, 300, 301, 5]
    num_uncut = 0
    for length in range(1, len(text)):
        engine.add(1)
        engine.step([item(0, prompt)])
        for position in range(len(prompt), len(text)):
            engine.step([item(position, text[position : position + 1])])
        other = [400, 7]
        result = engine.step([item(length, other)])[0]
        assert engine.cached_len(1) == length + 2
        assert twin.draft.decode(held(engine)) == twin.target.decode(text[:length] + other)
        row = twin.row(held(engine))
        assert result.token_ids[0] == reference_token(row, GREEDY, 0, text, len(text))
        cuts = twin.translation.translate(prompt).marks
        num_uncut += length < len(prompt) and length not in cuts
        engine.check_integrity()
        engine.free(1)
    assert num_uncut > 0
    assert engine.stats().num_free_blocks == engine.info.num_blocks


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7])
@pytest.mark.parametrize("caching", [True, False])
def test_prefill_in_chunks(
    max_rows: int, caching: bool, folders: dict[str, Path], twin: Twin
) -> None:
    """However few rows a pass has, it ends; and what comes out is the same."""
    engine = load(folders, enable_prefix_caching=caching)
    text = twin.text(60, seed=2)
    expected = reference_token(twin.row(twin.naive(text)), GREEDY, 0, text, len(text))
    for sequence_id in (1, 2):  # the second finds most of it in the prefix cache
        engine.add(sequence_id)
        start, passes = 0, 0
        while True:
            wanted = replace(item(start, text[start:], max_rows=max_rows), sequence_id=sequence_id)
            before = engine.stats().num_rows
            result = engine.step([wanted])[0]
            assert engine.stats().num_rows - before <= max_rows
            passes += 1
            assert start <= result.cached_len <= len(text)
            assert passes <= 2 * len(text)
            if result.token_ids:
                break
            start = result.cached_len
        assert result.token_ids == (expected,)
        assert twin.draft.decode(held(engine, sequence_id)) == twin.target.decode(text)
    assert (engine.stats().num_prefix_tokens > 0) == caching


def test_salts_keep_texts_apart(twin: Twin, engine: TranslatedEngine) -> None:
    text = twin.text(40)
    for sequence_id, salt in ((1, 0), (2, 9), (3, 9)):
        engine.add(sequence_id)
        before = engine.stats().num_prefix_tokens
        engine.step(
            [replace(item(0, text, max_rows=100, cache_salt=salt), sequence_id=sequence_id)]
        )
        assert (engine.stats().num_prefix_tokens > before) == (sequence_id == 3)
    with pytest.raises(LocalProtocolError, match="salt"):
        engine.step([replace(item(40, [5]), sequence_id=3)])


def test_forks(twin: Twin, engine: TranslatedEngine) -> None:
    """From every position, two at a time, beside a step of the one that they come from."""
    text = list(twin.text(14))
    for length in range(1, len(text) + 1):
        for sequence_id in (1, 2, 3):
            engine.add(sequence_id)
        engine.step([item(0, text)])
        branches = [
            StepItem(i, length, (token_id,), 1, GREEDY, num_runner_ups=2, fork_of=1)
            for i, token_id in ((2, 400), (3, 7))
        ]
        results = engine.step([*branches, item(len(text), [300])])
        for branch, result in zip(branches, results, strict=False):
            ids = held(engine, branch.sequence_id)
            assert twin.draft.decode(ids) == twin.target.decode([*text[:length], *branch.token_ids])
            row = twin.row(ids)
            best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:3]
            assert [result.token_ids[0], *result.runner_ups[0]] == best
            assert engine.cached_len(branch.sequence_id) == length + 1
        engine.check_integrity()
        for sequence_id in (1, 2, 3):
            engine.free(sequence_id)


def test_several_rows(twin: Twin, engine: TranslatedEngine) -> None:
    """Of tokens with several ids in the draft, the row behind the last of them counts."""
    text = list(twin.text(12))
    foreign = [i for i in range(twin.target.size) if i not in twin.translation.target_ids][:3]
    text += foreign
    engine.add(1)
    result = engine.step([StepItem(1, 0, tuple(text), 4, COUPLED, 2)])[0]
    for row in range(4):
        part = text[: 12 + row]
        ids = twin.translation.translate(text, num_apart=3)
        place = ids.places[ids.marks.index(len(part))]
        expected = reference_token(twin.row(ids.token_ids[:place]), COUPLED, 2 + row, part, 12)
        assert result.token_ids[row] == expected


def test_the_stated_law_is_the_one_drawn_from(folders: dict[str, Path], twin: Twin) -> None:
    """Many draws of one row: only common tokens, each as often as the law says, and the law is the
    model's own over them (C1)."""
    sampling = SamplingParams(temperature=1.2, seed=5)
    text, engine = twin.text(15), load(folders, num_kv_blocks=600)
    num_draws, num_sequences = 2000, 50
    for sequence_id in range(num_sequences):
        engine.add(sequence_id)
    engine.step([StepItem(i, 0, text, 1, GREEDY) for i in range(num_sequences)])
    counts: dict[int, int] = {}
    laws = set()
    for draw in range(0, num_draws, num_sequences):
        items = [
            StepItem(i, 14, text[14:], 1, sampling, rule=Propose(draw + i))
            for i in range(num_sequences)
        ]
        for result in engine.step(items):
            laws.add(result.draft_probs[0])
            counts[result.token_ids[0]] = counts.get(result.token_ids[0], 0) + 1
    (law,) = laws
    assert set(law.token_ids) <= set(twin.translation.target_ids)
    total = sum(law.weights)
    expected = {i: weight / total for i, weight in zip(law.token_ids, law.weights, strict=True)}
    assert counts.keys() <= expected.keys()
    for token_id, share in expected.items():
        spread = 5 * (share * (1 - share) / num_draws) ** 0.5 + 1 / num_draws
        assert abs(counts.get(token_id, 0) / num_draws - share) < spread
    row = torch.tensor(twin.row(held(engine)), dtype=torch.float64)
    own = torch.softmax(row / 1.2, 0)
    most_likely = max(expected, key=lambda token_id: expected[token_id])
    assert most_likely == int(own.argmax())
    kept = own[list(law.token_ids)]
    for token_id, share in zip(law.token_ids, (kept / kept.sum()).tolist(), strict=True):
        assert abs(expected[token_id] - share) < 2e-3
