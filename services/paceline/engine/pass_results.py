"""From the logits of a pass to its results: each item's rows go to the rule that it asks for.

Knows items, rows and the sampler; no model, no cache content and no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.engine.base import Propose, StepItem, StepResult, Verify
from paceline.engine.blocks import BlockTable, Reservation
from paceline.engine.grammar_masks import GrammarMasks
from paceline.engine.logprobs import token_logprobs
from paceline.engine.rejection import DraftBlock
from paceline.engine.sampler import BatchedSampler, SampleRow
from paceline.engine.step_rows import (
    draft_ids,
    needs_history,
    num_logit_rows,
    num_sampled_rows,
    prompt_len,
    scored_ids,
)
from paceline.engine.token_counts import TextSlice
from paceline.engine.token_tree import accepted_rows, sample_offsets
from paceline.generation import TokenLogprobs
from paceline.sampling.sparse_probs import SparseProbs


@dataclass(slots=True)  # one per row: see StepItem
class PassPart:
    """One item of a pass. Its logits are rows `first_row .. end_row - 1` of the pass's.

    `rows` are its sampled ones, which are the last of those; empty when the item goes on in a
    later pass.
    """

    item: StepItem
    reservation: Reservation
    first_row: int
    end_row: int
    rows: tuple[SampleRow, ...]

    @property
    def sampled(self) -> range:
        """The rows of the pass's logits that are sampled."""
        return range(self.end_row - len(self.rows), self.end_row)


@dataclass(frozen=True, slots=True)
class _Decision:
    token_ids: tuple[int, ...]
    num_accepted: int | None = None
    draft_probs: tuple[SparseProbs, ...] = ()
    runner_ups: tuple[tuple[int, ...], ...] = ()
    # of a tree: which of the sampled rows the tokens are from
    tree_rows: tuple[int, ...] = ()


def pass_parts(
    items: Sequence[StepItem],
    reservations: Sequence[Reservation],
    tables: Iterable[BlockTable],
    masks: GrammarMasks | None = None,
) -> list[PassPart]:
    """Where each item's logits lie; `tables` are their sequences', not yet with the new rows.

    ValueError when following a grammar costs too much.
    """
    parts, taken = [], 0
    for item, reservation, table in zip(items, reservations, tables, strict=True):
        num_rows = num_logit_rows(item, reservation)
        rows: tuple[SampleRow, ...] = ()
        if num_sampled_rows(item, reservation):
            rows = _sample_rows(item, table, masks)
        parts.append(PassPart(item, reservation, taken, taken + num_rows, rows))
        taken += num_rows
    return parts


def _sample_rows(
    item: StepItem, table: BlockTable, masks: GrammarMasks | None
) -> tuple[SampleRow, ...]:
    """The sampled rows with the histories of `step_rows.histories`, as views and counts.

    The text may be long and a pass adds few tokens to it, so none but these is read or copied.
    """
    indices = [item.output_index + offset for offset in sample_offsets(item)]
    if not needs_history(item):
        return tuple(SampleRow(item.sampling, index) for index in indices)
    assert table.length == item.start, "the table already has rows of this pass"
    head, tail, split = table.token_ids, item.token_ids, prompt_len(item)
    # all rows have these tokens before them; row j has j more
    num_shared = len(tail) - item.num_samples + 1
    prompt = TextSlice(head, item.start, tail, 0, split)
    counts = None
    if item.sampling.has_penalties:
        counts = table.counted(tail[:num_shared], split)
    bitmasks: tuple[bytes | None, ...] = (None,) * item.num_samples
    if masks is not None:
        bitmasks = masks.rows(item, head)
    first_end = item.start + num_shared
    return tuple(
        SampleRow(
            item.sampling,
            index,
            prompt,
            TextSlice(head, item.start, tail, split, first_end + offset),
            counts,
            bitmask,
        )
        for offset, (index, bitmask) in enumerate(zip(indices, bitmasks, strict=True))
    )


def pass_results(
    parts: Sequence[PassPart], logits: torch.Tensor, sampler: BatchedSampler
) -> list[StepResult]:
    """Results in the order of the items; logits [logit rows of all parts, vocab_size].

    The reservations of trees are told which nodes are accepted.
    """
    decisions = _decide(parts, logits, sampler)
    for part, decision in zip(parts, decisions, strict=True):
        if decision.tree_rows:
            nodes = [row - 1 for row in decision.tree_rows[1:]]
            part.reservation.accept(len(part.item.tree_parents), nodes)
    return [
        StepResult(
            part.item.sequence_id,
            decision.token_ids,
            cached_len=part.reservation.end,
            num_accepted=decision.num_accepted,
            draft_probs=decision.draft_probs,
            logprobs=_logprobs(part, decision, logits),
            prompt_logprobs=_prompt_logprobs(part, logits),
            num_prefix_tokens=part.reservation.num_prefix_tokens,
            runner_ups=decision.runner_ups,
        )
        for part, decision in zip(parts, decisions, strict=True)
    ]


def _decide(
    parts: Sequence[PassPart], logits: torch.Tensor, sampler: BatchedSampler
) -> list[_Decision]:
    """One sampler call for all items of a rule."""
    decisions = [_Decision(())] * len(parts)
    sampled = [index for index, part in enumerate(parts) if part.rows]
    plain = [index for index in sampled if parts[index].item.rule is None]
    if plain:
        num_best = 1 + max(parts[index].item.num_runner_ups for index in plain)
        ranks = sampler.rank(_picked(logits, parts, plain), _rows(parts, plain), num_best)
        for index, start, end in _spans(parts, plain):
            decisions[index] = _ranked(ranks[start:end], parts[index].item)
    proposing = [index for index in sampled if isinstance(parts[index].item.rule, Propose)]
    if proposing:
        rounds = [_round(parts[index]) for index in proposing for _ in parts[index].rows]
        tokens, laws = sampler.propose(
            _picked(logits, parts, proposing), _rows(parts, proposing), rounds
        )
        for index, start, end in _spans(parts, proposing):
            decisions[index] = _Decision(tuple(tokens[start:end]), None, tuple(laws[start:end]))
    verifying = [index for index in sampled if isinstance(parts[index].item.rule, Verify)]
    if verifying:
        blocks = [_block(parts[index]) for index in verifying]
        verified = sampler.verify_blocks(_picked(logits, parts, verifying), blocks)
        for index, (token_ids, num_accepted) in zip(verifying, verified, strict=True):
            decisions[index] = _Decision(token_ids, num_accepted)
    return decisions


def _ranked(ranks: Sequence[tuple[int, ...]], item: StepItem) -> _Decision:
    """The best id of each row, and so many behind it as the item asks for; of a tree the best ids
    along its accepted path."""
    best = tuple(ranked[0] for ranked in ranks)
    if item.tree_parents:
        rows = accepted_rows(item, best)
        return _Decision(tuple(best[row] for row in rows), len(rows) - 1, tree_rows=rows)
    num = item.num_runner_ups
    return _Decision(best, runner_ups=tuple(ranked[1 : 1 + num] for ranked in ranks) if num else ())


def _picked(
    logits: torch.Tensor, parts: Sequence[PassPart], indices: Sequence[int]
) -> torch.Tensor:
    """The sampled rows of some parts, in order; no copy when these are all rows."""
    rows = [row for index in indices for row in parts[index].sampled]
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.tensor(rows, device=logits.device)]


def _rows(parts: Sequence[PassPart], indices: Sequence[int]) -> list[SampleRow]:
    return [row for index in indices for row in parts[index].rows]


def _spans(parts: Sequence[PassPart], indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """(part, start, end) of each part's rows among the picked ones."""
    spans, start = [], 0
    for index in indices:
        end = start + len(parts[index].rows)
        spans.append((index, start, end))
        start = end
    return spans


def _round(part: PassPart) -> int:
    assert isinstance(part.item.rule, Propose)
    return part.item.rule.round


def _block(part: PassPart) -> DraftBlock:
    assert isinstance(part.item.rule, Verify)
    return DraftBlock(part.rows, draft_ids(part.item), part.item.rule)


def _logprobs(
    part: PassPart, decision: _Decision, logits: torch.Tensor
) -> tuple[TokenLogprobs, ...]:
    num_top, token_ids = part.item.num_logprobs, decision.token_ids
    if num_top is None or not token_ids:
        return ()
    first = part.sampled.start
    if decision.tree_rows:
        rows = torch.tensor(decision.tree_rows, device=logits.device) + first
        return tuple(token_logprobs(logits[rows], token_ids, num_top))
    # under `Verify` there may be fewer tokens than rows
    return tuple(token_logprobs(logits[first : first + len(token_ids)], token_ids, num_top))


def _prompt_logprobs(part: PassPart, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    num_top, token_ids = part.item.num_prompt_logprobs, scored_ids(part.item, part.reservation)
    if num_top is None or not token_ids:
        return ()
    first = part.first_row
    return tuple(token_logprobs(logits[first : first + len(token_ids)], token_ids, num_top))
