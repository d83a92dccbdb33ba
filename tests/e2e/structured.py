"""Grammars for tests: a schema of three levels, who checks it, and drafts that know no grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engine.base import Engine, EngineInfo, StepItem, StepResult
from paceline.engine.timed import EngineWrapper
from paceline.engine.toy import ToyEngine
from paceline.grammars import load_grammars
from paceline.models import TOY_EOS_TOKEN_ID, TOY_VOCAB_SIZE

KINDS = ("circle", "square", "line")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": list(KINDS)},
        "at": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": -9, "maximum": 99},
                "style": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": 3},
                        "on": {"type": "boolean"},
                        "dots": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2},
                    },
                    "required": ["name", "on", "dots"],
                    "additionalProperties": False,
                },
            },
            "required": ["x", "style"],
            "additionalProperties": False,
        },
    },
    "required": ["kind", "at"],
    "additionalProperties": False,
}


def json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


GRAMMAR = json_grammar(SCHEMA)


def problem(text: str) -> str:
    """What is wrong with a text that should follow SCHEMA; empty: nothing."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    if list(value) != ["kind", "at"] or value["kind"] not in KINDS:
        return "the outer object"
    at = value["at"]
    if list(at) != ["x", "style"] or type(at["x"]) is not int or not -9 <= at["x"] <= 99:
        return "the middle object"
    style = at["style"]
    if list(style) != ["name", "on", "dots"] or type(style["on"]) is not bool:
        return "the inner object"
    if not isinstance(style["name"], str) or len(style["name"]) > 3:
        return "the name"
    if len(style["dots"]) > 2 or not {1, 22}.issuperset(style["dots"]):
        return "the dots"
    return ""


def toy(seed: int = 0, *, has_grammars: bool = True, **changes: Any) -> ToyEngine:
    fields: dict[str, Any] = {
        "model_id": "toy",
        "vocab_size": TOY_VOCAB_SIZE,
        "max_model_len": 512,
        "block_size": 8,
        "num_blocks": 4096,
        "eos_token_ids": (TOY_EOS_TOKEN_ID,),
        "grammars": load_grammars("toy") if has_grammars else None,
    }
    return ToyEngine(EngineInfo(**(fields | changes)), seed=seed)


def text_of(token_ids: Sequence[int]) -> str:
    """Of the toy's bytes; the EOS at the end stands for nothing."""
    return bytes(i for i in token_ids if i != TOY_EOS_TOKEN_ID).decode()


class Adversary(EngineWrapper):
    """A draft that proposes what hurts an output with a grammar: EOS, the toy's own token (which no
    grammar has seen), quotes and brackets, the last token again."""

    def __init__(self, engine: Engine, vocab_size: int, eos_token_id: int) -> None:
        super().__init__(engine)
        self._random = Random(5)
        self._hurtful = (eos_token_id, vocab_size - 1, *b'"{}[],:0')

    def step(self, items: Sequence[StepItem]) -> list[StepResult]:
        results = self._engine.step(items)
        return [self._twisted(*pair) for pair in zip(items, results, strict=True)]

    def _twisted(self, item: StepItem, result: StepResult) -> StepResult:
        """Of a draft: one token, or none."""
        if not result.token_ids:
            return result
        [token_id] = result.token_ids
        choices = (*self._hurtful, item.token_ids[-1], token_id, token_id, token_id)
        chosen = self._random.choice(choices)
        runner_ups = tuple(
            tuple(i for i in (*ids, token_id) if i != chosen)[: len(ids)]
            for ids in result.runner_ups
        )
        return replace(result, token_ids=(chosen,), runner_ups=runner_ups)


def save_tokenizer(folder: Path) -> int:
    """A byte-level BPE with some tokens of JSON; returns its vocabulary's size. Id 0 is EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    value = {"kind": "circle", "at": {"x": 12, "style": {"name": "ab", "on": True, "dots": [1]}}}
    tokenizer.train_from_iterator([json.dumps(value, separators=(",", ":"))] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())


def save_model(folder: Path, seed: int) -> Path:
    """A random Llama over that tokenizer, its output layer wider than the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = save_tokenizer(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=-(-vocab_size // 16) * 16 + 16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
