"""Both engines, and the logits of a text by another way, for tests of `Engine.step`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from paceline.config import ModelConfig
from paceline.engine.base import Engine, EngineInfo, StepItem
from paceline.engine.loader import load_engine
from paceline.engine.toy import ToyEngine
from paceline.engine.toy_rules import ToyRow
from paceline.generation import TokenLogprobs
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs
from tests.unit.engine.conftest import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.8, seed=11)
EVERYTHING = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    seed=7,
    choice=2,
    presence_penalty=0.6,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias=((3, 1.5), (90, -2.0)),
    min_tokens=9,
    stop_token_ids=(1, 2, 60),
)
MODES = [VerificationMode.REJECTION, VerificationMode.BLOCK]


@dataclass
class Subject:
    """An engine, and the logits of a text by another way: rows [len(text), vocab_size]."""

    engine: Engine
    logits: Callable[[Sequence[int]], list[list[float]]]

    def row(self, text: Sequence[int], sampling: SamplingParams, output_index: int) -> ToyRow:
        """The row after all of `text`, of which so many tokens are output."""
        split = len(text) - output_index
        return ToyRow(
            self.logits(text)[-1], sampling, output_index, tuple(text[:split]), tuple(text[split:])
        )


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB_SIZE), k=length))


def load(folder: Path) -> Engine:
    config = ModelConfig(
        source=str(folder), max_model_len=512, block_size=4, num_kv_blocks=256, device="cpu"
    )
    return load_engine(config, folder)


def dense(folder: Path, width: int) -> Callable[[Sequence[int]], list[list[float]]]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    def logits(text: Sequence[int]) -> list[list[float]]:
        with torch.inference_mode():
            rows: torch.Tensor = model(torch.tensor([list(text)])).logits[0, :, :width]
        listed: list[list[float]] = rows.double().tolist()
        return listed

    return logits


def make_subject(kind: str, folder: Path) -> Subject:
    """`toy`, or `torch` with the model of `folder`."""
    if kind == "torch":
        return Subject(load(folder), dense(folder, VOCAB_SIZE))
    info = EngineInfo("toy", VOCAB_SIZE, max_model_len=512, block_size=4, num_blocks=256)
    toy = ToyEngine(info)
    return Subject(toy, lambda text: [toy.logits(text[: i + 1]) for i in range(len(text))])


def filled(engine: Engine, sequence_id: int, text: tuple[int, ...]) -> None:
    engine.add(sequence_id)
    engine.step([StepItem(sequence_id, 0, text, 0, GREEDY)])


def law_around(token_id: int, seed: int) -> SparseProbs:
    """A law that gives `token_id` about half, and seven other ids the rest."""
    others = [i for i in random.Random(seed).sample(range(VOCAB_SIZE), 8) if i != token_id][:7]
    weights = [TOTAL_WEIGHT // 16] * 7
    return SparseProbs((token_id, *others), (TOTAL_WEIGHT - sum(weights), *weights))


def assert_close(one: TokenLogprobs, other: TokenLogprobs) -> None:
    assert (one.token_id, one.rank) == (other.token_id, other.rank)
    assert math.isclose(one.logprob, other.logprob, abs_tol=1e-4)
    assert [i for i, _ in one.top] == [i for i, _ in other.top]
    for (_, value), (_, expected) in zip(one.top, other.top, strict=True):
        assert math.isclose(value, expected, abs_tol=1e-4)
