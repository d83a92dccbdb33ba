"""The exact acceptance rules of speculative decoding, with randomness as an argument.

Reference code: plain loops, valid for floats and for `fractions.Fraction` alike, so that tests
can prove losslessness with no rounding at all. `engine/sampler.py` is the batched twin.
In the comments p is the target's law, q the draft's, x the proposal (Leviathan et al. 2023; the
block rule: Sun et al. 2024).
Knows no model, no protocol and no source of random numbers but the keyed noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from paceline.errors import LocalProtocolError
from paceline.sampling.noise import gumbel, noise_words
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import MASKED, adjust_logits, greedy_token, process_logits
from paceline.sampling.sparse_probs import TOTAL_WEIGHT, SparseProbs

__all__ = [
    "Acceptance",
    "DraftProbs",
    "Number",
    "accept_block",
    "accept_matching",
    "accept_rejection",
    "coupled_token",
    "greedy_token",
    "race",
    "verifiable_len",
]

Number = float | Fraction
DraftProbs = Sequence[Number] | SparseProbs

# Below it the laws are equal up to rounding and their difference is noise.
MIN_RESIDUAL_MASS = 1e-12


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a pass commits: that many draft tokens, then the recovered or bonus token."""

    num_accepted_tokens: int
    next_token_id: int


def coupled_token(
    logits: Sequence[float],
    params: SamplingParams,
    output_index: int,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    allowed_token_ids: Collection[int] | None = None,
) -> int:
    """The plain engine's token at `output_index`: argmax of processed logits + keyed Gumbel.

    Greedy parameters skip the noise. The draft calls it too, with its own logits: the same noise
    makes it propose what the target will most likely choose. Histories and allowed ids as in
    `adjust_logits`.
    """
    given = (prompt_token_ids, output_token_ids, allowed_token_ids)
    if params.is_greedy:
        return greedy_token(adjust_logits(logits, params, *given))
    processed = process_logits(logits, params, *given)
    live = [token_id for token_id, logit in enumerate(processed) if logit != MASKED]
    words = noise_words(params.seed, output_index, live, choice=params.choice)
    scores = [processed[i] + gumbel(word) for i, word in zip(live, words, strict=True)]
    return live[greedy_token(scores)]


def accept_matching(draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int]) -> Acceptance:
    """Greedy, coupled and one-hot drafts: accept while the draft equals the target's own sample.

    `sampled_token_ids` has one entry more than the draft: row i was sampled after the draft's
    first i tokens. Exact for any proposal whatever, since only target samples are committed.
    """
    if len(sampled_token_ids) != len(draft_token_ids) + 1:
        raise LocalProtocolError(
            f"{len(draft_token_ids)} draft tokens need {len(draft_token_ids) + 1} samples, "
            f"got {len(sampled_token_ids)}"
        )
    num_accepted = 0
    for draft_token_id, sampled in zip(draft_token_ids, sampled_token_ids, strict=False):
        if draft_token_id != sampled:
            break
        num_accepted += 1
    return Acceptance(num_accepted, sampled_token_ids[num_accepted])


def verifiable_len(draft_token_ids: Sequence[int], draft_probs: Sequence[DraftProbs]) -> int:
    """Leading proposals that their stated laws can have produced.

    A peer that sends x outside the support of q is lying about q. The caller counts a protocol
    error and cuts the block here, as if the rest had never been sent; q is never guessed.
    """
    for i, (token_id, probs) in enumerate(zip(draft_token_ids, draft_probs, strict=True)):
        weight_of, _ = _weights(probs)
        if not weight_of(token_id) > 0:
            return i
    return len(draft_token_ids)


def accept_rejection(
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[DraftProbs],
    target_probs: Sequence[Sequence[Number]],
    uniforms: Sequence[Number],
    residual_noise: Sequence[Sequence[Number]],
) -> Acceptance:
    """Token-level rule (Leviathan, Chen): accept x with probability min(1, p(x) / q(x)).

    `target_probs` and `residual_noise` have one row more than there are draft tokens;
    `residual_noise` rows are Exp(1) per token id, independent of the draft's noise (C3).
    """
    _check_shapes(draft_token_ids, draft_probs, target_probs, uniforms, residual_noise)
    one: Number = 1
    for i, token_id in enumerate(draft_token_ids):
        weight_of, total = _weights(draft_probs[i])
        # strict: a token of probability 0 is refused even if the uniform is 0
        if not uniforms[i] * weight_of(token_id) < target_probs[i][token_id] * total:
            weights = _residual(one, target_probs[i], draft_probs[i])
            return Acceptance(i, race(weights, residual_noise[i]))
    bonus = race(target_probs[-1], residual_noise[-1])
    return Acceptance(len(draft_token_ids), bonus)


def accept_block(
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[DraftProbs],
    target_probs: Sequence[Sequence[Number]],
    uniforms: Sequence[Number],
    residual_noise: Sequence[Sequence[Number]],
) -> Acceptance:
    """Block verification (Sun et al.): accepts at least as much as the token rule on average.

    Arguments as in `accept_rejection`. Exact only if the block's length was fixed before any
    token was sampled (B1) and all randomness is new in every round (B2).
    """
    _check_shapes(draft_token_ids, draft_probs, target_probs, uniforms, residual_noise)
    num_accepted = 0
    ratio: Number = 1  # P_i: how likely the first i tokens stay
    ratio_at_accepted: Number = 1
    last = len(draft_token_ids)
    for i, token_id in enumerate(draft_token_ids, start=1):
        weight_of, total = _weights(draft_probs[i - 1])
        scaled = ratio * target_probs[i - 1][token_id] * total / weight_of(token_id)
        ratio = min(scaled, 1)
        threshold = ratio
        if i < last:
            threshold = _block_threshold(ratio, target_probs[i], draft_probs[i])
        # no break at a failure: a later position may rescue the earlier ones
        if uniforms[i - 1] < threshold:
            num_accepted, ratio_at_accepted = i, ratio
    weights = target_probs[num_accepted]
    if num_accepted < last:
        weights = _residual(ratio_at_accepted, weights, draft_probs[num_accepted])
    return Acceptance(num_accepted, race(weights, residual_noise[num_accepted]))


def race(weights: Sequence[Number], noise: Sequence[Number]) -> int:
    """One draw in proportion to `weights`: the earliest of exponential arrivals, lowest id first.

    `noise` is Exp(1) per token id; the weights need no normalisation.
    """
    winner: int | None = None
    earliest: Number = 0
    for token_id, weight in enumerate(weights):
        if not weight > 0:
            continue
        arrival = noise[token_id] / weight
        if winner is None or arrival < earliest:
            winner, earliest = token_id, arrival
    if winner is None:
        raise LocalProtocolError("a law without mass cannot be sampled")
    return winner


def _weights(probs: DraftProbs) -> tuple[Callable[[int], Number], int]:
    """A row as (weight of a token, total): both kinds stay exact, no division is made."""
    if isinstance(probs, SparseProbs):
        return probs.weight, TOTAL_WEIGHT
    return probs.__getitem__, 1


def _residual(
    scale: Number, target_row: Sequence[Number], draft_row: DraftProbs
) -> Sequence[Number]:
    """max(scale * p - q, 0), not normalised; p itself where nothing is left of it."""
    weight_of, total = _weights(draft_row)
    zero = 0 * scale
    weights = [
        max(scale * prob * total - weight_of(token_id), zero)
        for token_id, prob in enumerate(target_row)
    ]
    if sum(weights) <= MIN_RESIDUAL_MASS * total:
        return target_row
    return weights


def _block_threshold(ratio: Number, target_row: Sequence[Number], draft_row: DraftProbs) -> Number:
    """h_i = S / (S + 1 - P_i) with S the residual mass of the next position; 1 for 0 / 0."""
    weight_of, total = _weights(draft_row)
    mass = 0 * ratio  # a zero of the caller's number type
    for token_id, prob in enumerate(target_row):
        mass += max(ratio * prob * total - weight_of(token_id), 0)
    denominator = mass + (1 - ratio) * total
    return mass / denominator if denominator > 0 else 1


def _check_shapes(
    draft_token_ids: Sequence[int],
    draft_probs: Sequence[DraftProbs],
    target_probs: Sequence[Sequence[Number]],
    uniforms: Sequence[Number],
    residual_noise: Sequence[Sequence[Number]],
) -> None:
    num = len(draft_token_ids)
    shapes = (len(draft_probs), len(uniforms), len(target_probs), len(residual_noise))
    if shapes != (num, num, num + 1, num + 1):
        raise LocalProtocolError(f"{num} draft tokens do not fit rows {shapes}")
    if verifiable_len(draft_token_ids, draft_probs) != num:
        raise LocalProtocolError("a draft token has no mass in its own law: cut the block first")
