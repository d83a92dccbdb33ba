"""What a row of logits becomes, in plain Python floats: `engine/sampler.py` for the toy.

Every rule is the reference of `sampling/`, row by row. Knows no cache, no tensor and no text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.engine.base import Verify
from paceline.generation import TokenLogprobs
from paceline.sampling.acceptance import (
    Acceptance,
    accept_block,
    accept_rejection,
    coupled_token,
)
from paceline.sampling.noise import Purpose, exponential, gumbel, noise_word, noise_words, unit
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.processors import MASKED, adjust_logits, process_logits, softmax
from paceline.sampling.sparse_probs import MAX_DROPPED_MASS, SparseProbs, quantize_probs

_MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say
_HIGH_HALF = 16  # a law is drawn from with the upper 16 of a word's 32 bits


@dataclass(frozen=True, slots=True)
class ToyRow:
    """One row to sample; histories and allowed ids are what `process_logits` asks for."""

    logits: Sequence[float]
    sampling: SamplingParams
    output_index: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    allowed_token_ids: Collection[int] | None = None

    @property
    def given(self) -> tuple[Sequence[int], Sequence[int], Collection[int] | None]:
        return self.prompt_token_ids, self.output_token_ids, self.allowed_token_ids

    def token(self) -> int:
        """The row's plain token."""
        return coupled_token(self.logits, self.sampling, self.output_index, *self.given)

    def probs(self) -> list[float]:
        """The law that is sampled, [vocab_size]."""
        return softmax(process_logits(self.logits, self.sampling, *self.given))

    def word(self, purpose: Purpose, round: int) -> int:
        """The noise that no token id has a part in."""
        sampling = self.sampling
        return noise_word(
            sampling.seed,
            self.output_index,
            0,
            choice=sampling.choice,
            purpose=purpose,
            round=round,
        )

    def arrivals(self, round: int) -> list[float]:
        """Exp(1) per token id, for the recovered or bonus token."""
        words = noise_words(
            self.sampling.seed,
            self.output_index,
            range(len(self.logits)),
            choice=self.sampling.choice,
            purpose=Purpose.RESIDUAL,
            round=round,
        )
        return [exponential(word) for word in words]


def best_tokens(row: ToyRow, num_best: int) -> tuple[int, ...]:
    """The ids that come out of a row, best first: its own token (`coupled_token`), then what would
    come out if those before it could not. Fewer where fewer ids are possible."""
    sampling = row.sampling
    if sampling.is_greedy:
        scores = adjust_logits(row.logits, sampling, *row.given)
        live = [i for i, score in enumerate(scores) if score != MASKED]
    else:
        scores = process_logits(row.logits, sampling, *row.given)
        live = [i for i, score in enumerate(scores) if score != MASKED]
        words = noise_words(sampling.seed, row.output_index, live, choice=sampling.choice)
        for token_id, word in zip(live, words, strict=True):
            scores[token_id] += gumbel(word)
    return tuple(sorted(live, key=lambda i: (-scores[i], i))[:num_best])


def propose(row: ToyRow, round: int) -> tuple[int, SparseProbs]:
    """A token and the law that it was drawn from: quantised first, then drawn."""
    law = quantize_probs(row.probs(), max_dropped_mass=MAX_DROPPED_MASS)
    return law.draw(row.word(Purpose.DRAFT_PROPOSAL, round) >> _HIGH_HALF), law


def verify(rows: Sequence[ToyRow], draft_token_ids: Sequence[int], rule: Verify) -> Acceptance:
    """Accept proposals by their laws; one row more than there are proposals."""
    is_block = rule.mode is VerificationMode.BLOCK
    accept = accept_block if is_block else accept_rejection
    purpose = Purpose.BLOCK_UNIFORM if is_block else Purpose.ACCEPT_UNIFORM
    return accept(
        draft_token_ids,
        rule.draft_probs,
        [row.probs() for row in rows],
        [unit(row.word(purpose, rule.round)) for row in rows[:-1]],
        [row.arrivals(rule.round) for row in rows],
    )


def logprobs(logits: Sequence[float], token_id: int, num_top: int) -> TokenLogprobs:
    """A token under the raw logits; see `engine/logprobs.py`, whose floor it shares."""
    peak = max(logits)
    log_total = peak + math.log(math.fsum(math.exp(logit - peak) for logit in logits))

    def logprob(i: int) -> float:
        return max(logits[i] - log_total, _MIN_LOGPROB)

    top = sorted(range(len(logits)), key=lambda i: -logits[i])[:num_top] if num_top else []
    rank = 1 + sum(logit > logits[token_id] for logit in logits)
    return TokenLogprobs(token_id, logprob(token_id), rank, tuple((i, logprob(i)) for i in top))
