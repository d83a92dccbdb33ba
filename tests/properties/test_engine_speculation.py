"""A draft with the target's own weights is always right: any slip of a rewind shows here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config import ModelConfig
from paceline.engine.base import Engine, EngineInfo, Propose, StepItem, Verify
from paceline.engine.loader import load_engine
from paceline.engine.toy import ToyEngine
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

torch.set_num_threads(1)

NUM_TOKENS = 500
VOCAB_SIZE = 61
PROMPT = (3, 17, 42, 5, 9)
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=20260101),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=3, choice=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(
        temperature=0.9,
        seed=17,
        min_p=0.02,
        presence_penalty=0.7,
        repetition_penalty=1.1,
        logit_bias=((4, 2.0), (11, -3.0)),
        min_tokens=60,
        stop_token_ids=(1, 7, 30),
    ),
]
IDS = ["greedy", "coupled", "filtered", "greedy-penalties", "everything"]


class Pair:
    """Drives one sequence: the draft one token at a time, the target one block at a time."""

    def __init__(self, draft: Engine, target: Engine, sampling: SamplingParams) -> None:
        self.draft, self.target, self.sampling = draft, target, sampling
        self.text = list(PROMPT)
        self.num_proposed = self.num_accepted = 0
        draft.add(1)
        target.add(1)

    @property
    def num_output(self) -> int:
        return len(self.text) - len(PROMPT)

    def propose(self, num_tokens: int) -> list[int]:
        start = min(self.draft.cached_len(1), len(self.text) - 1)
        rows, proposed = tuple(self.text[start:]), list[int]()
        for offset in range(num_tokens):
            item = StepItem(1, start, rows, 1, self.sampling, self.num_output + offset)
            [result] = self.draft.step([item])
            start += len(rows)
            rows = result.token_ids
            proposed += rows
        return proposed

    def verify(self, proposed: list[int]) -> None:
        start = min(self.target.cached_len(1), len(self.text) - 1)
        rows = (*self.text[start:], *proposed)
        item = StepItem(1, start, rows, len(proposed) + 1, self.sampling, self.num_output)
        sampled = list(self.target.step([item])[0].token_ids)
        num_accepted = 0
        while num_accepted < len(proposed) and proposed[num_accepted] == sampled[num_accepted]:
            num_accepted += 1
        self.text += sampled[: num_accepted + 1]
        self.num_proposed += len(proposed)
        self.num_accepted += num_accepted

    def run(self, num_tokens: int = NUM_TOKENS) -> list[int]:
        round = 0
        while self.num_output < num_tokens:
            self.verify(self.propose(1 + round % 8))
            round += 1
        self.draft.check_integrity()
        self.target.check_integrity()
        return self.text[: len(PROMPT) + num_tokens]


class RejectionPair(Pair):
    """The same with stated laws: the draft says what it drew from, the target accepts by it."""

    def __init__(
        self, draft: Engine, target: Engine, sampling: SamplingParams, mode: VerificationMode
    ) -> None:
        super().__init__(draft, target, sampling)
        self.mode = mode
        self.round = 0
        self.laws: list[SparseProbs] = []

    def propose(self, num_tokens: int) -> list[int]:
        self.round += 1
        self.laws = []
        start = min(self.draft.cached_len(1), len(self.text) - 1)
        rows, proposed = tuple(self.text[start:]), list[int]()
        for offset in range(num_tokens):
            index, rule = self.num_output + offset, Propose(self.round)
            [result] = self.draft.step([StepItem(1, start, rows, 1, self.sampling, index, rule)])
            start += len(rows)
            rows = result.token_ids
            proposed += rows
            self.laws += result.draft_probs
        return proposed

    def verify(self, proposed: list[int]) -> None:
        start = min(self.target.cached_len(1), len(self.text) - 1)
        rows = (*self.text[start:], *proposed)
        rule = Verify(self.mode, tuple(self.laws), self.round)
        item = StepItem(1, start, rows, len(proposed) + 1, self.sampling, self.num_output, rule)
        [result] = self.target.step([item])
        assert result.num_accepted is not None
        assert list(result.token_ids[:-1]) == proposed[: result.num_accepted]
        self.text += result.token_ids
        self.num_proposed += len(proposed)
        self.num_accepted += result.num_accepted


def plain(target: Engine, sampling: SamplingParams, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Without any draft, one token a pass."""
    text, start = list(PROMPT), 0
    target.add(2)
    for index in range(num_tokens):
        [result] = target.step([StepItem(2, start, tuple(text[start:]), 1, sampling, index)])
        start = len(text)
        text += result.token_ids
    return text


def toy(error_rate: float = 0.0) -> ToyEngine:
    info = EngineInfo("toy", VOCAB_SIZE, max_model_len=600, block_size=4, num_blocks=400)
    return ToyEngine(info, error_rate=error_rate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    out = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=600,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(out)
    ids = {f"t{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    (out / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}), encoding="utf-8")
    return out


def tiny_llama(folder: Path, draft_top_n: int | None = None) -> Engine:
    config = ModelConfig(
        source="tiny", max_model_len=600, block_size=4, num_kv_blocks=400, device="cpu"
    )
    return load_engine(config, folder, draft_top_n=draft_top_n)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_toy_draft_equal_to_its_target_is_always_accepted(sampling: SamplingParams) -> None:
    pair = Pair(toy(), toy(), sampling)
    assert pair.run() == plain(toy(), sampling)
    assert pair.num_accepted == pair.num_proposed > 400


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_toy_draft_with_errors_changes_no_token(sampling: SamplingParams) -> None:
    pair = Pair(toy(error_rate=0.3), toy(), sampling)
    assert pair.run() == plain(toy(), sampling)
    assert 0 < pair.num_accepted < pair.num_proposed


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_torch_draft_equal_to_its_target_is_always_accepted(
    folder: Path, sampling: SamplingParams
) -> None:
    pair = Pair(tiny_llama(folder, draft_top_n=64), tiny_llama(folder), sampling)
    assert pair.run() == plain(tiny_llama(folder), sampling)
    assert pair.num_accepted == pair.num_proposed > 400


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=IDS)
def test_a_useless_draft_changes_no_token_of_a_torch_target(
    folder: Path, sampling: SamplingParams
) -> None:
    pair = Pair(toy(), tiny_llama(folder), sampling)
    assert pair.run(150) == plain(tiny_llama(folder), sampling, 150)
    assert pair.num_accepted < pair.num_proposed


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[3]], ids=["greedy", "penalties"])
def test_stated_laws_of_a_greedy_request_give_the_plain_text(
    folder: Path, sampling: SamplingParams, mode: VerificationMode
) -> None:
    """At temperature 0 every law is one token, so acceptance by laws is acceptance by equality."""
    wrong = RejectionPair(toy(error_rate=0.3), toy(), sampling, mode)
    assert wrong.run(100) == plain(toy(), sampling, 100)
    assert 0 < wrong.num_accepted < wrong.num_proposed
    right = RejectionPair(tiny_llama(folder), tiny_llama(folder), sampling, mode)
    assert right.run(100) == plain(tiny_llama(folder), sampling, 100)
    assert right.num_accepted == right.num_proposed > 60


@pytest.mark.parametrize("mode", [VerificationMode.REJECTION, VerificationMode.BLOCK])
@pytest.mark.parametrize("sampling", [SAMPLINGS[1], SAMPLINGS[4]], ids=["coupled", "everything"])
def test_a_draft_that_states_the_targets_own_law_is_nearly_always_accepted(
    folder: Path, sampling: SamplingParams, mode: VerificationMode
) -> None:
    """All that is lost is what quantised laws leave out, 1 % a token, and the block behind it."""
    pairs = [
        RejectionPair(toy(), toy(), sampling, mode),
        RejectionPair(tiny_llama(folder), tiny_llama(folder), sampling, mode),
    ]
    for pair in pairs:
        pair.run(120)
        assert pair.num_accepted / pair.num_proposed > 0.85
    useless = RejectionPair(toy(), tiny_llama(folder), sampling, mode)
    useless.run(60)
    assert useless.num_accepted / useless.num_proposed < 0.5
