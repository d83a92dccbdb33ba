"""Proposals made inside the target: by looking texts up, and by Medusa heads.

A sequence's proposers are made when it first decodes, told what is committed, and dropped with it;
what they propose is verified instead of the draft's window, which stays as it is. A proposer that
fails costs its sequence that proposer, never a pass, and the log of the replica a line for all. It
knows sequences and the lookahead policy, no pass, queue or engine.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from paceline.config import SpeculationConfig
from paceline.engine.base import EngineInfo, StepResult
from paceline.methods import LOCAL_SOURCES, LOOKUPS, ProposalSource
from paceline.proposers.base import NOTHING, LocalProposal, Proposer
from paceline.proposers.ngram import NgramProposer
from paceline.proposers.suffix import SuffixProposer
from paceline.proposers.tree import cut
from paceline.protocol.lone_wait import LocalOffer
from paceline.protocol.lookahead import AcceptanceClass, LookaheadPolicy, SequenceLookahead, Window
from paceline.protocol.lookup_rests import LookupRests
from paceline.sampling.acceptance import Acceptance
from paceline.target.head_drafts import HeadDrafts
from paceline.target.lone_hold import local_offer
from paceline.target.lookahead import compared, num_outrun, num_unused, was_foreseen
from paceline.target.lookup_memory import LookupMemory
from paceline.target.passes import PassEntry
from paceline.target.sequence import Sequence
from paceline.target.sources import Source, SourceSet, choose, first_with_any, match, sources_of
from paceline.target.stats import SchedulerStats

logger = logging.getLogger(__name__)

# Tokens of a text that its proposer is told at once: what passes have committed since the last one.
MAX_OWED_TOKENS = 32
# Tokens that are learnt before a pass beside these: of long prompts and other backlogs, and of
# outputs that have ended, a part of each in turn, since a suffix tree takes 3 to 10 us a token (12
# to 29 us measured under load, more where texts repeat). Who does not know all proposes nothing.
MAX_TOLD_TOKENS = 1024
TURN_TOKENS = 256

_Owing = tuple[Sequence, SourceSet, list[Source]]  # these do not know all of the sequence's text


class LocalDrafts:
    """Of one target."""

    def __init__(
        self,
        info: EngineInfo,
        speculation: SpeculationConfig,
        policy: LookaheadPolicy,
        stats: SchedulerStats,
    ) -> None:
        self._info = info
        self._speculation = speculation
        self._policy = policy
        self._stats = stats
        self._heads = HeadDrafts(info.num_heads, speculation, policy)
        self.memory = LookupMemory(speculation)
        self._failed: set[ProposalSource] = set()  # a failure of these is in the log
        self._rests = LookupRests(policy)
        self._turn = 0  # among the backlogs

    @property
    def policy(self) -> LookaheadPolicy:
        return self._policy

    @policy.setter
    def policy(self, policy: LookaheadPolicy) -> None:
        self._policy = self._heads.policy = self._rests.policy = policy

    @property
    def num_trials(self) -> int:
        """Of lookups that rest, since start."""
        return self._rests.num_trials

    def set_speculation(
        self, speculation: SpeculationConfig, sequences: Iterable[Sequence]
    ) -> None:
        """The configuration has changed. Sequences in progress get and lose sources by it; the
        proposers that they have go on as they were made."""
        self._speculation = self._heads.speculation = speculation
        self.memory.set_speculation(speculation)
        for sequence in sequences:
            self.open(sequence)
        self.memory.enforce()

    # -- a sequence comes and goes ------------------------------------------------------------

    def open(self, sequence: Sequence) -> None:
        """Give it the sources that its request may use; without the draft's it asks no draft."""
        asked, found = sequence.request.speculation, sequence.sources
        names = sources_of(asked.method, self._speculation, self._info.num_heads)
        names = tuple(name for name in names if name not in sequence.barred_sources)
        self._release(sequence, keep=names)
        sequence.lookahead.asked = asked.max_tokens if "model" in names else 0
        if not set(names) - {"model"}:
            if found is None or not sequence.in_pass:
                sequence.sources = None
            else:
                found.sources = []  # the open pass keeps the source that it was planned with
            return
        old = {} if found is None else {source.name: source for source in found.sources}
        sources = [old.get(name) or _source(sequence, name) for name in names]
        is_auto = (asked.method or self._speculation.method) == "auto"
        if found is None:
            sequence.sources = SourceSet(sources, is_auto)
        else:
            found.sources, found.is_auto = sources, is_auto

    def close(self, sequence: Sequence) -> None:
        """It has ended; if its output is whole and it looked texts up in others', later texts may
        go on like it."""
        found = sequence.sources
        if sequence.session.is_finished and found is not None and found.get("suffix") is not None:
            self.memory.put_off(sequence)
        self._release(sequence, keep=())
        sequence.sources = None

    def _release(self, sequence: Sequence, keep: tuple[ProposalSource, ...]) -> None:
        for name in LOOKUPS:
            if name not in keep:
                self.memory.release(sequence.session.session_id, name)

    def bar(self, sequence: Sequence, entry: PassEntry, is_alone: bool) -> bool:
        """A pass failed: heads that it asked, or a local source whose proposals it verified for
        this sequence alone, have no say in it any more. False when there was nothing of that.

        Whose heads it was nobody knows, and who does without only loses time.
        """
        source = sequence.source_of(len(entry.draft_token_ids))
        barred: set[ProposalSource] = {"medusa"} if entry.item.num_head_candidates else set()
        if is_alone and source in LOCAL_SOURCES:
            barred.add(source)
        sequence.barred_sources |= barred
        if barred:
            self.open(sequence)
        return bool(barred)

    # -- before a pass ------------------------------------------------------------------------

    def begin_plan(self, running: Iterable[Sequence]) -> None:
        """A pass is to be planned: who looks texts up for it, and what is learnt before."""
        owing: list[_Owing] = []
        wants_outputs = False
        for sequence in running:
            found, behind = sequence.sources, list[Source]()
            if found is None:
                continue
            for source in found.sources:
                if not source.looks_up:
                    continue
                source.is_asleep = not self._may_look(sequence, source)
                if not source.is_asleep:
                    wants_outputs |= source.name == "suffix"
                    if sequence.session.committed_len - source.told_len > MAX_OWED_TOKENS:
                        behind.append(source)
            if behind:
                owing.append((sequence, found, behind))
        self._learn_backlogs(owing, wants_outputs)

    def _may_look(self, sequence: Sequence, source: Source) -> bool:
        session_id, num_passes = sequence.session.session_id, self._stats.num_passes
        can_scout = sequence.is_decoding and not sequence.is_suspect
        return self._rests.may_look(source.lookahead, session_id, num_passes, can_scout)

    def _learn_backlogs(self, owing: list[_Owing], wants_outputs: bool) -> None:
        """`MAX_TOLD_TOKENS` in all: `TURN_TOKENS` of the ended outputs and of each text in turn;
        what is over goes to the outputs. Two lookups of one text learn it for the price of one:
        an index takes little beside a tree."""
        left = MAX_TOLD_TOKENS
        if wants_outputs:
            left -= self.memory.learn(min(left, TURN_TOKENS))
        first = self._turn % len(owing) if owing else 0
        turns = deque((*owing[first:], *owing[:first]))
        while left > 0 and turns:
            sequence, found, behind = turns.popleft()
            self._turn += 1
            told = 0
            for source in behind:
                if source.name in sequence.barred_sources:
                    continue  # dropped for want of memory, since these turns began
                before = source.told_len
                with self._failing(sequence, found, source):
                    self._tell(sequence, source, min(left, TURN_TOKENS))
                told = max(told, source.told_len - before)
            left -= told
            if told:
                turns.append((sequence, found, behind))
        if wants_outputs:
            self.memory.learn(left)

    def prefill(self, sequence: Sequence) -> None:
        """Its next pass verifies nothing."""
        self._ask_heads(sequence)
        if sequence.sources is not None:
            sequence.sources.chosen, sequence.sources.is_trying = None, False

    def _ask_heads(self, sequence: Sequence) -> None:
        """Decide whether its next pass asks heads what comes behind the tokens that it commits."""
        sequence.num_head_candidates = self._heads.num_candidates(sequence)

    def window(self, sequence: Sequence) -> Window:
        """What its next pass may verify: picks the source."""
        found = sequence.sources
        self._ask_heads(sequence)
        if found is not None:
            found.chosen, found.is_trying = None, False
        if sequence.is_suspect:
            return Window(sequence.lookahead, 0)
        if found is not None:
            self._offer(sequence, found)
        if found is None or not found.sources:
            return Window(sequence.lookahead, sequence.session.window_len)
        if found.is_auto:
            source, found.is_trying = choose(found.sources, self._gain)
        else:
            source = first_with_any(found.sources)
        found.chosen = source
        if found.is_trying:
            self._policy.try_once(source.lookahead)
        return Window(source.lookahead, source.have, source.survivals, source.is_local)

    def begin_verify(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        """At most `limit` proposals of the source that `window` has picked."""
        source = None if sequence.sources is None else sequence.sources.chosen
        if source is None or not source.is_local:
            return sequence.session.begin_verify(limit)
        if limit < 1:
            return sequence.session.begin_verify(0)
        return sequence.session.begin_verify(limit, cut(source.proposal, limit))

    def offer(self, sequence: Sequence) -> LocalOffer | None:
        """What a pass that begins now could verify of local proposals; None: of none."""
        found = sequence.sources
        if found is None or sequence.is_suspect or not sequence.is_decoding:
            return None
        self._offer(sequence, found)
        if not found.is_auto and sequence.session.window_len:
            return None  # hybrid takes the window
        return local_offer(found.sources)

    def _gain(self, source: Source) -> tuple[float, float]:
        return self._policy.gain(source.lookahead, source.have, source.survivals)

    def _offer(self, sequence: Sequence, found: SourceSet) -> None:
        session = sequence.session
        for source in found.sources:
            if source.name in sequence.barred_sources:
                continue  # dropped for want of memory, for one that came before it here
            if not source.is_local:
                source.have = session.window_len
                continue
            if source.is_asleep:
                source.proposal, source.survivals, source.have = NOTHING, None, 0
            elif source.offered_at != session.committed_len:
                self._propose(sequence, found, source)
                source.offered_at = session.committed_len
                source.have = len(source.proposal.token_ids)
            self._policy.aim(source.lookahead, source.survivals)

    def _propose(self, sequence: Sequence, found: SourceSet, source: Source) -> None:
        session = sequence.session
        room = session.end_len - session.committed_len - 1
        most = min(room, self._policy.ceiling(source.lookahead))
        source.proposal, source.survivals = NOTHING, None
        if most < 1:
            return
        if source.name == "medusa":
            source.proposal, source.survivals = self._heads.propose(sequence, source, most)
            return
        with self._failing(sequence, found, source):
            source.proposal = self._look_up(sequence, source, most)

    @contextmanager
    def _failing(self, sequence: Sequence, found: SourceSet, source: Source) -> Iterator[None]:
        """Whatever a proposer raises, the text goes on without it."""
        try:
            yield
        except Exception:
            if source.name not in self._failed:
                logger.exception("a %s proposer failed; from now on this is counted", source.name)
            self._failed.add(source.name)
            self._stats.by_source[source.name].num_failures += 1
            self.memory.release(sequence.session.session_id, source.name)
            sequence.barred_sources.add(source.name)
            found.drop(source.name)

    def _look_up(self, sequence: Sequence, source: Source, most: int) -> LocalProposal:
        """Of a backlog it is told as much as has been committed since: that does not grow."""
        length = sequence.session.committed_len
        owed = length - source.told_len
        if owed > MAX_OWED_TOKENS:
            since = length - source.offered_at if source.offered_at >= 0 else 0
            owed = min(MAX_OWED_TOKENS, since)
        self._tell(sequence, source, owed)
        if source.proposer is None or source.told_len < length:
            return NOTHING
        self._rests.look(source.lookahead)
        token_ids = source.proposer.propose(most)[:most]
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._info.vocab_size:
            raise ValueError(f"{source.name} proposed an id outside of the vocabulary")
        return LocalProposal(token_ids)

    def _tell(self, sequence: Sequence, source: Source, most: int) -> None:
        """At most so many of the committed tokens that it does not know."""
        session = sequence.session
        told_len = min(session.committed_len, source.told_len + most)
        if not self.memory.grow(sequence, source, told_len - source.told_len):
            return
        if source.proposer is None:
            source.proposer = self._proposer(sequence, source.name)
        source.proposer.extend(session.log.slice(source.told_len, told_len))
        source.told_len = told_len

    def _proposer(self, sequence: Sequence, name: ProposalSource) -> Proposer:
        config, request = self._speculation, sequence.request
        if name == "ngram":
            return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        return SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            self.memory.recent,
            str(request.cache_salt),
            request.adapter,
        )

    # -- after a pass -------------------------------------------------------------------------

    def end_round(
        self, sequence: Sequence, entry: PassEntry, result: StepResult, acceptance: Acceptance
    ) -> int:
        """Learn from what a pass is about to commit; returns how many proposals of the draft that
        makes useless. Asked before `commit`.

        What was not verified is compared with the text, where that is a fair test: it costs
        nothing, and shows that a source which is not chosen is good.
        """
        num_draft, num_accepted = len(entry.draft_token_ids), acceptance.num_accepted_tokens
        text = (*entry.accepted(result, acceptance), acceptance.next_token_id)
        session, found = sequence.session, sequence.sources
        source = None if found is None else found.chosen
        if num_draft and source is not None and source.is_local:
            num_seen, num_right = compared(session, text)
            self._policy.end_round(sequence.lookahead, num_seen, num_right)
            num_learnt, num_useless = num_seen, num_outrun(session, text)
        else:
            foreseen = was_foreseen(session, num_draft, acceptance)
            self._policy.end_round(sequence.lookahead, num_draft, num_accepted, foreseen)
            num_learnt = num_draft + (foreseen is not None)
            num_useless = num_unused(session, num_draft, acceptance)
        if found is not None:
            for each in found.sources:
                if each.is_local:
                    num_learnt_of_it, num_right = match(each.proposal, text)
                    self._policy.learn(each.lookahead, num_learnt_of_it, num_right)
                    if each.looks_up:
                        self._rests.learn(each.lookahead, num_right)
                else:
                    num_learnt_of_it = num_learnt
                each.num_unlearnt *= not num_learnt_of_it
            self._heads.end_round(sequence, found, text, num_draft)
        self._count(sequence, source)
        return num_useless

    def end_pass(self) -> None:
        """All sequences of a pass are committed. Asked before the policy's `end_pass`."""
        self._stats.by_source["medusa"].num_explored += self._heads.end_pass()

    def keep_heads(self, sequence: Sequence, result: StepResult) -> None:
        """What the pass that has just committed said of the places behind."""
        found = sequence.sources
        if found is not None:
            found.heads, found.heads_at = result.head_token_ids, sequence.session.committed_len

    def _count(self, sequence: Sequence, source: Source | None) -> None:
        """Which source the round had, whether it verified any of it or not."""
        found = sequence.sources
        if found is not None and source is not None and source.have:
            counts = self._stats.by_source[source.name]
            counts.num_chosen += 1
            counts.num_explored += found.is_trying
        elif found is None and sequence.lookahead.cap:
            self._stats.by_source["model"].num_chosen += 1


def _source(sequence: Sequence, name: ProposalSource) -> Source:
    if name == "model":
        return Source(name, sequence.lookahead)
    asked, session = sequence.request.speculation, sequence.session
    traits = (session.mode, session.sampling.temperature, sequence.request.adapter)
    is_fixed = asked.lookahead == "fixed"
    lookahead = SequenceLookahead(AcceptanceClass.of(name, *traits), asked.max_tokens, is_fixed)
    return Source(name, lookahead)
