"""Top-k, top-p and min-p on one row, as the reference does them (`sampling.processors`).

Row by row on purpose: a row's result must not depend on which rows share its pass. Knows one
row and its parameters; no noise, no keys.
"""

from __future__ import annotations

import math

import torch

from paceline.sampling.params import SamplingParams

# Most nuclei are smaller than this, and finding so many top logits is far cheaper than a sort.
_FIRST_TRY = 1024


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether these parameters exclude any token at all."""
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size or params.min_p > 0.0


def filter_row(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """A copy of logits [vocab_size] with -inf where the filters exclude a token."""
    exact = logits.double()
    # a tensor, since on a GPU a division by a Python number is a product with its reciprocal
    temperature = torch.full_like(exact[:1], params.temperature)
    scaled = mask_scaled((exact - exact.max()) / temperature, params)
    return logits.masked_fill(scaled == float("-inf"), float("-inf"))


def mask_scaled(scaled: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The filters on float64 [vocab_size], already divided by the temperature, peak 0."""
    if 0 < params.top_k < scaled.numel():
        threshold = scaled.topk(params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    if params.top_p < 1.0:
        scaled = _mask_top_p(scaled, params.top_p)
    if params.min_p > 0.0:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), float("-inf"))
    return scaled


def _mask_top_p(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    weights = (scaled - scaled.max()).exp()
    total = weights.sum()
    num_kept, values = _nucleus(scaled, total, top_p)
    if num_kept == scaled.numel():
        return scaled
    last = values[num_kept - 1]
    is_kept = scaled > last
    # Of the tokens tied with the last one, the lowest ids are in: nonzero() lists them in order.
    tied = (scaled == last).nonzero()[:, 0]
    is_kept[tied[: num_kept - int((values[:num_kept] > last).sum())]] = True
    return scaled.masked_fill(~is_kept, float("-inf"))


def _nucleus(scaled: torch.Tensor, total: torch.Tensor, top_p: float) -> tuple[int, torch.Tensor]:
    """How many tokens reach `top_p`, and the logits in descending order (at least those)."""
    for limit in (min(_FIRST_TRY, scaled.numel()), scaled.numel()):
        values = scaled.topk(limit).values
        mass = ((values - values[0]).exp() / total).cumsum(0)
        reached = int((mass < top_p).sum()) + 1
        if reached <= limit:
            return reached, values
    return scaled.numel(), values
