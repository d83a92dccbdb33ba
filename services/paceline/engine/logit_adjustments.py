"""Penalties, logit bias and min tokens on rows of logits: the torch twin of `adjust_logits`.

Bit for bit the reference (`sampling.processors`, which also fixes the order of operations): few
ids of a row change, each by float64 operations that IEEE 754 rounds exactly. A row depends on its
own history alone. Never `torch.compile` this file (see `keyed_noise`).
Knows rows and histories; no noise, no cache and no draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.sampling.params import SamplingParams

_MASKED = float("-inf")
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits becomes a token: `output_index` is the noise key.

    `output_token_ids` is what was generated before this row's token, the drafts of the same block
    that precede it included. Only parameters that adjust logits read the two histories; rows of
    one sequence should share one `prompt_token_ids` object, which is then converted once.
    """

    sampling: SamplingParams
    output_index: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()

    @property
    def is_adjusted(self) -> bool:
        return self.sampling.is_adjusting(len(self.output_token_ids))


def adjust_rows(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """A float64 copy of logits [len(rows), vocab_size] after the first three processors."""
    exact = logits.to(torch.float64, copy=True)
    prompts: dict[int, torch.Tensor] = {}
    for values, row in zip(exact, rows, strict=True):
        if not row.is_adjusted:
            continue
        params = row.sampling
        if params.repetition_penalty != 1.0:
            # by identity: rows of a block share the tuple, and `rows` keeps it alive
            key = id(row.prompt_token_ids)
            if key not in prompts:
                prompts[key] = _ids(row.prompt_token_ids, values)
            _repeat(values, prompts[key], row.output_token_ids, params.repetition_penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            _count(values, params, row.output_token_ids)
        _add_bias(values, params)
        if len(row.output_token_ids) < params.min_tokens:
            _hold_back(values, params)
    return exact


def tame_logits(logits: torch.Tensor) -> torch.Tensor:
    """Finite float64 stand-ins for a row outside the arithmetic: NaN, infinities."""
    limit = _FLOAT32_MAX
    return torch.nan_to_num(logits.double(), nan=-limit, posinf=limit, neginf=-limit)


def _repeat(
    values: torch.Tensor, prompt_ids: torch.Tensor, output: Sequence[int], penalty: float
) -> None:
    token_ids = torch.cat((prompt_ids, _ids(output, values)))
    seen = values[token_ids]
    # an id may occur often, but each time with the same new value
    # a tensor, since on a GPU a division by a Python number is a product with its reciprocal
    factor = torch.full_like(seen, penalty)
    values[token_ids] = torch.where(seen > 0.0, seen / factor, seen * factor)


def _count(values: torch.Tensor, params: SamplingParams, output: Sequence[int]) -> None:
    counts = {i: n for i, n in Counter(output).items() if i < values.shape[0]}
    token_ids = _ids(counts, values)
    times = torch.tensor(list(counts.values()), dtype=torch.float64, device=values.device)
    once = values[token_ids] - times * params.frequency_penalty
    values[token_ids] = once - params.presence_penalty


def _add_bias(values: torch.Tensor, params: SamplingParams) -> None:
    biases = {i: bias for i, bias in params.logit_bias if i < values.shape[0]}
    if biases:
        added = torch.tensor(list(biases.values()), dtype=torch.float64, device=values.device)
        values[_ids(biases, values)] += added


def _hold_back(values: torch.Tensor, params: SamplingParams) -> None:
    token_ids = _ids(params.stop_token_ids, values)
    before = values[token_ids]
    values[token_ids] = _MASKED
    if not bool((values != _MASKED).any()):
        values[token_ids] = before


def _ids(token_ids: Iterable[int], values: torch.Tensor) -> torch.Tensor:
    """int64 ids on the row's device, without those beyond the row."""
    known = torch.tensor(list(token_ids), dtype=torch.int64)
    return known[known < values.shape[0]].to(values.device)
