"""Every sampling parameter, alone and mixed, against an oracle that shares no engine code.

The oracle runs the library's own dense forward over the whole prefix and the plain-Python
processors, one token at a time: no cache, no batch, no scheduler, no draft. Ids are bytes (the
toy tokenizer), so stop strings are real ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engine.base import Engine, StepItem, StepResult
from paceline.engine.timed import EngineWrapper
from paceline.generation import GenerateRequest, RoundDelta
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams

EOS = 256
VOCAB_SIZE = 257
PADDED_SIZE = 272  # the model's output layer is wider than the vocabulary
PROMPT = tuple(b"the quick brown fox jumps over the lazy dog; the quick brown")
LOGPROB_TOLERANCE = 1e-4


def save_model(folder: Path, seed: int) -> Path:
    """A random Llama over bytes, with the tokenizer file that a served folder must have."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=PADDED_SIZE,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {f"<{token_id}>": token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


@dataclass(frozen=True, slots=True)
class Expected:
    """What one choice must be: its tokens, why it ended, and each token's own log-probability."""

    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...]


class Oracle:
    """The dense model, one prefix at a time; prefixes are remembered."""

    def __init__(self, folder: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._rows: dict[tuple[int, ...], list[float]] = {}
        self._choices: dict[tuple[GenerateRequest, int], Expected] = {}

    def logits(self, prefix: tuple[int, ...]) -> list[float]:
        row = self._rows.get(prefix)
        if row is None:
            with torch.inference_mode():
                output = self._model(torch.tensor([prefix]), use_cache=False)
            row = self._rows[prefix] = output.logits[0, -1, :VOCAB_SIZE].tolist()
        return row

    def logprob(self, prefix: tuple[int, ...], token_id: int) -> float:
        row = self.logits(prefix)
        peak = max(row)
        return row[token_id] - peak - math.log(math.fsum(math.exp(x - peak) for x in row))

    def choice(self, request: GenerateRequest, index: int) -> Expected:
        """What choice `index` of the request is."""
        key = (request, index)
        if key not in self._choices:
            self._choices[key] = self._generate(request, index)
        return self._choices[key]

    def _generate(self, request: GenerateRequest, index: int) -> Expected:
        stops = {*request.stop_token_ids} | (set() if request.ignore_eos else {EOS})
        sampling = replace(request.sampling, choice=index, stop_token_ids=tuple(sorted(stops)))
        prompt, out = request.prompt_token_ids, list[int]()
        logprobs = []
        while len(out) < request.max_tokens:
            prefix = (*prompt, *out)
            token_id = coupled_token(self.logits(prefix), sampling, len(out), prompt, out)
            logprobs.append(self.logprob(prefix, token_id))
            out.append(token_id)
            if token_id in stops:
                return Expected(tuple(out), "stop", tuple(logprobs))
        return Expected(tuple(out), "length", tuple(logprobs))


class Adversary(EngineWrapper):
    """A draft that proposes what hurts: EOS, ids that the request forbids, neighbours, echoes."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._turn = 0

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        results = self._engine.step(items)
        return [
            replace(result, token_ids=tuple(self._twist(t, item) for t in result.token_ids))
            for item, result in zip(items, results, strict=True)
        ]

    def _twist(self, token_id: int, item: StepItem) -> int:
        self._turn += 1
        biased = [banned for banned, bias in item.sampling.logit_bias if bias < 0]
        kinds = (
            EOS,
            token_id,  # right now and then, so that blocks end in the middle
            biased[0] if biased else (token_id + 1) % VOCAB_SIZE,
            item.token_ids[-1],
            token_id,
            (item.sampling.stop_token_ids or (0,))[-1],
        )
        return kinds[self._turn % len(kinds)]


def request(name: str, temperature: float, **changes: object) -> GenerateRequest:
    """`changes` are fields of the request or of its sampling."""
    fields = GenerateRequest.__dataclass_fields__
    own = {key: value for key, value in changes.items() if key in fields}
    law = {key: value for key, value in changes.items() if key not in fields}
    base = GenerateRequest(
        request_id=name,
        prompt_token_ids=PROMPT,
        max_tokens=24,
        sampling=SamplingParams(temperature=temperature, **({"seed": 11} | law)),
    )
    return replace(base, **own)  # type: ignore[arg-type]


# EOS is made likely where a case is about endings: a random model hardly ever chooses it.
LIKELY_EOS = ((EOS, 30.0),)

SINGLE: dict[str, dict[str, object]] = {
    "defaults": {},
    "seed": {"seed": 2**64 - 1},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 1.9},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "negative_penalties": {"frequency_penalty": -1.5, "presence_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": tuple((i, -100.0) for i in range(0, 200, 2))},
    "likely_eos": {"logit_bias": LIKELY_EOS},
    "min_tokens": {"logit_bias": LIKELY_EOS, "min_tokens": 5},
    "ignore_eos": {"logit_bias": ((EOS, 6.0),), "ignore_eos": True},
    "stop_token_ids": {"stop_token_ids": tuple(range(40, 120))},
    "stop_ids_and_min_tokens": {"stop_token_ids": tuple(range(0, 256, 3)), "min_tokens": 7},
    "max_tokens_1": {"max_tokens": 1},
    "max_tokens_7": {"max_tokens": 7},
    "n": {"n": 3},
    "logprobs": {"num_logprobs": 5},
    "prompt_logprobs": {"num_prompt_logprobs": 2, "num_logprobs": 0},
}


# Every token is a character, so that text positions are token positions.
ASCII: dict[str, object] = {"logit_bias": tuple((i, -100.0) for i in range(128, VOCAB_SIZE))}


def mixtures(count: int, seed: int = 3) -> dict[str, dict[str, object]]:
    """Random combinations of everything."""
    random = Random(seed)
    mixed: dict[str, dict[str, object]] = {}
    for index in range(count):
        biased = sorted(random.sample(range(VOCAB_SIZE - 1), 12))
        biases = [(token_id, random.choice((-100.0, -3.5, 4.25))) for token_id in biased]
        mixed[f"mixture_{index}"] = {
            "seed": random.getrandbits(64),
            "top_k": random.choice((0, 1, 5, 40)),
            "top_p": random.choice((1.0, 0.95, 0.5)),
            "min_p": random.choice((0.0, 0.02, 0.3)),
            "presence_penalty": random.choice((0.0, 0.7, -1.1)),
            "frequency_penalty": random.choice((0.0, 1.3, -0.4)),
            "repetition_penalty": random.choice((1.0, 1.25, 0.9)),
            "logit_bias": (*biases, (EOS, random.choice((-1.0, 5.0)))),
            "min_tokens": random.choice((0, 3, 9)),
            "stop_token_ids": tuple(sorted(random.sample(range(256), random.choice((0, 4))))),
            "ignore_eos": random.random() < 0.3,
            "n": random.choice((1, 1, 2)),
            "num_logprobs": random.choice((None, 0, 4)),
            "num_prompt_logprobs": random.choice((None, None, 1)),
            "max_tokens": random.choice((5, 16, 24)),
        }
    return mixed


def choice_of(deltas: Sequence[RoundDelta], index: int) -> list[RoundDelta]:
    return [delta for delta in deltas if delta.choice == index]
