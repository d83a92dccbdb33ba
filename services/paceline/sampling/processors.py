"""From logits to the law that is sampled: temperature, then top-k, then top-p (vLLM's order).

The result is again a row of logits, `-inf` where a token may not be chosen, so that processors
compose and `softmax` of the result is the law. Knows no noise and no draft.

The row's peak is subtracted before the division by the temperature, so that no finite logit can
overflow: the best one is always exactly 0. `engine/sampler.py` does it in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.sampling.params import SamplingParams

MASKED = -math.inf


def greedy_token(logits: Sequence[float]) -> int:
    """The largest logit, the lowest id on ties."""
    return max(range(len(logits)), key=logits.__getitem__)


def process_logits(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The logits of the law that `params` asks for; greedy is the law of one token."""
    if params.is_greedy:
        best = greedy_token(logits)
        return [0.0 if token_id == best else MASKED for token_id in range(len(logits))]
    peak = max(logits)
    scaled = [(logit - peak) / params.temperature for logit in logits]
    return _mask_top_p(_mask_top_k(scaled, params.top_k), params.top_p)


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities of a row; at least one logit must be finite."""
    peak = max(logits)
    if not math.isfinite(peak):
        raise ValueError("a row of logits needs a finite maximum")
    weights = [math.exp(logit - peak) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


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
