"""Candidates of the target's Medusa heads: when to ask for them, and what becomes of them. Pure.

They hold for the places right behind the tokens of the pass that gave them. It knows sequences and
the lookahead policy, no pass and no engine.
"""

from __future__ import annotations

from paceline.config import SpeculationConfig
from paceline.proposers.base import NOTHING, LocalProposal
from paceline.proposers.tree import candidate_tree, chain
from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.lookahead import AcceptanceClass, LookaheadPolicy
from paceline.protocol.messages import REJECTION_MODES
from paceline.target.head_stats import MAX_HEAD_CANDIDATES, HeadStats, node_survivals
from paceline.target.sequence import Sequence
from paceline.target.sources import Source, SourceSet

# Accepted tokens that heads must be expected to bring in a pass: to ask them costs about so much.
MIN_HEAD_GAIN = 0.2
MAX_HEAD_CLASSES = 64  # of which something is known; one more, and all begin anew


class HeadDrafts:
    """Of one target, whose engine has `num_heads`."""

    def __init__(
        self, num_heads: int, speculation: SpeculationConfig, policy: LookaheadPolicy
    ) -> None:
        self._num_heads = num_heads
        self.speculation = speculation
        self.policy = policy
        self._stats: dict[AcceptanceClass, HeadStats] = {}

    def num_candidates(self, sequence: Sequence) -> int:
        """Of each head, to ask the next pass for; 0: none. One that may be why a pass failed does
        without; so does everybody while nothing is to be verified or heads have not paid."""
        source = None if sequence.sources is None else sequence.sources.get("medusa")
        if source is None or sequence.is_suspect or not self.policy.ceiling(source.lookahead):
            return 0
        if not self.policy.is_fixed(source.lookahead):
            is_quiet = self.stats(source.lookahead.key).is_quiet
            if is_quiet or self.policy.profit.deal.is_resting:
                return 0
        if not _can_branch(sequence):
            return 1
        return min(MAX_HEAD_CANDIDATES, self.speculation.medusa_max_nodes)

    def propose(
        self, sequence: Sequence, source: Source, most: int
    ) -> tuple[LocalProposal, Survivals | None]:
        """A tree where the law of a row depends on what is before it through logits alone, else a
        chain; at most `most` nodes."""
        found = sequence.sources
        heads = () if found is None else found.heads_behind(sequence.session.committed_len)
        if not heads:
            return NOTHING, None
        table = self.stats(source.lookahead.key).table
        if _can_branch(sequence):
            num_nodes = min(most, self.speculation.medusa_max_nodes)
            proposal = candidate_tree(heads, num_nodes, most, table)
        else:
            proposal = chain(heads, most)
        return proposal, node_survivals(proposal, heads, table)

    def end_round(
        self, sequence: Sequence, found: SourceSet, text: tuple[int, ...], num_draft_tokens: int
    ) -> None:
        """A pass is about to commit `text`, having verified so many proposals. Where it could not
        verify any, whatever they were, heads have neither won nor lost."""
        source = found.get("medusa")
        if source is None:
            return
        stats = self.stats(source.lookahead.key)
        heads = found.heads_behind(sequence.session.committed_len)
        if heads:
            stats.learn(heads, text)
        if self.policy.profit.deal.is_resting and not self.policy.is_fixed(source.lookahead):
            return
        if not heads:
            if stats.is_quiet:
                stats.rest()
            return
        chosen = found.chosen
        if chosen is None or (not num_draft_tokens and chosen.have and chosen.lookahead.cap):
            return  # a suspect, or short of rows or blocks
        gain = 0.0
        if source is chosen and source.survivals is not None:
            gain = source.survivals.sums[num_draft_tokens]
        if gain < MIN_HEAD_GAIN:
            stats.lose()
        elif not found.is_trying:
            stats.win()

    def end_pass(self) -> int:
        """All sequences of a pass are done; returns for how many classes heads are to be tried
        again."""
        return sum([stats.end_pass() for stats in self._stats.values()])

    def stats(self, key: AcceptanceClass) -> HeadStats:
        stats = self._stats.get(key)
        if stats is None:
            if len(self._stats) >= MAX_HEAD_CLASSES:
                self._stats.clear()
            stats = self._stats[key] = HeadStats(self._num_heads)
        return stats


def _can_branch(sequence: Sequence) -> bool:
    session = sequence.session
    sampling = session.sampling
    needs_history = sampling.has_penalties or sampling.min_tokens > 0 or bool(sampling.grammar)
    return session.mode not in REJECTION_MODES and not needs_history
