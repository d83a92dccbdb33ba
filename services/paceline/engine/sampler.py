"""The batched twin of `sampling/`: rows of logits to token ids, the same tokens bit for bit.

Noise is keyed by (seed, choice, output index, token id) alone, so a row's token does not depend
on its batch mates or on the pass it is in. Knows no sequence, draft or target.

Why not all of the noise: with u uniform on (0, 1), gumbel = -log(-log(1 - u)), which is below
-log(u) and at most `MAX_GUMBEL` (about 22.9). A scaled logit is (logit - peak) / temperature, as
in `sampling.processors`: at most 0, so finite logits never overflow. Let s be the best exact score
among a row's top logits: the winner scores at least s. So a token with scaled logit x
 1. cannot win, whatever its noise, if x + MAX_GUMBEL < s: no Philox call for it;
 2. cannot win if x < s - HEAD_WIDTH and u > exp(-HEAD_WIDTH): no logarithm for it.
What is left, a few hundred tokens, is scored exactly, in the reference's arithmetic. Both bounds
get a slack for rounding: no winner is ever lost, and a loser let through only costs time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.engine.base import Verify
from paceline.engine.keyed_noise import (
    IDS_PER_CALL,
    NoiseKeys,
    group_words,
    gumbel,
    make_keys,
    token_words,
)
from paceline.engine.logit_adjustments import SampleRow, adjust_rows, tame_logits
from paceline.engine.logit_filters import filter_row, is_filtered
from paceline.engine.rejection import (
    DraftBlock,
    accept_blocks,
    draw_proposals,
    law_rows,
    next_token_logits,
)
from paceline.sampling import noise
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.sparse_probs import SparseProbs

__all__ = ["BatchedSampler", "SampleRow", "coupled_tokens", "greedy_tokens"]

MAX_GUMBEL = noise.gumbel(0)

# The bound s comes from so many top logits. More make it sharper, at a price.
_NUM_BOUND_TOKENS = 32
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
# Adjusted rows become float64: at most so many logits of them at a time (128 MiB).
_MAX_EXACT_LOGITS = 1 << 24


class BatchedSampler:
    """Samples any mix of rows. `draft_top_n` limits noise to a row's top logits.

    That shortcut changes which token comes out, so it is for drafts alone, where it costs a
    little acceptance and never correctness. `num_bad_rows` counts rows that held NaN or no finite
    logit, which a healthy model does not produce.
    """

    def __init__(self, *, draft_top_n: int | None = None) -> None:
        if draft_top_n is not None and draft_top_n < 1:
            raise ValueError(f"draft_top_n must be >= 1, got {draft_top_n}")
        self._draft_top_n = draft_top_n
        self.num_bad_rows = 0

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """Token ids of logits [len(rows), vocab_size], floating point, any device."""
        adjusted = [index for index, row in enumerate(rows) if row.is_adjusted]
        if not adjusted:
            tokens = self._tokens(logits, rows)
        else:
            plain = [index for index, row in enumerate(rows) if not row.is_adjusted]
            tokens = self._tokens_of(logits, rows, plain) if plain else {}
            num_at_once = max(1, _MAX_EXACT_LOGITS // logits.shape[1])
            for start in range(0, len(adjusted), num_at_once):
                tokens |= self._tokens_of(logits, rows, adjusted[start : start + num_at_once])
        return [
            tokens[index] if index in tokens else self._odd_token(logits[index], row)
            for index, row in enumerate(rows)
        ]

    def propose(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], rounds: Sequence[int]
    ) -> tuple[list[int], list[SparseProbs]]:
        """Rejection modes, draft: a token per row of logits, and the sparse law it came from.

        `rounds`: one per row, never used twice for a sequence. Shapes as in `sample`. The law is
        a function of the row's logits, parameters and history, and of no random number.
        """
        token_ids: list[int] = []
        laws: list[SparseProbs] = []
        num_at_once = max(1, _MAX_EXACT_LOGITS // logits.shape[1])
        for start in range(0, len(rows), num_at_once):
            part = slice(start, start + num_at_once)
            scaled = self._law_rows(logits[part], rows[part])
            drawn = draw_proposals(scaled, rows[part], rounds[part])
            token_ids += [token_id for token_id, _ in drawn]
            laws += [law for _, law in drawn]
        return token_ids, laws

    def verify(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        draft_token_ids: Sequence[int],
        rule: Verify,
    ) -> tuple[tuple[int, ...], int]:
        """`verify_blocks` of one sequence."""
        return self.verify_blocks(logits, [DraftBlock(rows, draft_token_ids, rule)])[0]

    def verify_blocks(
        self, logits: torch.Tensor, blocks: Sequence[DraftBlock]
    ) -> list[tuple[tuple[int, ...], int]]:
        """Rejection modes, target: per block the tokens to commit and how many were accepted.

        logits [all rows of all blocks, vocab_size]. A block does not depend on its batch mates.
        Raises `LocalProtocolError` if a proposal has no weight in its stated law.
        """
        results: list[tuple[tuple[int, ...], int]] = []
        taken = start = 0
        while start < len(blocks):
            stop, num_rows = start + 1, len(blocks[start].rows)
            while stop < len(blocks):
                more = num_rows + len(blocks[stop].rows)
                if more * logits.shape[1] > _MAX_EXACT_LOGITS:
                    break
                stop, num_rows = stop + 1, more
            part = logits[taken : taken + num_rows]
            results += self._verify_part(part, blocks[start:stop])
            taken, start = taken + num_rows, stop
        return results

    def _verify_part(
        self, logits: torch.Tensor, blocks: Sequence[DraftBlock]
    ) -> list[tuple[tuple[int, ...], int]]:
        scaled = self._law_rows(logits, [row for block in blocks for row in block.rows])
        ends = accept_blocks(scaled, blocks)
        deciding = [block.rows[end.num_accepted] for block, end in zip(blocks, ends, strict=True)]
        keys = make_keys(
            [(row.sampling.seed, row.sampling.choice, row.output_index) for row in deciding],
            logits.device,
            noise.Purpose.RESIDUAL,
            [block.rule.round for block in blocks],
        )
        weights = next_token_logits(scaled, ends)
        tokens = coupled_tokens(weights, torch.ones_like(weights[:, :1]), keys)
        return [
            ((*block.draft_token_ids[: end.num_accepted], tokens[index]), end.num_accepted)
            for index, (block, end) in enumerate(zip(blocks, ends, strict=True))
        ]

    def _law_rows(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        scaled, num_bad = law_rows(logits, rows)
        self.num_bad_rows += num_bad
        return scaled

    def _tokens_of(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], indices: Sequence[int]
    ) -> dict[int, int]:
        """Some of the rows, all of them adjusted or none of them."""
        picked = [rows[index] for index in indices]
        values = _pick(logits, indices)
        if picked[0].is_adjusted:
            values = adjust_rows(values, picked)
        return _named(indices, self._tokens(values, picked))

    def _tokens(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, int]:
        """Tokens of adjusted logits; rows outside the arithmetic are left out."""
        tokens: dict[int, int] = {}
        greedy = [index for index, row in enumerate(rows) if row.sampling.is_greedy]
        noisy = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
        if greedy:
            tokens |= _named(greedy, greedy_tokens(_pick(logits, greedy)))
        if noisy:
            picked = [rows[index] for index in noisy]
            tokens |= _named(noisy, self._noisy_tokens(_pick(logits, noisy), picked))
        return tokens

    def _noisy_tokens(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, int]:
        logits = _filtered(logits, rows)
        keys = make_keys(
            [(row.sampling.seed, row.sampling.choice, row.output_index) for row in rows],
            logits.device,
        )
        temperatures = torch.tensor(
            [[row.sampling.temperature] for row in rows], dtype=torch.float64, device=logits.device
        )
        if self._draft_top_n is None:
            return coupled_tokens(logits, temperatures, keys)
        return _top_n_tokens(logits, temperatures, keys, self._draft_top_n)

    def _odd_token(self, logits: torch.Tensor, row: SampleRow) -> int:
        """Rows outside the batched arithmetic, made finite first: NaN and infinities."""
        if bool(logits.isnan().any()) or not bool(logits.isfinite().any()):
            self.num_bad_rows += 1
        return coupled_token(
            tame_logits(logits).tolist(),
            row.sampling,
            row.output_index,
            row.prompt_token_ids,
            row.output_token_ids,
        )


def greedy_tokens(logits: torch.Tensor) -> dict[int, int]:
    """Row -> id of the largest logit, lowest id on ties; rows that hold NaN are left out.

    Not `argmax`: it promises no order among equal maxima.
    """
    best = logits.amax(dim=1, keepdim=True)
    tokens: dict[int, int] = {}
    for row, token_id in (logits == best).nonzero().tolist():
        tokens.setdefault(row, token_id)
    return tokens


def coupled_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys
) -> dict[int, int]:
    """Row -> argmax of (logits - peak) / temperature + Gumbel, lowest id on ties.

    logits [rows, vocab_size], adjusted; temperatures float64 [rows, 1]. Rows that hold NaN or
    whose peak is not finite are left out.
    """
    logits = _padded(logits)
    top = logits.topk(min(_NUM_BOUND_TOKENS, logits.shape[1]))
    peak = _peak(top.values)
    scaled = (top.values.double() - peak) / temperatures
    bound = (scaled + gumbel(token_words(top.indices, keys))).amax(dim=1, keepdim=True)
    head_cut = _cut(bound - HEAD_WIDTH, peak, temperatures).to(logits.dtype)
    candidate_cut = _cut(bound - MAX_GUMBEL, peak, temperatures).to(logits.dtype)
    in_head = _any_of_group(logits >= head_cut)
    is_candidate = _any_of_group(logits >= candidate_cut)
    tokens: dict[int, int] = {}
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
        tokens |= _best(row, left_ids, scaled + gumbel(left_words), logits.shape[0])
    is_sound = bound[:, 0].isfinite().tolist()
    return {row: token_id for row, token_id in tokens.items() if is_sound[row]}


def _peak(top_values: torch.Tensor) -> torch.Tensor:
    """Each row's largest logit, float64 [rows, 1]; NaN where a row holds NaN."""
    return top_values.amax(dim=1, keepdim=True).double()


def _cut(score: torch.Tensor, peak: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """The raw logit, float64 and surely not too high, below which the scaled logit < score.

    The slack covers a later rounding to float32.
    """
    below = (score - _SLACK) * temperatures
    return peak + below - _RELATIVE_SLACK * (1.0 + peak.abs() + below.abs())


def _top_n_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: NoiseKeys, top_n: int
) -> dict[int, int]:
    top = logits.topk(min(top_n, logits.shape[1]))
    scaled = (top.values.double() - _peak(top.values)) / temperatures
    scores = scaled + gumbel(token_words(top.indices, keys))
    rows = torch.arange(logits.shape[0], device=logits.device)
    return _best(rows, top.indices, scores, logits.shape[0])


def _best(
    rows: torch.Tensor, token_ids: torch.Tensor, scores: torch.Tensor, num_rows: int
) -> dict[int, int]:
    """Row -> id of its best finite score, the lowest among equals.

    rows [n]; token_ids and scores [n, m] all belong to that row; an id may occur twice.
    """
    best = torch.full((num_rows,), -math.inf, dtype=scores.dtype, device=scores.device)
    best.scatter_reduce_(0, rows, scores.amax(dim=1), "amax")
    is_best = (scores == best[rows, None]) & scores.isfinite()
    entry, place = is_best.nonzero(as_tuple=True)
    tokens: dict[int, int] = {}
    for row, token_id in zip(rows[entry].tolist(), token_ids[entry, place].tolist(), strict=True):
        tokens[row] = min(token_id, tokens.get(row, token_id))
    return tokens


def _row_chunks(is_candidate: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
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


def _filtered(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The rows after the filters; unfiltered rows are not copied unless another one is."""
    filtered = [i for i, row in enumerate(rows) if is_filtered(row.sampling, logits.shape[1])]
    if not filtered:
        return logits
    logits = logits.clone()
    for index in filtered:
        logits[index] = filter_row(logits[index], rows[index].sampling)
    return logits


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


def _pick(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    if len(indices) == logits.shape[0]:
        return logits
    return logits[torch.tensor(indices, device=logits.device)]


def _named(indices: Sequence[int], tokens: dict[int, int]) -> dict[int, int]:
    return {indices[place]: token_id for place, token_id in tokens.items()}
