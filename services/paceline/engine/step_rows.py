"""What an item of a pass means for the cache and for the sampler. Pure; knows no tensor.

Every engine uses it, so that all of them agree on which rows are computed, which may come from
the prefix cache and which tokens each sampled row has before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.engine.base import StepItem
from paceline.engine.blocks import Reservation, WantedRows
from paceline.engine.prefix_cache import adapter_salt
from paceline.sampling.acceptance import accept_matching
from paceline.sampling.params import SamplingParams


def wanted_rows(item: StepItem) -> WantedRows:
    """The rows of an item, as the block pool reserves them."""
    return WantedRows(
        sequence_id=item.sequence_id,
        start=item.start,
        token_ids=item.token_ids,
        num_needed=item.num_samples,
        max_rows=item.max_rows,
        is_cacheable=item.num_prompt_logprobs is None and item.fork_of is None,
        cache_salt=adapter_salt(item.cache_salt, item.adapter),
        fork_of=item.fork_of,
    )


def num_sampled_rows(item: StepItem, reservation: Reservation) -> int:
    """Nothing is sampled in a pass that does not reach the end of the item."""
    is_complete = reservation.end == item.start + len(item.token_ids)
    return item.num_samples if is_complete else 0


def scored_ids(item: StepItem, reservation: Reservation) -> tuple[int, ...]:
    """The tokens to score in this pass: entry j belongs to row j of the item."""
    if item.num_prompt_logprobs is None:
        return ()
    return item.scored_token_ids[: reservation.end - reservation.start]


def num_logit_rows(item: StepItem, reservation: Reservation) -> int:
    """How many of the last rows of this pass need logits; with scores all from `start` on."""
    if scored_ids(item, reservation):
        return reservation.end - reservation.start
    return num_sampled_rows(item, reservation)


def prompt_len(item: StepItem) -> int:
    """Tokens of the text before its first generated one.

    The last sampled row is at position start + rows - 1 and decides the output index that is as
    many after the item's first: that many of the tokens up to it were generated.
    """
    return item.start + len(item.token_ids) - (item.output_index + item.num_samples - 1)


def draft_ids(item: StepItem) -> tuple[int, ...]:
    """The proposals of an item under `Verify`: its last tokens, one less than its samples."""
    return item.token_ids[len(item.token_ids) - item.num_samples + 1 :]


def needs_history(item: StepItem) -> bool:
    """Whether the law of the sampled rows depends on the tokens before them."""
    return item.num_samples > 0 and item.sampling.needs_history


def histories(
    item: StepItem, cached_token_ids: Sequence[int]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(prompt, output so far) of each sampled row, proposals that precede it in the item included.

    `cached_token_ids` are the sequence's tokens, at least those before `item.start`. Empty where
    no processor asks: copies of long texts are not free.
    """
    if not needs_history(item):
        return [((), ())] * item.num_samples
    text = (*cached_token_ids[: item.start], *item.token_ids)
    split = prompt_len(item)
    first_end = len(text) - item.num_samples + 1
    prompt = text[:split]  # one object for all rows
    return [(prompt, text[split:end]) for end in range(first_end, len(text) + 1)]


def deciding_row(item: StepItem, token_ids: Sequence[int], num_accepted: int | None) -> int:
    """Which sampled row of an item decides the last token that is committed.

    `token_ids` and `num_accepted` as in its result. Of a chain under sample and match, where every
    row has a token, it is the one after the proposals that agree with them.
    """
    if item.tree_parents:
        row = 0
        for token_id in token_ids[:num_accepted]:
            row = _child(item, row, token_id)
        return row
    if num_accepted is None:
        num_accepted = accept_matching(draft_ids(item), token_ids).num_accepted_tokens
    return num_accepted


def _child(item: StepItem, row: int, token_id: int) -> int:
    """The row of the node with this token behind that of `row`; row 0 is the committed text's."""
    for node, (parent, proposed) in enumerate(zip(item.tree_parents, draft_ids(item), strict=True)):
        if parent == row - 1 and proposed == token_id:
            return node + 1
    raise AssertionError(f"{token_id} was accepted behind row {row}, but no node there has it")


def head_sampling(sampling: SamplingParams) -> SamplingParams:
    """The law that Medusa heads guess under: what depends on the text before is left out."""
    if not (sampling.has_penalties or sampling.min_tokens or sampling.grammar):
        return sampling
    return replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        min_tokens=0,
        grammar="",
    )
