"""The batched twin of `sampling/`: rows of logits to token ids, the same tokens bit for bit.

Noise is keyed by (seed, choice, output index, token id) alone, so a row's token does not depend
on its batch mates or on the pass it is in. Knows no sequence, draft or target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.engine.base import Verify
from paceline.engine.best_tokens import (
    coupled_ranks,
    coupled_tokens,
    greedy_ranks,
    greedy_tokens,
    top_n_ranks,
    top_n_tokens,
)
from paceline.engine.keyed_noise import make_keys
from paceline.engine.logit_adjustments import SampleRow, adjust_rows, tame_logits
from paceline.engine.logit_filters import filter_row, is_filtered
from paceline.engine.rejection import (
    DraftBlock,
    accept_blocks,
    draw_proposals,
    law_rows,
    next_token_logits,
)
from paceline.grammars import allowed_token_ids
from paceline.sampling import noise
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.sparse_probs import SparseProbs

__all__ = ["BatchedSampler", "SampleRow", "coupled_tokens", "greedy_tokens"]

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
        return [best[0] for best in self.rank(logits, rows, 1)]

    def rank(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], num_best: int
    ) -> list[tuple[int, ...]]:
        """As `sample`, but for each row its `num_best` (1 .. MAX_RANKED) best ids in order.

        The first is the row's token, the others are what would come out if those before them
        could not. Fewer where fewer ids are possible; a row that holds NaN, or no finite logit or
        an infinite one, has its token alone.
        """
        adjusted = [index for index, row in enumerate(rows) if row.is_adjusted]
        if not adjusted:
            ranks = self._ranks(logits, rows, num_best)
        else:
            plain = [index for index, row in enumerate(rows) if not row.is_adjusted]
            ranks = self._ranks_of(logits, rows, plain, num_best) if plain else {}
            num_at_once = max(1, _MAX_EXACT_LOGITS // logits.shape[1])
            for start in range(0, len(adjusted), num_at_once):
                part = adjusted[start : start + num_at_once]
                ranks |= self._ranks_of(logits, rows, part, num_best)
        return [
            ranks[index] if index in ranks else (self._odd_token(logits[index], row),)
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

    def _ranks_of(
        self,
        logits: torch.Tensor,
        rows: Sequence[SampleRow],
        indices: Sequence[int],
        num_best: int,
    ) -> dict[int, tuple[int, ...]]:
        """Some of the rows, all of them adjusted or none of them."""
        picked = [rows[index] for index in indices]
        values = _pick(logits, indices)
        if picked[0].is_adjusted:
            values = adjust_rows(values, picked)
        ranks = self._ranks(values, picked, num_best)
        return {indices[place]: best for place, best in ranks.items()}

    def _ranks(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], num_best: int
    ) -> dict[int, tuple[int, ...]]:
        """Best ids of adjusted logits; rows outside the arithmetic are left out."""
        ranks: dict[int, tuple[int, ...]] = {}
        greedy = [index for index, row in enumerate(rows) if row.sampling.is_greedy]
        noisy = [index for index, row in enumerate(rows) if not row.sampling.is_greedy]
        if greedy:
            picked = _pick(logits, greedy)
            if num_best == 1:
                ranks |= _alone(greedy, greedy_tokens(picked))
            else:
                ranks |= _named(greedy, greedy_ranks(picked, num_best))
        if noisy:
            noisy_rows = [rows[index] for index in noisy]
            ranks |= self._noisy_ranks(_pick(logits, noisy), noisy, noisy_rows, num_best)
        return ranks

    def _noisy_ranks(
        self,
        logits: torch.Tensor,
        indices: Sequence[int],
        rows: Sequence[SampleRow],
        num_best: int,
    ) -> dict[int, tuple[int, ...]]:
        logits = _filtered(logits, rows)
        keys = make_keys(
            [(row.sampling.seed, row.sampling.choice, row.output_index) for row in rows],
            logits.device,
        )
        temperatures = torch.tensor(
            [[row.sampling.temperature] for row in rows], dtype=torch.float64, device=logits.device
        )
        top_n = self._draft_top_n
        if num_best == 1:
            if top_n is None:
                return _alone(indices, coupled_tokens(logits, temperatures, keys))
            return _alone(indices, top_n_tokens(logits, temperatures, keys, top_n))
        if top_n is None:
            return _named(indices, coupled_ranks(logits, temperatures, keys, num_best))
        return _named(indices, top_n_ranks(logits, temperatures, keys, top_n, num_best))

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
            None if row.bitmask is None else allowed_token_ids(row.bitmask),
        )


def _filtered(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """The rows after the filters; unfiltered rows are not copied unless another one is."""
    filtered = [i for i, row in enumerate(rows) if is_filtered(row.sampling, logits.shape[1])]
    if not filtered:
        return logits
    logits = logits.clone()
    for index in filtered:
        logits[index] = filter_row(logits[index], rows[index].sampling)
    return logits


def _pick(logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    if len(indices) == logits.shape[0]:
        return logits
    return logits[torch.tensor(indices, device=logits.device)]


def _named(
    indices: Sequence[int], ranks: Mapping[int, Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    return {indices[place]: tuple(best) for place, best in ranks.items()}


def _alone(indices: Sequence[int], tokens: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    return {indices[place]: (token_id,) for place, token_id in tokens.items()}
