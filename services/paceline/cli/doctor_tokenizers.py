"""What `paceline doctor` makes of two tokenizers: the same, translated, or a misfit. Pure.

Measuring an overlap needs files: that is `doctor_facts`' part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.cli.model_facts import ModelShape
from paceline.config import ModelConfig
from paceline.engine.translation import EXPANSION

Status = Literal["ok", "warn", "fail"]

# Below this share of the sample's tokens a translated draft is rarely worth its time.
MIN_SAMPLE_SHARE = 0.5
# English, code and figures, as chats have them. What can be proposed of it is measured.
SAMPLE = (
    "The committee met on 14 March 2024 to discuss the report. Most members agreed that the new "
    "schedule works well, although travel remains expensive; a decision is expected next week.\n"
    "\n"
    "def moving_average(values, size):\n"
    '    """The mean of each window of `size` values."""\n'
    "    total = sum(values[:size])\n"
    "    averages = [total / size]\n"
    "    for new, old in zip(values[size:], values):\n"
    "        total += new - old\n"
    "        averages.append(total / size)\n"
    "    return averages\n"
)


def context(draft: ModelConfig) -> int:
    """Tokens of the target that a draft announces to read."""
    return int(draft.max_model_len / (EXPANSION if draft.target_tokenizer else 1))


def enough(draft: ModelConfig, length: int) -> int:
    """The `max_model_len` with which it announces `length`."""
    return math.ceil(length * (EXPANSION if draft.target_tokenizer else 1))


@dataclass(frozen=True, slots=True)
class OverlapFacts:
    """Of a draft that translates: tokens that both tokenizers have, of how many each has.

    `sample_share`: of the target's tokens of `SAMPLE`, those that can be proposed.
    `tokenizer_hash`: of the tokenizer that the draft translates to. `problem`: why it cannot.
    """

    source: str
    num_common: int = 0
    num_draft: int = 0
    num_target: int = 0
    sample_share: float = 0.0
    tokenizer_hash: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """Status, fact and fix of a `Finding`."""

    status: Status
    fact: str
    fix: str = ""


def judge(
    target: ModelShape,
    draft: ModelShape,
    overlap: OverlapFacts | None,
    draft_key: str,
    target_source: str,
) -> Fit | None:
    """None where a GGUF file holds a tokenizer: then the handshake has to say."""
    other = _another_draft(draft_key)
    if overlap is not None:
        return _judge_overlap(target, draft, overlap, draft_key, target_source)
    if target.gguf_bytes or draft.gguf_bytes:
        return None
    if target.tokenizer_hash != draft.tokenizer_hash:
        fix = f"{draft_key}.target_tokenizer: {target_source}, so that it translates, or {other}"
        return Fit("fail", "their tokenizers differ", fix)
    if target.vocab_size != draft.vocab_size:
        sizes = f"vocab_size {target.vocab_size} and {draft.vocab_size}"
        return Fit("fail", f"same tokenizer, but {sizes}", other)
    return Fit("ok", f"same tokenizer, {target.vocab_size} ids")


def _another_draft(key: str) -> str:
    return f"{key}.source: a draft made for this target, or speculation.method: 'off'"


def _judge_overlap(
    target: ModelShape,
    draft: ModelShape,
    overlap: OverlapFacts,
    draft_key: str,
    target_source: str,
) -> Fit:
    key = f"{draft_key}.target_tokenizer"
    fix = f"{key}: {target_source}"
    if overlap.source == target_source:  # set already: the draft is what does not fit
        fix = _another_draft(draft_key)
    if overlap.problem:
        return Fit("fail", overlap.problem, fix)
    if target.tokenizer_hash and target.tokenizer_hash != overlap.tokenizer_hash:
        fact = f"{overlap.source} has another tokenizer than the target"
        return Fit("fail", fact, fix)
    if (draft.tokenizer_hash, draft.vocab_size) == (overlap.tokenizer_hash, target.vocab_size):
        fact = f"it translates, but the tokenizers are the same: it costs {1 - 1 / EXPANSION:.0%}"
        return Fit("warn", f"{fact} of the draft's context", f"no {key}")
    common = overlap.num_common
    fact = (
        f"{common} common tokens: {common / overlap.num_draft:.0%} of the draft's"
        f" {overlap.num_draft}, {common / overlap.num_target:.0%} of the target's"
        f" {overlap.num_target}, {overlap.sample_share:.0%} of a sample text's"
    )
    if overlap.sample_share < MIN_SAMPLE_SHARE:
        fix = "a draft whose tokenizer is more like the target's: no other token can be proposed"
        return Fit("warn", fact, fix)
    return Fit("ok", fact)
