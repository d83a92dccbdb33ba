"""What the policy knows of each sequence's acceptance, kept in its `SequenceLookahead`. Pure.

It ties a sequence to its class, mixes both into survivals and keeps these until either has learnt
something. It does not know costs or passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.protocol.acceptance_model import AcceptanceModel, ClassProfile, Survivals
from paceline.protocol.lone_wait import AcceptanceEstimate
from paceline.protocol.lookahead_types import SequenceLookahead, StarvationCounts, Window


class SequenceBook:
    """`model` has the classes."""

    def __init__(self, max_num_speculative_tokens: int) -> None:
        self.model = AcceptanceModel(max_num_speculative_tokens)
        self._wanted = self._missing = 0.0

    def profile(self, lookahead: SequenceLookahead) -> ClassProfile:
        """Its class's. What another draft achieved says nothing about this one."""
        profile = lookahead.profile
        if (
            profile is None
            or lookahead.profile_key is not lookahead.key
            or profile.length != self.model.length  # forgotten by the model, then limits changed
        ):
            old = lookahead.profile_key
            if old is not None and old.draft_model and old != lookahead.key:
                lookahead.posterior = AcceptanceEstimate()
            profile = lookahead.profile = self.model.profile(lookahead.key)
            lookahead.profile_key, lookahead.version = lookahead.key, -1
        return profile

    def survivals(self, lookahead: SequenceLookahead) -> Survivals:
        profile, survivals = self.profile(lookahead), lookahead.survivals
        if survivals is None or lookahead.version != profile.version:
            return _refresh(lookahead, profile)
        return survivals

    def learn(
        self, lookahead: SequenceLookahead, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        """A round in which `num_draft_tokens` (>= 1) were compared."""
        profile = self.profile(lookahead)
        profile.update(num_draft_tokens, num_accepted_tokens)
        lookahead.posterior.update(num_draft_tokens, num_accepted_tokens)
        _refresh(lookahead, profile)

    def rest(self, lookahead: SequenceLookahead, price: float) -> bool:
        """A sequence has rested for a round; True when it is to probe.

        Where others of its class do well, it probes for itself; else one probes for all of them.
        """
        profile = self.profile(lookahead)
        if profile.mean >= price:
            return lookahead.probes.rest()
        if not profile.probes.rest():
            return False
        profile.forget()
        return True

    def count_wanted(self, windows: Sequence[Window]) -> bool:
        """Count what full windows would bring and what is missing of that; True when drafts are at
        work for anybody whose K is not fixed."""
        is_drafting = False
        for window in windows:
            lookahead = window.lookahead
            cap = lookahead.cap
            if cap:
                is_drafting |= not lookahead.is_fixed
                sums = self.survivals(lookahead).sums
                cap = min(cap, len(sums) - 1)  # limits may have come down since
                self._wanted += sums[cap]
                if window.have < cap:
                    self._missing += sums[cap] - sums[window.have]
        return is_drafting

    @property
    def starvation(self) -> StarvationCounts:
        return StarvationCounts(self._wanted, self._missing)


def _refresh(lookahead: SequenceLookahead, profile: ClassProfile) -> Survivals:
    lookahead.posterior.prior = profile.mean
    lookahead.version = profile.version
    lookahead.survivals = profile.survivals(lookahead.posterior.rate)
    return lookahead.survivals
