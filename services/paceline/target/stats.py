"""What a scheduler counts. Knows nothing else: every method bumps a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from paceline.generation import TokenOrigin
from paceline.methods import SOURCES, ProposalSource
from paceline.metrics.buckets import Buckets
from paceline.metrics.target_catalog import (
    K_BUCKETS,
    MAX_POSITION,
    PASS_S_BUCKETS,
    QUEUE_S_BUCKETS,
    ROW_BUCKETS,
)
from paceline.protocol.lookahead import PassRecord
from paceline.protocol.rounds import TokenDelta

_US = 1e6


@dataclass(slots=True)
class SourceCounts:
    """Of one source of proposals. `num_rounds` verified some of its `num_draft_tokens`;
    `num_chosen`: passes in which it was the sequence's source, whether K was 0 or not;
    `num_explored` of them tried a source that was not expected to be best. `num_failures`:
    proposers that raised, each of which its sequence has lost."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_chosen: int = 0
    num_explored: int = 0
    num_failures: int = 0


def _by_source() -> dict[ProposalSource, SourceCounts]:
    return {source: SourceCounts() for source in SOURCES if source}


@dataclass
class SchedulerStats:
    """Counts since start. A round is one pass of one sequence that committed tokens;
    `num_rows` were computed, `num_prefix_tokens` found in the prefix cache instead; `busy_us` is
    the time that passes took. `num_prefill_rows` are the rows of texts that had no KV yet.
    `accepted_per_pos` has one count per place in a block, the last one for all behind.
    `num_failed`: sequences that the engine ended; `num_aborted`: those of `abort`.
    `num_unused_tokens`: proposals in windows that nobody verified, as the text went elsewhere.
    `by_source` has every source of proposals."""

    num_passes: int = 0
    num_rows: int = 0
    busy_us: int = 0
    num_rounds: int = 0
    num_plain_rounds: int = 0
    num_rejected_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_unused_tokens: int = 0
    num_committed_tokens: int = 0
    num_holds: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    num_prefix_tokens: int = 0
    num_prefill_rows: int = 0
    num_queue_timeouts: int = 0
    num_refused: int = 0
    num_short_plans: int = 0
    num_failed_passes: int = 0
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * (MAX_POSITION + 1))
    chosen: Buckets = field(default_factory=lambda: Buckets(K_BUCKETS))
    pass_s: Buckets = field(default_factory=lambda: Buckets(PASS_S_BUCKETS))
    pass_rows: Buckets = field(default_factory=lambda: Buckets(ROW_BUCKETS))
    queue_s: Buckets = field(default_factory=lambda: Buckets(QUEUE_S_BUCKETS))
    by_source: dict[ProposalSource, SourceCounts] = field(default_factory=_by_source)

    def numbers(self) -> dict[str, int]:
        """The plain counts as of now, without histograms."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in values if isinstance(value, int)}

    def end_pass(self, record: PassRecord) -> None:
        pass_us = record.ended_us - record.started_us
        self.num_passes += 1
        self.num_rows += record.num_rows
        self.num_prefill_rows += record.num_prefill_rows
        self.busy_us += pass_us
        self.pass_s.observe(pass_us / _US)
        self.pass_rows.observe(record.num_rows)

    def end_round(
        self, delta: TokenDelta, chosen: int, num_unused: int, source: ProposalSource = ""
    ) -> None:
        """`chosen`: the K in force. `source`: what made the proposals, "" where there were none."""
        num_draft, num_accepted = delta.num_draft_tokens, delta.num_accepted_tokens
        self.num_rounds += 1
        self.num_plain_rounds += num_draft == 0
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        self.num_unused_tokens += num_unused
        self.num_committed_tokens += len(delta.token_ids)
        self.chosen.observe(chosen if chosen > num_draft else num_draft)
        if num_draft == 0:
            return
        if source:
            counts = self.by_source[source]
            counts.num_rounds += 1
            counts.num_draft_tokens += num_draft
            counts.num_accepted_tokens += num_accepted
        # An EOS ends a block, too: then the proposals behind it were right or wrong, who knows.
        # Of a tree most nodes are never accepted: the last token says whether one was missing.
        is_rejected = delta.origins[-1:] == (TokenOrigin.RECOVERED,)
        self.num_rejected_rounds += is_rejected and delta.finish_reason is None
        per_pos = self.accepted_per_pos
        for position in range(num_accepted):
            per_pos[position if position < MAX_POSITION else MAX_POSITION] += 1

    def admit(self, queue_us: int, num_preemptions: int) -> None:
        """A choice has got a place; only its first one is what it came for. `queue_us` < 0: it came
        after the end of the pass that made room, by which it was let in."""
        if not num_preemptions:
            self.queue_s.observe(max(0, queue_us) / _US)
