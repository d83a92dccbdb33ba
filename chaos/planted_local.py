"""Planted bugs of proposals that are made inside the target: each is a small subclass.

Any proposal is as exact as another, so what can go wrong is which of them are committed, what
becomes of the draft's, and what a proposer's failure costs.
"""

from dataclasses import replace

from paceline.protocol.target_session import TargetSession
from paceline.protocol.verifying import Verifying
from paceline.target.local_drafts import LocalDrafts
from paceline.target.scheduler import Scheduler
from paceline.testing.world import Parts


def with_local(planted):
    """A scheduler whose local proposals have a bug."""

    class Planted(Scheduler):
        def __init__(self, *parts):
            super().__init__(*parts)
            self.local.__class__ = planted

    return Parts(scheduler=Planted)


class CommitsTheWindowInstead(TargetSession):
    """Local proposals are verified, and what is committed is read from the log: it may have moved
    on since, and is somebody else's."""

    def begin_verify(self, limit, *local):
        token_ids = super().begin_verify(limit, *local)
        window = self.log.slice(self.committed_len, self.committed_len + len(token_ids))
        if self._verifying.is_local and len(window) == len(token_ids):
            parents = self._verifying.parents
            self._verifying = Verifying(window, self._verifying.probs, parents, is_local=True)
        return token_ids


class LosesTheWindow(TargetSession):
    """A refusal of local proposals empties the draft's window."""

    def commit(self, acceptance, *path):
        is_local = self._verifying.is_local
        delta = super().commit(acceptance, *path)
        if is_local and delta.num_accepted_tokens < delta.num_draft_tokens:
            self.empty_window()
        return delta


class CommitsATreeAsAChain(TargetSession):
    """The first nodes are committed, whichever were accepted."""

    def commit(self, acceptance, *path):
        if self._verifying is not None and self._verifying.parents:
            verified = self._verifying
            self._verifying = Verifying(verified.token_ids, is_local=True)
        return super().commit(acceptance)


class CountsNodesAsDepth(Scheduler):
    """Of a tree, the token behind the accepted nodes is taken from the row that has their number,
    as in a chain: the rows of the engine's answer are not those of the item."""

    def _commit(self, entry, result, times):
        if entry.item.tree_parents:
            last = result.token_ids[min(result.num_accepted + 1, len(result.token_ids)) - 1]
            token_ids = (*entry.draft_token_ids[: result.num_accepted], last)
            result = replace(result, token_ids=token_ids)
        return super()._commit(entry, result, times)


class AsksADraftAllTheSame(LocalDrafts):
    def open(self, sequence):
        asked = sequence.lookahead.asked
        super().open(sequence)
        sequence.lookahead.asked = asked


class LetsAProposerFailThePass(LocalDrafts):
    def _propose(self, sequence, found, source):
        num = self._stats.by_source[source.name].num_failures
        super()._propose(sequence, found, source)
        if self._stats.by_source[source.name].num_failures > num:
            raise ValueError(source.name)


BUGS = {
    "local: commits the window instead": Parts(target_session=CommitsTheWindowInstead),
    "local: loses the window": Parts(target_session=LosesTheWindow),
    "local: a tree is committed as a chain": Parts(target_session=CommitsATreeAsAChain),
    "local: nodes are counted as depth": Parts(scheduler=CountsNodesAsDepth),
    "local: asks a draft all the same": with_local(AsksADraftAllTheSame),
    "local: a proposer fails the pass": with_local(LetsAProposerFailThePass),
}
