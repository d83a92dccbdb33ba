"""From logits to the law that is sampled, in one fixed order.

    penalties, bias, grammar, min tokens   on the model's own logits (`adjust_logits`)
    temperature, top-k, top-p, min-p       (`process_logits`)

The result is again a row of logits, `-inf` where a token may not be chosen, so that processors
compose and `softmax` of the result is the law. Knows no noise and no draft.

The torch twins (`engine/logit_adjustments.py`, `engine/logit_filters.py`) must give the same bits,
so every step below is one float64 operation per id, in this order:

    logit = logit / repetition_penalty if logit > 0 else logit * repetition_penalty
                                               ids of the prompt or the output
    logit = logit - frequency_penalty * count  ids of the output
    logit = logit - presence_penalty           ids of the output
    logit = logit + bias                       ids of the logit bias
    logit = -inf                               ids that the grammar does not allow here
    logit = -inf                               stop ids, while the output is too short
    scaled = (logit - peak) / temperature      peak: the largest logit by now

The row's peak is subtracted before the division by the temperature, so that no finite logit can
overflow: the best one is always exactly 0. Min-p compares scaled logits with log(min_p), since
the ratio of two probabilities is the difference of their logits, and exp() makes ties.

Ids beyond the row are ignored everywhere: a draft's row may be shorter than its target's. Where
min tokens would leave no finite logit it is not applied: an end that is the only choice beats a
token that is excluded. A grammar always holds: where the model excludes all that it allows, these
ids are equally likely (logit 0). Only if none of them is in the row it is not applied. A row has a
finite peak and no NaN; logits are within float32's range.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from paceline.sampling.params import SamplingParams

MASKED = -math.inf


def greedy_token(logits: Sequence[float]) -> int:
    """The largest logit, the lowest id on ties."""
    return max(range(len(logits)), key=logits.__getitem__)


def adjust_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    allowed_token_ids: Collection[int] | None = None,
) -> list[float]:
    """The first four processors: what greedy decoding takes the argmax of.

    `output_token_ids`: every token generated before this row's, drafts of its block included.
    `allowed_token_ids`: what the grammar of `params` allows after those; None: anything.
    """
    adjusted = list(logits)
    if params.has_penalties:
        _penalize(adjusted, params, prompt_token_ids, output_token_ids)
    for token_id, bias in params.logit_bias:
        if token_id < len(adjusted):
            adjusted[token_id] = adjusted[token_id] + bias
    if allowed_token_ids is not None:
        _mask_grammar(adjusted, allowed_token_ids)
    if len(output_token_ids) < params.min_tokens:
        held_back = {i for i in params.stop_token_ids if i < len(adjusted)}
        if any(logit != MASKED for i, logit in enumerate(adjusted) if i not in held_back):
            for token_id in held_back:
                adjusted[token_id] = MASKED
    return adjusted


def process_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    allowed_token_ids: Collection[int] | None = None,
) -> list[float]:
    """The logits of the law that `params` asks for; greedy is the law of one token."""
    logits = adjust_logits(logits, params, prompt_token_ids, output_token_ids, allowed_token_ids)
    if params.is_greedy:
        best = greedy_token(logits)
        return [0.0 if token_id == best else MASKED for token_id in range(len(logits))]
    peak = max(logits)
    scaled = [(logit - peak) / params.temperature for logit in logits]
    masked = _mask_top_p(_mask_top_k(scaled, params.top_k), params.top_p)
    return _mask_min_p(masked, params.min_p)


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities of a row; at least one logit must be finite."""
    peak = max(logits)
    if not math.isfinite(peak):
        raise ValueError("a row of logits needs a finite maximum")
    weights = [math.exp(logit - peak) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _penalize(
    logits: list[float],
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
) -> None:
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        for token_id in {*prompt_token_ids, *output_token_ids}:
            if token_id < len(logits):
                logit = logits[token_id]
                logits[token_id] = logit / penalty if logit > 0.0 else logit * penalty
    for token_id, count in Counter(output_token_ids).items():
        if token_id < len(logits):
            logit = logits[token_id] - params.frequency_penalty * count
            logits[token_id] = logit - params.presence_penalty


def _mask_grammar(logits: list[float], allowed_token_ids: Collection[int]) -> None:
    allowed = {token_id for token_id in allowed_token_ids if token_id < len(logits)}
    if not allowed:
        return
    are_excluded = all(logits[token_id] == MASKED for token_id in allowed)
    for token_id in range(len(logits)):
        if token_id not in allowed:
            logits[token_id] = MASKED
        elif are_excluded:
            logits[token_id] = 0.0


def _mask_top_k(logits: list[float], top_k: int) -> list[float]:
    if top_k == 0 or top_k >= len(logits):
        return logits
    threshold = sorted(logits, reverse=True)[top_k - 1]
    return [logit if logit >= threshold else MASKED for logit in logits]


def _mask_top_p(logits: list[float], top_p: float) -> list[float]:
    if top_p >= 1.0:
        return logits
    probs = softmax(logits)
    kept: set[int] = set()
    mass = 0.0
    # by logit, since exp() makes ties that are none; sorted() is stable: true ties by lowest id
    for token_id in sorted(range(len(logits)), key=lambda i: -logits[i]):
        kept.add(token_id)
        mass += probs[token_id]
        if mass >= top_p:
            break
    return [logit if i in kept else MASKED for i, logit in enumerate(logits)]


def _mask_min_p(logits: list[float], min_p: float) -> list[float]:
    """The peak is 0 here: no earlier filter removes the most likely token."""
    if min_p == 0.0:
        return logits
    threshold = math.log(min_p)
    return [logit if logit >= threshold else MASKED for logit in logits]
