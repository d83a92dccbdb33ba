"""The best ids of rows of logits: the largest logits, or the largest after keyed noise.

Why not all of the noise: with u uniform on (0, 1), gumbel = -log(-log(1 - u)), which is below
-log(u) and at most `MAX_GUMBEL` (about 22.9). A scaled logit is (logit - peak) / temperature, as
in `sampling.processors`: at most 0, so finite logits never overflow. Let s be the best exact score
among a row's top logits: the winner scores at least s. So a token with scaled logit x
 1. cannot win, whatever its noise, if x + MAX_GUMBEL < s: no Philox call for it;
 2. cannot win if x < s - HEAD_WIDTH and u > exp(-HEAD_WIDTH): no logarithm for it.
What is left, a few hundred tokens, is scored exactly, in the reference's arithmetic. Both bounds
get a slack for rounding: no winner is ever lost, and a loser let through only costs time. With the
n-th best score in the place of s the same holds for the n best tokens.

Knows tensors and keys; no parameters, no histories and no requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from paceline.engine.keyed_noise import IDS_PER_CALL, NoiseKeys, group_words, gumbel, token_words
from paceline.sampling import noise

MAX_GUMBEL = noise.gumbel(0)

# The bound s comes from so many top logits. More make it sharper, at a price.
_NUM_BOUND_TOKENS = 32
# So it can be the score of a row's n-th best token only for n up to that.
MAX_RANKED = _NUM_BOUND_TOKENS
# Tokens within this distance of the bound are scored whatever their noise; of the others only a
# share exp(-6) is. (At 6 both kinds are about equally many on a language model's logits.)
HEAD_WIDTH = 6.0
_MAX_TAIL_WORD = int(math.exp(-HEAD_WIDTH) * 2**32) + 1
# Covers the rounding of scores, of portable_log and of the float32 cuts, many times over.
_SLACK = 1e-3
_RELATIVE_SLACK = 1e-5
# Philox temporaries of this many elements stay in a CPU core's cache.
_CPU_CHUNK = 1 << 14
_DEVICE_CHUNK = 1 << 24

_MASKED = -math.inf

# Row ids [n]; token ids and scores [n, m], all of that row. An id may occur twice in a row.
Scored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def greedy_tokens(logits: torch.Tensor) -> dict[int, int]:
    """Row -> id of the largest logit, lowest id on ties; rows that hold NaN are left out.

    Not `argmax`: it promises no order among equal maxima.
    """
    best = logits.amax(dim=1, keepdim=True)
    tokens: dict[int, int] = {}
    for row, token_id in (logits == best).nonzero().tolist():
        tokens.setdefault(row, token_id)
    return tokens


def greedy_ranks(logits: torch.Tensor, num_best: int) -> dict[int, list[int]]:
    """Row -> ids of the `num_best` largest logits, best first, lowest id on ties.

    The first is `greedy_tokens`'s; behind it no id has a logit of -inf, so there may be fewer.
    Rows that hold NaN are left out.
    """
    best = logits.amax(dim=1, keepdim=True)
    cut = logits.topk(min(num_best, logits.shape[1])).values[:, -1:]
    is_best = ((logits >= cut) & (logits != _MASKED)) | (logits == best)
    row, token_id = (is_best & ~best.isnan()).nonzero(as_tuple=True)
    return _ranked(row, token_id, logits[row, token_id], num_best)


def coupled_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys
) -> dict[int, int]:
    """Row -> argmax of (logits - peak) / temperature + Gumbel, lowest id on ties.

    logits [rows, vocab_size], adjusted; temperatures float64 [rows, 1]. Rows that hold NaN or
    whose peak is not finite are left out.
    """
    logits = _padded(logits)
    peak, bound = _bound(logits, temperatures, keys, 1)
    tokens: dict[int, int] = {}
    for part in _candidates(logits, temperatures, keys, peak, bound):
        tokens |= _best(*part, logits.shape[0])
    is_sound = bound[:, 0].isfinite().tolist()
    return {row: token_id for row, token_id in tokens.items() if is_sound[row]}


def coupled_ranks(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys, num_best: int
) -> dict[int, list[int]]:
    """As `coupled_tokens`, but the `num_best` (<= MAX_RANKED) best ids of each row, best first.

    Fewer where fewer ids have a finite logit.
    """
    assert num_best <= MAX_RANKED, "the bound would not hold"
    logits = _padded(logits)
    peak, bound = _bound(logits, temperatures, keys, num_best)
    ranks: dict[int, list[int]] = {}
    for part in _candidates(logits, temperatures, keys, peak, bound):
        ranks |= _ranked_above(part, bound, num_best)
    return ranks


def top_n_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys, top_n: int
) -> dict[int, int]:
    """As `coupled_tokens`, but only a row's `top_n` largest logits take part."""
    rows, token_ids, scores = _top_n(logits, temperatures, keys, top_n)
    return _best(rows, token_ids, scores, logits.shape[0])


def top_n_ranks(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys, top_n: int, num_best: int
) -> dict[int, list[int]]:
    """As `coupled_ranks`, but only a row's `top_n` largest logits take part."""
    part = _top_n(logits, temperatures, keys, top_n)
    return _ranked_above(part, _nth_best(part[2], num_best), num_best)


def _top_n(logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys, top_n: int) -> Scored:
    top = logits.topk(min(top_n, logits.shape[1]))
    scaled = (top.values.double() - _peak(top.values)) / temperatures
    scores = scaled + gumbel(token_words(top.indices, keys))
    return torch.arange(logits.shape[0], device=logits.device), top.indices, scores


def _bound(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys, num_best: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's peak, and a score that its `num_best` best tokens reach; float64 [rows, 1]."""
    top = logits.topk(min(_NUM_BOUND_TOKENS, logits.shape[1]))
    peak = _peak(top.values)
    scaled = (top.values.double() - peak) / temperatures
    return peak, _nth_best(scaled + gumbel(token_words(top.indices, keys)), num_best)


def _nth_best(scores: torch.Tensor, num_best: int) -> torch.Tensor:
    """The n-th best score of each row, or of fewer the last finite one: [rows, 1].

    Not finite where a row holds NaN or no finite score.
    """
    if num_best == 1:
        return scores.amax(dim=1, keepdim=True)
    best = scores.topk(min(num_best, scores.shape[1])).values
    return best.masked_fill(best == _MASKED, math.inf).amin(dim=1, keepdim=True)


def _candidates(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: NoiseKeys,
    peak: torch.Tensor,
    bound: torch.Tensor,
) -> Iterator[Scored]:
    """Every token that may reach its row's `bound`; all of a row's are in one part."""
    head_cut = _cut(bound - HEAD_WIDTH, peak, temperatures).to(logits.dtype)
    candidate_cut = _cut(bound - MAX_GUMBEL, peak, temperatures).to(logits.dtype)
    in_head = _any_of_group(logits >= head_cut)
    is_candidate = _any_of_group(logits >= candidate_cut)
    for part, groups in _row_chunks(is_candidate):
        words = group_words(groups, keys.rows(part))
        is_left = in_head[part].gather(1, groups)
        for word in words:
            is_left |= word <= _MAX_TAIL_WORD
        row, place = is_left.nonzero(as_tuple=True)
        left_words = torch.stack([word[row, place] for word in words], dim=-1)
        left_ids = groups[row, place, None] * IDS_PER_CALL + torch.arange(
            IDS_PER_CALL, device=logits.device
        )
        row += part.start
        scaled = (logits[row[:, None], left_ids].double() - peak[row]) / temperatures[row]
        yield row, left_ids, scaled + gumbel(left_words)


def _peak(top_values: torch.Tensor) -> torch.Tensor:
    """Each row's largest logit, float64 [rows, 1]; NaN where a row holds NaN."""
    return top_values.amax(dim=1, keepdim=True).double()


def _cut(score: torch.Tensor, peak: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The raw logit, float64 and surely not too high, below which the scaled logit < score.

    The slack covers a later rounding to float32.
    """
    below = (score - _SLACK) * temperatures
    return peak + below - _RELATIVE_SLACK * (1.0 + peak.abs() + below.abs())


def _best(
    rows: torch.Tensor, token_ids: torch.Tensor, scores: torch.Tensor, num_rows: int
) -> dict[int, int]:
    """Row -> id of its best finite score, the lowest among equals."""
    best = torch.full((num_rows,), -math.inf, dtype=scores.dtype, device=scores.device)
    best.scatter_reduce_(0, rows, scores.amax(dim=1), "amax")
    is_best = (scores == best[rows, None]) & scores.isfinite()
    entry, place = is_best.nonzero(as_tuple=True)
    tokens: dict[int, int] = {}
    for row, token_id in zip(rows[entry].tolist(), token_ids[entry, place].tolist(), strict=True):
        tokens[row] = min(token_id, tokens.get(row, token_id))
    return tokens


def _ranked_above(part: Scored, bound: torch.Tensor, num_best: int) -> dict[int, list[int]]:
    """The best of a part whose scores reach the row's `bound`; rows without a finite one miss."""
    rows, token_ids, scores = part
    is_in = (scores >= bound[rows]) & scores.isfinite()
    entry, place = is_in.nonzero(as_tuple=True)
    return _ranked(rows[entry], token_ids[entry, place], scores[entry, place], num_best)


def _ranked(
    rows: torch.Tensor, token_ids: torch.Tensor, scores: torch.Tensor, num_best: int
) -> dict[int, list[int]]:
    """Row -> its best ids in order, lowest id on ties; all [n]. Behind the first none is -inf."""
    # one transfer: ids and rows are exact in float64
    listed = torch.stack((rows.double(), token_ids.double(), scores.double()), dim=1).tolist()
    found: dict[int, dict[int, float]] = {}
    for row, token_id, score in listed:
        found.setdefault(int(row), {})[int(token_id)] = score
    ranks: dict[int, list[int]] = {}
    for row, score_of in found.items():
        order = sorted((-score, token_id) for token_id, score in score_of.items())[:num_best]
        rest = [token_id for below, token_id in order[1:] if below != math.inf]
        ranks[row] = [order[0][1], *rest]
    return ranks


def _row_chunks(is_candidate: torch.Tensor) -> Sequence[tuple[slice, torch.Tensor]]:
    """Consecutive rows with their candidate groups side by side, a bounded amount per part.

    is_candidate bool [rows, groups] -> parts (rows, group ids int64 [rows, n]). A row with fewer
    than n candidates is filled up with group 0, which may be scored twice but wins only fairly.
    """
    counts = is_candidate.sum(dim=1).tolist()
    chunk = _CPU_CHUNK if is_candidate.device.type == "cpu" else _DEVICE_CHUNK
    parts: list[tuple[slice, torch.Tensor]] = []
    start = 0
    while start < len(counts):
        stop, width = start + 1, counts[start]
        while stop < len(counts) and max(width, counts[stop]) * (stop + 1 - start) <= chunk:
            width = max(width, counts[stop])
            stop += 1
        parts.append((slice(start, stop), _side_by_side(is_candidate[start:stop], width)))
        start = stop
    return parts


def _side_by_side(is_candidate: torch.Tensor, width: int) -> torch.Tensor:
    row, group = is_candidate.nonzero(as_tuple=True)
    if is_candidate.shape[0] == 1:
        return group[None]
    counts = is_candidate.sum(dim=1)
    place = torch.arange(row.numel(), device=row.device) - (counts.cumsum(0) - counts)[row]
    groups = torch.zeros(is_candidate.shape[0], width, dtype=torch.int64, device=row.device)
    groups[row, place] = group
    return groups


def _padded(logits: torch.Tensor) -> torch.Tensor:
    """Contiguous rows whose width is a multiple of 4, filled up with -inf.

    Float32, or float64 if they are that already (adjusted rows, whose bits count).
    """
    missing = -logits.shape[1] % IDS_PER_CALL
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    if logits.dtype != torch.float64:
        logits = logits.float()
    return logits.contiguous()


def _any_of_group(is_candidate: torch.Tensor) -> torch.Tensor:
    """bool [rows, 4n] -> bool [rows, n]: four bools are one int32 (much faster than `any`)."""
    return is_candidate.contiguous().view(torch.int32) != 0
