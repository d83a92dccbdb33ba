"""Verification by stated laws: the batched twin of `accept_rejection` and `accept_block`.

A proposal's law has at most 64 entries, so a rule needs the target's probabilities at those ids
alone: with S the ids of q, the residual mass is
    sum(max(scale * p - q, 0)) = scale * (1 - p(S)) + sum over S of max(scale * p - q, 0)
and the residual differs from p at those ids alone. Probabilities are float64; the rules run on
Python floats in the reference's order. In the comments p is the target's law, q the draft's.
Knows rows and blocks; no cache, no sequence and no peer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.base import Verify
from paceline.engine.keyed_noise import make_keys, token_words
from paceline.engine.logit_adjustments import SampleRow, adjust_rows, tame_logits
from paceline.engine.logit_filters import is_filtered, mask_scaled
from paceline.errors import LocalProtocolError
from paceline.sampling.acceptance import MIN_RESIDUAL_MASS
from paceline.sampling.noise import Purpose, noise_word, unit
from paceline.sampling.params import VerificationMode
from paceline.sampling.sparse_probs import (
    MAX_DROPPED_MASS,
    MAX_ENTRIES,
    TOTAL_WEIGHT,
    SparseProbs,
    quantize_ranked,
)

_MASKED = float("-inf")
_WORD_SHIFT = 16  # a law is drawn with the high 16 bits of a 32-bit word


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The proposals of one sequence and the rows that judge them.

    Invariant: one row more than there are proposals and laws; row i was computed after the
    block's first i tokens, and its history holds them.
    """

    rows: Sequence[SampleRow]
    draft_token_ids: Sequence[int]
    rule: Verify

    def __post_init__(self) -> None:
        num = len(self.draft_token_ids)
        shapes = (len(self.rule.draft_probs), len(self.rows))
        if shapes != (num, num + 1):
            raise LocalProtocolError(f"{num} draft tokens do not fit laws and rows {shapes}")
        for token_id, law in zip(self.draft_token_ids, self.rule.draft_probs, strict=True):
            if law.weight(token_id) == 0:
                raise LocalProtocolError("a draft token has no mass in its own law: cut it first")
        if self.rule.mode not in (VerificationMode.REJECTION, VerificationMode.BLOCK):
            raise LocalProtocolError(f"{self.rule.mode} does not verify by stated laws")


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """Where a block ends, and the law of the token after it.

    `row` is the deciding row of the pass. Its weights are p, but for `weights` (in units of p's
    own sum) at `token_ids`.
    """

    num_accepted: int
    row: int
    token_ids: Sequence[int] = ()
    weights: Sequence[float] = ()


def law_rows(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, int]:
    """Processed logits, float64 [rows, vocab_size] with peak 0, and how many rows were bad.

    `softmax` of a row is the law of its token, for greedy parameters that of one token. Rows with
    NaN or without a finite peak are made finite first, as the sampler does.
    """
    exact, num_bad = _sound(logits)
    exact = adjust_rows(exact, rows)
    temperatures = torch.tensor(
        [[1.0 if row.sampling.is_greedy else row.sampling.temperature] for row in rows],
        dtype=torch.float64,
        device=exact.device,
    )
    scaled = (exact - exact.amax(dim=1, keepdim=True)) / temperatures
    for index, row in enumerate(rows):
        if row.sampling.is_greedy:
            best = int((scaled[index] == 0.0).nonzero()[0, 0])
            scaled[index] = _MASKED
            scaled[index, best] = 0.0
        elif is_filtered(row.sampling, scaled.shape[1]):
            scaled[index] = mask_scaled(scaled[index], row.sampling)
    return scaled, num_bad


def draw_proposals(
    scaled: torch.Tensor, rows: Sequence[SampleRow], rounds: Sequence[int]
) -> list[tuple[int, SparseProbs]]:
    """A token per row of `law_rows`, drawn from its quantised law.

    The law keeps the top entries, as few as leave at most 1 % out and at most 64. Which of several
    ids tied at the 64th place is kept is the device's choice, and no matter.
    """
    top = scaled.topk(min(MAX_ENTRIES, scaled.shape[1]))
    shares = top.values.exp() / scaled.exp().sum(dim=1, keepdim=True)
    keys = make_keys(
        [(row.sampling.seed, row.sampling.choice, row.output_index) for row in rows],
        scaled.device,
        Purpose.DRAFT_PROPOSAL,
        rounds,
    )
    words = token_words(torch.zeros_like(top.indices[:, :1]), keys)[:, 0].tolist()
    drawn = []
    for token_ids, probs, word in zip(top.indices.tolist(), shares.tolist(), words, strict=True):
        law = quantize_ranked(token_ids, probs, max_dropped_mass=MAX_DROPPED_MASS)
        drawn.append((law.draw(word >> _WORD_SHIFT), law))
    return drawn


def accept_blocks(scaled: torch.Tensor, blocks: Sequence[DraftBlock]) -> list[BlockEnd]:
    """Applies each block's rule; `scaled` are the `law_rows` of all blocks, one after another."""
    judged: list[int] = []
    laws: list[SparseProbs] = []
    first_rows, num_rows = [], 0
    for block in blocks:
        first_rows.append(num_rows)
        judged += range(num_rows, num_rows + len(block.draft_token_ids))
        laws += block.rule.draft_probs
        num_rows += len(block.rows)
    probs = _probs_at(scaled, judged, laws)
    ends, taken = [], 0
    for block, first_row in zip(blocks, first_rows, strict=True):
        num = len(block.draft_token_ids)
        accept = _accept_block if block.rule.mode is VerificationMode.BLOCK else _accept_tokens
        ends.append(
            _end(block, probs[taken : taken + num], first_row, accept(block, probs[taken:]))
        )
        taken += num
    return ends


def next_token_logits(scaled: torch.Tensor, ends: Sequence[BlockEnd]) -> torch.Tensor:
    """Log weights, float64 [blocks, vocab_size], of the token after each block."""
    rows = torch.tensor([end.row for end in ends], device=scaled.device)
    logits = scaled[rows]
    block = [index for index, end in enumerate(ends) for _ in end.token_ids]
    if not block:
        return logits
    token_ids = [token_id for end in ends for token_id in end.token_ids]
    weights = [weight for end in ends for weight in end.weights]
    changed = torch.tensor(weights, dtype=torch.float64, device=scaled.device)
    totals = logits.exp().sum(dim=1)[torch.tensor(block, device=scaled.device)]
    places = torch.tensor([block, token_ids], device=scaled.device)
    logits[places[0], places[1]] = (changed * totals).log()
    return logits


def _sound(logits: torch.Tensor) -> tuple[torch.Tensor, int]:
    peaks = logits.amax(dim=1)
    is_odd = ~peaks.isfinite()
    if not bool(is_odd.any()):
        return logits, 0
    is_bad = logits.isnan().any(dim=1) | ~logits.isfinite().any(dim=1)
    return torch.where(is_odd[:, None], tame_logits(logits), logits.double()), int(is_bad.sum())


def _probs_at(
    scaled: torch.Tensor, judged: Sequence[int], laws: Sequence[SparseProbs]
) -> list[list[float]]:
    """p at the ids of q, for each judged row; 0 for ids that the target does not have."""
    if not judged:
        return []
    vocab_size = scaled.shape[1]
    width = max(len(law.token_ids) for law in laws)
    padded = [[*law.token_ids, *[0] * (width - len(law.token_ids))] for law in laws]
    token_ids = torch.tensor(padded, device=scaled.device)
    weights = scaled[torch.tensor(judged, device=scaled.device)].exp()
    probs = weights.gather(1, token_ids.clamp(max=vocab_size - 1))
    probs = (probs / weights.sum(dim=1, keepdim=True)).masked_fill(token_ids >= vocab_size, 0.0)
    return [row[: len(law.token_ids)] for row, law in zip(probs.tolist(), laws, strict=True)]


def _accept_tokens(block: DraftBlock, probs: Sequence[Sequence[float]]) -> tuple[int, float]:
    """The token rule: how many proposals stay, and the scale of the residual."""
    for i, token_id in enumerate(block.draft_token_ids):
        law = block.rule.draft_probs[i]
        prob = probs[i][law.token_ids.index(token_id)]
        uniform = _uniform(block, i, Purpose.ACCEPT_UNIFORM)
        # strict: a token of probability 0 is refused even if the uniform is 0
        if not uniform * law.weight(token_id) < prob * TOTAL_WEIGHT:
            return i, 1.0
    return len(block.draft_token_ids), 1.0


def _accept_block(block: DraftBlock, probs: Sequence[Sequence[float]]) -> tuple[int, float]:
    """The block rule: the last position that passes, whatever the earlier ones did."""
    num_accepted, ratio, ratio_at_accepted = 0, 1.0, 1.0
    last = len(block.draft_token_ids)
    for i, token_id in enumerate(block.draft_token_ids, start=1):
        law = block.rule.draft_probs[i - 1]
        prob = probs[i - 1][law.token_ids.index(token_id)]
        ratio = min(ratio * prob * TOTAL_WEIGHT / law.weight(token_id), 1.0)
        threshold = ratio
        if i < last:
            mass = sum(_residual(ratio, probs[i], block.rule.draft_probs[i]))
            denominator = mass + (1.0 - ratio) * TOTAL_WEIGHT
            threshold = mass / denominator if denominator > 0.0 else 1.0
        if _uniform(block, i - 1, Purpose.BLOCK_UNIFORM) < threshold:
            num_accepted, ratio_at_accepted = i, ratio
    return num_accepted, ratio_at_accepted


def _residual(scale: float, probs: Sequence[float], law: SparseProbs) -> list[float]:
    """max(scale * p - q, 0) in units of 1 / 65536: at each id of q, then for all others as one."""
    inside = [
        max(scale * prob * TOTAL_WEIGHT - weight, 0.0)
        for prob, weight in zip(probs, law.weights, strict=True)
    ]
    return [*inside, scale * max(1.0 - math.fsum(probs), 0.0) * TOTAL_WEIGHT]


def _end(
    block: DraftBlock, probs: Sequence[Sequence[float]], first_row: int, found: tuple[int, float]
) -> BlockEnd:
    num_accepted, scale = found
    row = first_row + num_accepted
    if num_accepted == len(block.draft_token_ids):
        return BlockEnd(num_accepted, row)
    law = block.rule.draft_probs[num_accepted]
    residual = _residual(scale, probs[num_accepted], law)
    if sum(residual) <= MIN_RESIDUAL_MASS * TOTAL_WEIGHT:
        return BlockEnd(num_accepted, row)  # p and q are equal up to rounding
    # an id without any p has no residual, so what the target does not have is not written
    weights = [
        (token_id, weight / (scale * TOTAL_WEIGHT))
        for token_id, weight, prob in zip(
            law.token_ids, residual, probs[num_accepted], strict=False
        )
        if prob > 0.0
    ]
    return BlockEnd(num_accepted, row, [i for i, _ in weights], [w for _, w in weights])


def _uniform(block: DraftBlock, index: int, purpose: Purpose) -> float:
    row = block.rows[index]
    word = noise_word(
        row.sampling.seed,
        row.output_index,
        0,
        choice=row.sampling.choice,
        purpose=purpose,
        round=block.rule.round,
    )
    return unit(word)
