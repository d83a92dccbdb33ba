"""Penalties, bias, grammar and min tokens on rows of logits: the torch twin of `adjust_logits`.

Bit for bit the reference (`sampling.processors`, which also fixes the order of operations): few
ids of a row change, each by float64 operations that IEEE 754 rounds exactly. A row depends on its
own history alone. Never `torch.compile` this file (see `keyed_noise`).
Knows rows and histories; no noise, no cache and no draft.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.engine.token_counts import TokenCounts
from paceline.sampling.params import SamplingParams

_MASKED = float("-inf")
_FLOAT32_MAX = torch.finfo(torch.float32).max
# The bits of a byte, lowest first: bool [256, 8].
_BITS = (torch.arange(256)[:, None] >> torch.arange(8)) % 2 == 1


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits becomes a token: `output_index` is the noise key.

    `output_token_ids` is what was generated before this row's token, the drafts of the same block
    that precede it included. Only parameters that adjust logits read the two histories.
    `counts`, if given, are those of the whole prompt and of all but the last few of the output:
    then only these few are read here. Rows of one sequence share one object.
    `bitmask`: the ids that the grammar allows, id i at bit i % 8 of byte i // 8; None: all.
    """

    sampling: SamplingParams
    output_index: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    counts: TokenCounts | None = field(default=None, compare=False, repr=False)
    bitmask: bytes | None = field(default=None, repr=False)

    @property
    def is_adjusted(self) -> bool:
        return self.sampling.is_adjusting(len(self.output_token_ids))


@dataclass(frozen=True, slots=True)
class _Base:
    """`counts` on the device, without ids beyond the row: ids int64 [n], times float64 [n].

    Without repetition penalty only the ids of the output.
    """

    counts: TokenCounts
    token_ids: torch.Tensor
    times: torch.Tensor


def adjust_rows(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """A float64 copy of logits [len(rows), vocab_size] after the first four processors."""
    exact = logits.to(torch.float64, copy=True)
    bases: dict[tuple[int, bool], _Base] = {}
    for values, row in zip(exact, rows, strict=True):
        if not row.is_adjusted:
            continue
        params = row.sampling
        if params.has_penalties:
            # by identity: rows of a block share the counts, and `rows` keeps them alive
            owner = row if row.counts is None else row.counts
            key = (id(owner), params.repetition_penalty != 1.0)
            if key not in bases:
                bases[key] = _base(row, values)
            _penalize(values, row, bases[key])
        _add_bias(values, params)
    _apply_bitmasks(exact, rows)
    for values, row in zip(exact, rows, strict=True):
        params = row.sampling
        if params.stop_token_ids and len(row.output_token_ids) < params.min_tokens:
            _hold_back(values, params)
    return exact


def tame_logits(logits: torch.Tensor) -> torch.Tensor:
    """Finite float64 stand-ins for a row outside the arithmetic: NaN, infinities."""
    limit = _FLOAT32_MAX
    return torch.nan_to_num(logits.double(), nan=-limit, posinf=limit, neginf=-limit)


def _base(row: SampleRow, values: torch.Tensor) -> _Base:
    counts = row.counts
    if counts is None:
        counts = TokenCounts(len(row.prompt_token_ids))
        counts.extend(row.prompt_token_ids)
        counts.extend(row.output_token_ids)
    token_ids = _copied(counts.token_ids, torch.int64)
    times = _copied(counts.num_in_output, torch.float64)
    is_known = token_ids < values.shape[0]
    if row.sampling.repetition_penalty == 1.0:
        is_known &= times > 0.0  # no other penalty reads the prompt
    return _Base(counts, token_ids[is_known].to(values.device), times[is_known].to(values.device))


def _copied(column: array[int] | array[float], dtype: torch.dtype) -> torch.Tensor:
    # an array that a tensor looks into could not grow any more
    return torch.frombuffer(column, dtype=dtype).clone() if column else torch.empty(0, dtype=dtype)


def _penalize(values: torch.Tensor, row: SampleRow, base: _Base) -> None:
    """The ids of the base, then again from their old logits those few whose count is higher."""
    params, totals = row.sampling, _later_totals(row, base.counts, values.shape[0])
    later_ids = _ids(totals, values)
    before = values[later_ids]
    # no id occurs twice, and for distinct ids this is the faster way to write `values[ids] = ...`
    seen = values.index_select(0, base.token_ids)
    values.index_copy_(0, base.token_ids, _penalized(seen, base.times, params))
    if totals:
        times = torch.tensor(list(totals.values()), dtype=torch.float64, device=values.device)
        values[later_ids] = _penalized(before, times, params)


def _later_totals(row: SampleRow, counts: TokenCounts, vocab_size: int) -> dict[int, float]:
    """Id -> how often it is in the row's output, for the ids that `counts` has not all of."""
    num_base = counts.length - len(row.prompt_token_ids)
    totals: dict[int, float] = {}
    for token_id in row.output_token_ids[num_base:]:
        if token_id < vocab_size:
            totals[token_id] = totals.get(token_id, counts.count(token_id)) + 1.0
    return totals


def _penalized(seen: torch.Tensor, times: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits of ids of the prompt or the output; `times` 0: of the prompt alone."""
    if params.repetition_penalty != 1.0:
        # a tensor, since on a GPU a division by a Python number is a product with its reciprocal
        factor = torch.full_like(seen, params.repetition_penalty)
        seen = torch.where(seen > 0.0, seen / factor, seen * factor)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        lowered = seen - times * params.frequency_penalty
        # a prompt's id keeps even the sign of its zero
        seen = torch.where(times > 0.0, lowered - params.presence_penalty, seen)
    return seen


def _add_bias(values: torch.Tensor, params: SamplingParams) -> None:
    biases = {i: bias for i, bias in params.logit_bias if i < values.shape[0]}
    if biases:
        added = torch.tensor(list(biases.values()), dtype=torch.float64, device=values.device)
        values[_ids(biases, values)] += added


def _apply_bitmasks(exact: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """All rows of a pass at once: a mask of one row costs more to start than to compute."""
    masked = [(index, row.bitmask) for index, row in enumerate(rows) if row.bitmask is not None]
    if not masked:
        return
    vocab_size = exact.shape[1]
    num_bytes = -(-vocab_size // 8)
    packed = b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for _, mask in masked)
    words = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(exact.device)
    is_allowed = _BITS.to(exact.device).index_select(0, words.int())
    is_allowed = is_allowed.view(len(masked), -1)[:, :vocab_size]
    # a mask without any id of the row is not applied
    is_forbidden = ~is_allowed & is_allowed.any(dim=1, keepdim=True)
    is_whole = len(masked) == len(rows)
    places = torch.tensor([index for index, _ in masked], device=exact.device)
    values = exact if is_whole else exact[places]
    values.masked_fill_(is_forbidden, _MASKED)
    are_excluded = values.amax(dim=1, keepdim=True) == _MASKED
    if bool(are_excluded.any()):
        values.masked_fill_(are_excluded & ~is_forbidden, 0.0)
    if not is_whole:
        exact[places] = values


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
