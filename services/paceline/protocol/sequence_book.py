"""What the policy knows of each sequence's acceptance, kept in its `SequenceLookahead`. Pure.

It ties a sequence to its class, mixes both into survivals and keeps these until either has learnt
something. It does not know costs or passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.protocol.acceptance_model import AcceptanceModel, ClassProfile, Survivals
from paceline.protocol.draft_cost import COMPARING_MODES
from paceline.protocol.lone_wait import AcceptanceEstimate
from paceline.protocol.lookahead_types import SequenceLookahead, StarvationCounts, Window

MAX_WATCH_PASSES = 256

_PROBE_PASSES = 6  # with proposals, beside those that the first of them take to come
_RESTING_WEIGHT = 4.0  # most evidence that a sequence keeps when it goes to rest: new one counts
_HOPELESS_RATE = 0.08


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
        profile.update(num_draft_tokens, num_accepted_tokens, lookahead.posterior.rate)
        lookahead.posterior.update(num_draft_tokens, num_accepted_tokens)
        _refresh(lookahead, profile)

    # -- sequences without a K; `num_passes` were done, a draft answers within `depth` --------

    def stop(self, lookahead: SequenceLookahead, num_passes: int) -> None:
        """It has a K no longer: new evidence is to count, and its draft is watched for twice as
        long as it had one."""
        lookahead.posterior.forget(_RESTING_WEIGHT)
        watch = min(MAX_WATCH_PASSES, 2 * (num_passes - lookahead.active_since))
        lookahead.watch_until = max(lookahead.watch_until, num_passes + watch)
        lookahead.active_since = 0

    def is_watched(self, lookahead: SequenceLookahead, num_passes: int, is_drafting: bool) -> bool:
        """Whether its draft goes on, with a proposal for each pass.

        None is verified, but each is compared with what the pass commits, so that it is seen at
        once when the draft is right again. That costs the draft's time, and may slow the target
        down where they share a machine. So it is done where it promises something: after a K,
        when a probe of the class was right, and (`is_drafting`) beside others at work, unless
        nearly everything is wrong.
        """
        if lookahead.key.mode not in COMPARING_MODES:
            return False
        profile = self.profile(lookahead)
        if num_passes < max(lookahead.watch_until, profile.watch_until):
            return True
        return is_drafting and lookahead.posterior.rate > _HOPELESS_RATE

    def rest(self, lookahead: SequenceLookahead, price: float, num_passes: int, depth: int) -> None:
        """It has rested in this pass, unwatched; when it is time it begins to probe.

        Where others of its class do well, it probes for itself; else one probes for all of them.
        """
        profile = self.profile(lookahead)
        if profile.mean >= price:
            is_due = lookahead.probes.rest(num_passes)
        else:
            is_due = profile.probes.rest(num_passes)
            if is_due:
                profile.forget()
        if is_due:
            lookahead.probe_until = num_passes + depth + _PROBE_PASSES

    def probe(
        self,
        lookahead: SequenceLookahead,
        num_passes: int,
        has_won: bool,
        was_right: bool,
        depth: int,
    ) -> None:
        """A pass while it probes. The first wrong proposal ends that; one that is right prolongs
        it, and has the drafts of all its class watched meanwhile: they learn for themselves."""
        profile = self.profile(lookahead)
        if has_won:
            lookahead.probe_until = 0
            profile.probes.win()
            lookahead.probes.win()
        elif lookahead.is_corrected:
            lookahead.probe_until = 0
        elif was_right:
            lookahead.probe_until = profile.watch_until = num_passes + depth + _PROBE_PASSES
        elif num_passes >= lookahead.probe_until:
            lookahead.probe_until = 0

    def count_wanted(self, windows: Sequence[Window]) -> bool:
        """Count what full windows of drafts would bring and what is missing of that; True when
        somebody has a K that is not fixed."""
        is_drafting = False
        for window in windows:
            lookahead = window.lookahead
            cap = lookahead.cap
            if cap:
                is_drafting |= not lookahead.is_fixed
                if window.is_local:
                    continue
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
