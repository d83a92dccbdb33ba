"""One forward pass as a value, and how a sequence's rows become an item of it. Pure.

Knows sessions and what an engine is asked; nothing of who runs, who waits, or of KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.engine.base import StepItem, StepResult, Verify
from paceline.generation import TokenLogprobs
from paceline.methods import ProposalSource
from paceline.protocol.messages import REJECTION_MODES
from paceline.protocol.rounds import TokenDelta
from paceline.sampling.acceptance import Acceptance, accept_matching
from paceline.target.round_clock import RoundRecord
from paceline.target.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PassEntry:
    """One sequence's rows in a pass and the proposals among them."""

    session_id: int
    item: StepItem
    draft_token_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """Length of the sequence's cache if all rows are computed."""
        return self.item.start + len(self.item.token_ids)

    @property
    def max_rows(self) -> int:
        """Rows that the pass may spend on this entry."""
        num_rows = len(self.item.token_ids)
        return num_rows if self.item.max_rows is None else min(num_rows, self.item.max_rows)

    @property
    def is_prefill(self) -> bool:
        return self.item.num_samples < len(self.item.token_ids)

    def cached_len(self, result: StepResult) -> int:
        """How far the cache has got."""
        return self.end if result.cached_len is None else result.cached_len

    def num_computed(self, result: StepResult) -> int:
        """Rows that the engine really computed."""
        if self.item.tree_parents:
            return len(self.item.token_ids)  # most nodes are computed and not kept
        return self.cached_len(result) - self.item.start - result.num_prefix_tokens

    def acceptance(self, result: StepResult) -> Acceptance:
        """What the sampled rows commit, by the item's own rule."""
        if result.num_accepted is not None:
            return Acceptance(result.num_accepted, result.token_ids[-1])
        return accept_matching(self.draft_token_ids, result.token_ids)

    def accepted(self, result: StepResult, acceptance: Acceptance) -> tuple[int, ...]:
        """The proposals that the acceptance is about: of a tree, a path of them."""
        token_ids = result.token_ids if self.item.tree_parents else self.draft_token_ids
        return token_ids[: acceptance.num_accepted_tokens]


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One forward pass, ready for `Engine.step`. `num_rows` is the most that it computes."""

    entries: tuple[PassEntry, ...]

    @property
    def items(self) -> list[StepItem]:
        return [entry.item for entry in self.entries]

    @property
    def num_rows(self) -> int:
        return sum(entry.max_rows for entry in self.entries)

    @property
    def has_prefill(self) -> bool:
        return any(entry.is_prefill for entry in self.entries)

    @property
    def has_drafts(self) -> bool:
        return any(entry.draft_token_ids for entry in self.entries)

    @property
    def has_bets(self) -> bool:
        """Whether it does more than the text needs."""
        return self.has_drafts or any(entry.item.num_head_candidates for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Round:
    """What a pass has committed of one sequence, and nobody has been told yet."""

    sequence: Sequence
    delta: TokenDelta
    record: RoundRecord
    logprobs: tuple[TokenLogprobs, ...]
    source: ProposalSource = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """Nothing to run before `until_us` unless something arrives; None: until something does."""

    until_us: int | None


def make_entry(
    sequence: Sequence, start: int, max_rows: int | None, draft: tuple[int, ...]
) -> PassEntry:
    """Rows from `start` to the last committed token, and `draft` (just taken by `begin_verify`).

    With `max_rows` it is a prefill, which may end before it gets to the token that it samples.
    """
    session, request = sequence.session, sequence.request
    rule = None
    if session.mode in REJECTION_MODES:
        rule = Verify(session.mode, session.verifying_probs, session.round)
    scored = sequence.unscored_prompt(start)
    item = StepItem(
        sequence_id=session.session_id,
        start=start,
        token_ids=session.log.slice(start, session.committed_len) + draft,
        num_samples=1 + len(draft),
        sampling=session.sampling,
        output_index=session.num_output_tokens,
        rule=rule,
        max_rows=max_rows,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs if scored else None,
        scored_token_ids=scored,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        tree_parents=session.verifying_parents,
        num_head_candidates=sequence.num_head_candidates,
    )
    sequence.in_pass = True
    return PassEntry(session.session_id, item, draft)


def prefill_share(missing: Iterable[Sequence], rows_left: int) -> int:
    """Rows that proposals leave to prompts: a proposal is a bet, a prompt is work."""
    num_missing = sum(s.session.committed_len - s.cached_len for s in missing)
    return min(num_missing, -(-rows_left // 2))
