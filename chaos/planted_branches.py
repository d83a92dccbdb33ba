"""Planted bugs of what a lookahead policy asks for: drafts that rest, and branches.

Each is a small subclass; the simulation must find each within some seeds: `chaos.planted.find`.
"""

from dataclasses import replace

from paceline.protocol.draft_session import DraftSession
from paceline.protocol.target_session import TargetSession
from paceline.testing.world import Parts


class AdoptsWhateverIsThere(TargetSession):
    """The position fits, the text before it may be another one."""

    def _adopt(self, *, is_flushed):
        here = self.committed_len
        for position, context_hash in list(self.alternates._held):
            if position == here:
                held = self.alternates._held.pop((position, context_hash))
                self.alternates._held[here, self.log.hash_at(here)] = held
        super()._adopt(is_flushed=is_flushed)


class KeepsDeadAlternates(TargetSession):
    def _adopt(self, *, is_flushed):
        held = dict(self.alternates._held)
        super()._adopt(is_flushed=is_flushed)
        self.alternates._held = held


class KeepsAlternatesOfOldDrafts(TargetSession):
    """What a lost draft had prepared outlives it, and the credit that it had."""

    def empty_window(self):
        held = dict(self.alternates._held)
        super().empty_window()
        self.alternates._held = held


class AdoptsInRejectionModes(TargetSession):
    @property
    def fan_out(self):
        return self._fan_out

    @fan_out.setter
    def fan_out(self, fan_out):
        self._fan_out = fan_out


class HoldsBranchesWithoutABound(TargetSession):
    def receive_draft(self, draft):
        self.alternates.max_tokens = 1 << 20
        return super().receive_draft(draft)


class WakesWithTheLastRoundOnly(TargetSession):
    """A draft that has rested is told what this round committed, and nothing before it."""

    def due_verdict(self, delta):
        if self.max_draft_ahead:
            self._told_len = self.committed_len - len(delta.token_ids)
        return super().due_verdict(delta)


class NeverTellsWhoRests(TargetSession):
    def due_verdict(self, delta):
        return super().due_verdict(delta) if self.max_draft_ahead else None


class TakesCreditBack(TargetSession):
    """A smaller look-ahead holds for what was granted before, too."""

    def _verdict(self, *args, **kwargs):
        self._granted_limit = 0
        return super()._verdict(*args, **kwargs)


class BranchesUnasked(DraftSession):
    """No fan-out is taken for one."""

    def _set_fan_out(self, fan_out):
        super()._set_fan_out(max(1, fan_out))


class BranchesBeyondItsLimit(DraftSession):
    def ready_branches(self):
        self.branches.grow(self.log, self.committed_len, self._runner_ups)
        return self.branches.ready(self.committed_len, self._limit + 1)

    def end_branch(self, branch, result):
        return self.branches.end_work(branch, result, self.limit_position + 1)


class KeepsTheCacheOfItsOldText(DraftSession):
    """A branch becomes the text, but not its engine sequence."""

    def _promote(self, verdict):
        old = self.sequence_id
        position = super()._promote(verdict)
        self.sequence_id = old
        return position


class LiesAboutItsContext(DraftSession):
    """A branch is said to go on from the draft's own text."""

    def take_branch_drafts(self, sent_us=0):
        for draft in super().take_branch_drafts(sent_us):
            start = min(draft.start, len(self.log))
            yield replace(draft, start=start, context_hash=self.log.hash_at(start))


BUGS = {
    "adopts whatever is there": Parts(target_session=AdoptsWhateverIsThere),
    "keeps dead alternates": Parts(target_session=KeepsDeadAlternates),
    "keeps alternates of old drafts": Parts(target_session=KeepsAlternatesOfOldDrafts),
    "adopts in rejection modes": Parts(target_session=AdoptsInRejectionModes),
    "holds branches without a bound": Parts(target_session=HoldsBranchesWithoutABound),
    "wakes with the last round only": Parts(target_session=WakesWithTheLastRoundOnly),
    "never tells who rests": Parts(target_session=NeverTellsWhoRests),
    "takes credit back": Parts(target_session=TakesCreditBack),
    "branches unasked": Parts(draft_session=BranchesUnasked),
    "branches beyond its limit": Parts(draft_session=BranchesBeyondItsLimit),
    "keeps the cache of its old text": Parts(draft_session=KeepsTheCacheOfItsOldText),
    "lies about its context": Parts(draft_session=LiesAboutItsContext),
}
