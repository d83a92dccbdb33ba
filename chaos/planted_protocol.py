"""Planted bugs of the draft protocol and of the scheduler: each is a small subclass.

The simulation must find each within some seeds: `chaos.planted.find`.
"""

from dataclasses import replace
from typing import ClassVar

from paceline.engine.base import Verify
from paceline.protocol.draft_session import DraftSession, Rewind
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.link import LinkState
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import Acceptance
from paceline.target.draft_desk import DraftDesk
from paceline.target.scheduler import Hold, PassPlan, Scheduler
from paceline.testing.world import Parts, RememberingToyEngine


class RewindsOneTooFew(DraftSession):
    """The cache keeps the first rejected token."""

    def receive_verdict(self, verdict):
        computed = self.num_computed
        outcome = super().receive_verdict(verdict)
        if isinstance(outcome, Rewind):
            self.num_computed = min(computed, outcome.length + 1)
        return outcome


class TrustsItsCache(DraftSession):
    """A rewind during a pass is forgotten when the pass ends."""

    def end_work(self, token_id, draft_us=0):
        end = self._working.end
        became = super().end_work(token_id, draft_us)
        self.num_computed = min(end, len(self.log))
        return became


class DraftsBeyondItsLimit(DraftSession):
    def receive_verdict(self, verdict):
        beyond = replace(verdict, limit_position=verdict.limit_position + 1)
        return super().receive_verdict(beyond)


class KeepsSessionsOfLostLinks(DraftTable):
    def lose_link(self, link_id):
        pass


class TargetTakesStaleEpoch(TargetSession):
    def receive_draft(self, draft):
        return super().receive_draft(replace(draft, epoch=self.epoch))


class ChecksNoContext(TargetSession):
    def receive_draft(self, draft):
        if draft.start <= len(self.log):
            draft = replace(draft, context_hash=self.log.hash_at(draft.start))
        return super().receive_draft(draft)


class ClosesGaps(TargetSession):
    """A proposal behind a gap is taken for the next one."""

    def receive_draft(self, draft):
        if draft.start > len(self.log):
            here = len(self.log)
            draft = replace(draft, start=here, context_hash=self.log.hash_at(here))
        return super().receive_draft(draft)


class TakesDuplicatesTwice(TargetSession):
    def receive_draft(self, draft):
        disposition = super().receive_draft(draft)
        if disposition == "duplicate" and self._granted_limit > len(self.log):
            self.log.extend(draft.token_ids[:1])
        return disposition


class WindowIgnoresCredit(TargetSession):
    def receive_draft(self, draft):
        self._granted_limit += 100
        return super().receive_draft(draft)


class CommitsARejectedToken(TargetSession):
    def commit(self, acceptance, *path):
        num = min(acceptance.num_accepted_tokens + 1, len(self._verifying.token_ids))
        return super().commit(Acceptance(num, acceptance.next_token_id), *path)


class ForgetsEos(TargetSession):
    def _cut(self, token_ids):
        self.stop_token_ids = frozenset()
        return super()._cut(token_ids)


class WritesOneMore(TargetSession):
    def begin_verify(self, limit, *local):
        if self.num_output_tokens == 0:
            self.end_len += 1
        return super().begin_verify(limit, *local)


class KeysNoiseByRound(Scheduler):
    """Output index counts passes, so noise depends on how many tokens each pass yielded."""

    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        item = replace(entry.item, output_index=sequence.session.round)
        return replace(entry, item=item)


class LeavesOneOut(Scheduler):
    """A sequence without proposals waits while others run."""

    def plan(self, now_us):
        plan = super().plan(now_us)
        if isinstance(plan, Hold) or len(plan.entries) < 2:
            return plan
        last = self._sequences[plan.entries[-1].session_id]
        last.in_pass = False
        last.session.cancel_verify()
        return PassPlan(plan.entries[:-1])


class WaitsForDrafts(Scheduler):
    def plan(self, now_us):
        running = [self._sequences[i].session for i in self._running]
        if any(s.link is LinkState.STREAMING and not s.window_len for s in running):
            return Hold(now_us + 50_000)
        return super().plan(now_us)


class ResumesFromThePrompt(Scheduler):
    """A preempted sequence forgets what it has written."""

    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        prompt = sequence.request.prompt_token_ids
        if not sequence.num_preemptions or start >= len(prompt):
            return entry
        return replace(entry, item=replace(entry.item, token_ids=prompt[start:]))


class ResumesFromItsOldCache(Scheduler):
    """A preempted sequence believes that the engine still has its KV."""

    def make_room(self, plan):
        cached = {i: self._sequences[i].cached_len for i in self._running}
        can_go_on = super().make_room(plan)
        for session_id in self._roster.waiting:
            self._sequences[session_id].cached_len = cached.get(session_id, 0)
        return can_go_on


class KeepsPreemptedBlocks(Scheduler):
    def take_released(self):
        return [i for i in super().take_released() if i not in self._roster.waiting]


class OneNoiseForAllChoices(Scheduler):
    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        sampling = replace(entry.item.sampling, choice=0)
        return replace(entry, item=replace(entry.item, sampling=sampling))


class EveryChoiceScoresThePrompt(Scheduler):
    def _entry(self, sequence, start, max_rows, draft):
        choice, sequence.choice = sequence.choice, 0
        entry = super()._entry(sequence, start, max_rows, draft)
        sequence.choice = choice
        return entry


class ScoresThePromptAgain(Scheduler):
    """Prompt log-probabilities come with the second delta, too."""

    def _tell(self, told, now_us):
        sequence = told.sequence
        collected = list(sequence.prompt_logprobs)
        delta = super()._tell(told, now_us)
        sequence.prompt_logprobs += collected
        return delta


class DropsLogprobsOfAcceptedTokens(Scheduler):
    def _tell(self, told, now_us):
        delta = super()._tell(told, now_us)
        return replace(delta, logprobs=delta.logprobs[delta.num_accepted_tokens :])


class WaitsForNoPrompt(Scheduler):
    """Each choice computes the prompt for itself."""

    def add(self, request, now_us):
        first = super().add(request, now_us)
        for session_id in range(first, first + request.n):
            self._sequences[session_id].num_shared_tokens = 0
        return first


class PrefillsWithoutABound(Scheduler):
    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        return replace(entry, item=replace(entry.item, max_rows=None))


class TakesPrefillsForFinished(Scheduler):
    """A prefill that ran out of rows counts as done."""

    def commit_pass(self, plan, results, times, num_free_blocks):
        results = [replace(result, cached_len=None) for result in results]
        return super().commit_pass(plan, results, times, num_free_blocks)


class VerifiesWithOldNoise(Scheduler):
    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        if not isinstance(entry.item.rule, Verify):
            return entry
        return replace(entry, item=replace(entry.item, rule=replace(entry.item.rule, round=0)))


class TakesLawfulForMatching(Scheduler):
    """Rejection modes accept what the target would have drawn by itself."""

    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        return replace(entry, item=replace(entry.item, rule=None))


class PenaltiesWithoutTheBlock(RememberingToyEngine):
    """Row i of a block counts what was committed, but not the proposals before it."""

    _tokens: ClassVar = {}

    def _row(self, state, item, offset):
        first, row = super()._row(state, item, 0), super()._row(state, item, offset)
        return replace(row, output_token_ids=first.output_token_ids)


class SilentDesk(DraftDesk):
    def _part(self, sequence, reason):
        pass


class NeverCloses(Scheduler):
    def __init__(self, *args):
        super().__init__(*args)
        self.drafts.__class__ = SilentDesk


BUGS = {
    "rewinds one too few": Parts(draft_session=RewindsOneTooFew),
    "trusts its cache": Parts(draft_session=TrustsItsCache),
    "drafts beyond its limit": Parts(draft_session=DraftsBeyondItsLimit),
    "keeps sessions of lost links": Parts(draft_table=KeepsSessionsOfLostLinks),
    "target takes stale epoch": Parts(target_session=TargetTakesStaleEpoch),
    "checks no context": Parts(target_session=ChecksNoContext),
    "closes gaps": Parts(target_session=ClosesGaps),
    "takes duplicates twice": Parts(target_session=TakesDuplicatesTwice),
    "window ignores credit": Parts(target_session=WindowIgnoresCredit),
    "commits a rejected token": Parts(target_session=CommitsARejectedToken),
    "forgets eos": Parts(target_session=ForgetsEos),
    "writes one more": Parts(target_session=WritesOneMore),
    "keys noise by round": Parts(scheduler=KeysNoiseByRound),
    "leaves one out": Parts(scheduler=LeavesOneOut),
    "waits for drafts": Parts(scheduler=WaitsForDrafts),
    "never closes": Parts(scheduler=NeverCloses),
    "resumes from the prompt": Parts(scheduler=ResumesFromThePrompt),
    "resumes from its old cache": Parts(scheduler=ResumesFromItsOldCache),
    "keeps preempted blocks": Parts(scheduler=KeepsPreemptedBlocks),
    "one noise for all choices": Parts(scheduler=OneNoiseForAllChoices),
    "every choice scores the prompt": Parts(scheduler=EveryChoiceScoresThePrompt),
    "scores the prompt again": Parts(scheduler=ScoresThePromptAgain),
    "drops logprobs of accepted tokens": Parts(scheduler=DropsLogprobsOfAcceptedTokens),
    "waits for no prompt": Parts(scheduler=WaitsForNoPrompt),
    "prefills without a bound": Parts(scheduler=PrefillsWithoutABound),
    "takes prefills for finished": Parts(scheduler=TakesPrefillsForFinished),
    "verifies with old noise": Parts(scheduler=VerifiesWithOldNoise),
    "takes lawful for matching": Parts(scheduler=TakesLawfulForMatching),
    "penalties without the block": Parts(target_engine=PenaltiesWithoutTheBlock),
}
