"""What must hold of one target's passes: who is in them, what they commit, how much they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from paceline.engine.base import StepResult, Verify
from paceline.errors import OverloadedError, RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.methods import LOCAL_SOURCES, ProposalSource
from paceline.protocol.messages import OpenSession, Verdict
from paceline.protocol.target_session import TargetSession
from paceline.target.passes import Hold, PassEntry, PassPlan
from paceline.target.scheduler import Scheduler
from paceline.target.sequence import Sequence as TargetSequence
from paceline.target.sources import sources_of
from paceline.testing.channel import Channel
from paceline.testing.invariants import require
from paceline.testing.scenario import BLOCK_SIZE
from paceline.testing.world import Reference, World


@dataclass(slots=True, eq=False)
class Answers:
    """One request at a target. `sent_us`: when its gateway was last told something."""

    channel: Channel
    request: GenerateRequest
    first_session_id: int
    open: set[int]
    submitted_us: int
    sent_us: int


@dataclass(slots=True)
class Served:
    """One choice at a target: `text` is its prompt and all its output, of whatever try."""

    answers: Answers
    choice: int
    text: list[int]
    num_rounds: int = 0
    last_noise: int = -1


@dataclass
class TargetChecks:
    """Of one life of one target."""

    world: World
    scheduler: Scheduler
    served: dict[int, Served] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reference = Reference(self.world.scenario.engine_seed)

    def life_counts(self) -> Counter[str]:
        scheduler = self.scheduler
        counts = Counter(scheduler.drafts.counts)
        counts["preempted"] += scheduler.stats.num_preemptions
        counts["prefix_tokens"] += scheduler.stats.num_prefix_tokens
        for source, of_it in scheduler.stats.by_source.items():
            counts["proposer_failed"] += of_it.num_failures
            counts[f"{source} tried"] += of_it.num_explored
        return counts

    # -- coming and going -------------------------------------------------------------------

    def refused(self, error: RequestError, num_choices: int) -> None:
        """A full target, and nothing else, turns a request away."""
        require(isinstance(error, OverloadedError), "a good request was refused", error)
        most = self.world.scenario.max_queued_seqs
        queued = self.scheduler._roster.num_queued
        require(queued + num_choices > most, "refused with room in the queue", queued)

    def ended(self, served: Served, error: RequestError, now_us: int) -> None:
        """What the scheduler ends by itself."""
        if error.code != "queue_timeout":
            return
        require(served.num_rounds == 0, "a queue timeout hit a sequence that had begun")
        waited_us = now_us - served.answers.submitted_us
        most_us = self.world.scenario.max_queue_us
        require(waited_us >= most_us, "a queue timeout came too early", waited_us)
        self.world.checker.counts["queue_timeout"] += 1

    def is_poisoned(self, entry: PassEntry) -> bool:
        """Whether these rows kill the process that computes them."""
        served = self.served[entry.session_id]
        poison_at = self.world.poison_of(served.answers.channel.gateway_id)
        if poison_at is None or served.choice:
            return False
        return entry.end > len(served.answers.request.prompt_token_ids) + poison_at - 1

    def dies_of(self, answers: Answers) -> None:
        """Blast radius: two targets without a token in between, and no more.

        One whose death shows as silence first is an ordinary loss to the gateway.
        """
        resumption = answers.request.resumption
        num_tokens = 0 if resumption is None else sum(map(len, filter(None, resumption.outputs)))
        key = (answers.channel.gateway_id, num_tokens)
        deaths = self.world.checker.deaths
        deaths[key] += 1
        is_silent = answers.channel.gateway_id in self.world.checker.silenced
        most = self.world.scenario.max_retries + 1 if is_silent else 2
        require(deaths[key] <= most, "a request took more than two targets with it", deaths[key])

    # -- before a pass ----------------------------------------------------------------------

    def plan(self, plan: PassPlan) -> None:
        """Never-wait: a pass contains every runnable sequence, but for prefills without room.

        After a failed pass its sequences take turns: one of them alone, then all the others.
        """
        planned = {entry.session_id for entry in plan.entries}
        require(bool(planned), "an empty pass")
        has_room = plan.num_rows < self.world.scenario.max_rows_per_pass
        sequences = self.scheduler._sequences
        running = [sequences[session_id] for session_id in self.scheduler._running]
        runnable = [sequence for sequence in running if not self._waits_for_prompt(sequence)]
        suspects = [sequence for sequence in runnable if sequence.is_suspect]
        if any(sequences[i].is_suspect for i in planned):
            require(len(planned) == 1, "a suspect was not alone in its pass", planned)
            runnable = []
        elif suspects:
            runnable = [sequence for sequence in runnable if not sequence.is_suspect]
            self.world.checker.counts["others_turns"] += 1
        for sequence in runnable:
            session_id = sequence.session.session_id
            if sequence.is_decoding or has_room:
                require(session_id in planned, "a runnable sequence was left out", session_id)
        for sequence in running:
            if self._waits_for_prompt(sequence):
                session_id = sequence.session.session_id
                require(session_id not in planned, "a prompt was computed twice", session_id)

    def _waits_for_prompt(self, sequence: TargetSequence) -> bool:
        """Another choice of its request is about to compute a block that this one could use."""
        leader = sequence.leader
        return (
            leader is not None
            and not leader.is_aborted
            and leader.session.session_id in self.scheduler._running
            and len(sequence.request.prompt_token_ids) > BLOCK_SIZE
            and self.served[leader.session.session_id].num_rounds == 0
        )

    def hold(self, hold: Hold, now_us: int) -> None:
        running = len(self.scheduler._running)
        if hold.until_us is None:
            require(running == 0, "an idle target with work", running)
            return
        require(running == 1, "a pass was held with several sequences", running)
        longest_us = int(self.world.scenario.max_lone_wait_ms * 1000)
        wait_us = hold.until_us - now_us
        require(wait_us <= longest_us, "a wait beyond its cap", wait_us)
        self.world.checker.counts["lone_holds"] += 1

    # -- after it ---------------------------------------------------------------------------

    def rows(self, plan: PassPlan, results: Iterable[StepResult]) -> None:
        pairs = list(zip(plan.entries, results, strict=True))
        num_rows = sum(entry.num_computed(result) for entry, result in pairs)
        most = min(plan.num_rows, self.world.scenario.max_rows_per_pass)
        require(num_rows <= most, "more rows than a pass may have", num_rows, most)

    def caches(
        self, plan: PassPlan, results: Iterable[StepResult], cached: Mapping[int, list[int]]
    ) -> None:
        """A pass over them has run: each cache has the session's text, and behind it what was
        verified; of a tree, the accepted path."""
        checker = self.world.checker
        for entry, result in zip(plan.entries, results, strict=True):
            session, held = self._session(entry.session_id), cached[entry.session_id]
            is_tree = bool(entry.item.tree_parents)
            verified = result.token_ids[:-1] if is_tree else entry.draft_token_ids
            text = (*session.log.slice(0, session.committed_len), *verified)
            checker.cache_is("target", held, text[: len(held)])
            checker.counts["unfinished_prefills"] += not result.token_ids
            path = entry.draft_token_ids[: len(verified)]
            checker.counts["tree_branches"] += is_tree and verified != path

    def windows(self, plan: PassPlan) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Of the sequences whose local proposals are about to be judged: committed tokens, and the
        draft's window, which has no part in that."""
        found = {}
        for entry in plan.entries:
            sequence = self.scheduler._sequences[entry.session_id]
            if sequence.source_of(len(entry.draft_token_ids)) in LOCAL_SOURCES:
                session = sequence.session
                start = session.committed_len
                found[entry.session_id] = (start, session.log.slice(start))
        return found

    def kept(self, windows: Mapping[int, tuple[int, tuple[int, ...]]]) -> None:
        """What the text has not contradicted of a window is there as before."""
        for session_id, (start, window) in windows.items():
            sequence = self.scheduler._sequences.get(session_id)
            if sequence is None:
                continue
            session = sequence.session
            num = session.committed_len - start
            if (
                len(window) > num
                and session.log.slice(start, session.committed_len) == window[:num]
            ):
                left = session.log.slice(session.committed_len)
                require(left == window[num:], "a window was lost to local proposals", left, window)
                self.world.checker.counts["local_kept_window"] += 1

    def sends(self, life: int, message: object) -> None:
        """To a draft; who has no use for one does not ask one."""
        if isinstance(message, OpenSession | Verdict):
            self.world.checker.target_sends(life, message)
        if isinstance(message, OpenSession):
            names = self._sources(message.session_id)
            require("model" in names, "a draft for a sequence that wants none", names)

    def _sources(self, session_id: int) -> tuple[ProposalSource, ...]:
        scenario, asked = self.world.scenario, self.served[session_id].answers.request.speculation
        return sources_of(asked.method, scenario.speculation, scenario.num_heads)

    def _session(self, session_id: int) -> TargetSession:
        return self.scheduler._sequences[session_id].session

    def rejection(self, entry: PassEntry, result: StepResult) -> None:
        """Rejection modes: the same from the text, in one go and without a cache.

        And no noise is used twice, in this try or an earlier one: what was seen must not be
        drawn again.
        """
        item, served = entry.item, self.served[entry.session_id]
        require(isinstance(item.rule, Verify), "verified by no rule", item.rule)
        assert isinstance(item.rule, Verify)
        last = served.last_noise
        require(item.rule.round > last, "a round's noise is used again", item.rule.round, last)
        served.last_noise = item.rule.round
        resumption = served.answers.request.resumption
        attempt = 0 if resumption is None else resumption.attempt
        key = (served.answers.channel.gateway_id, served.choice, item.sampling)
        owner = self.world.checker.noise.setdefault(key, attempt)
        require(owner == attempt, "a resumed choice has an earlier try's noise", owner, attempt)
        text = (*served.text, *entry.draft_token_ids)
        plain = replace(item, start=0, token_ids=text, max_rows=None, num_head_candidates=0)
        expected = self._reference.step(plain)
        got = (result.token_ids, result.num_accepted)
        require(got == (expected.token_ids, expected.num_accepted), "not by the rule", got)
        num_draft = len(entry.draft_token_ids)
        counts = self.world.checker.counts
        counts["lawful_accepted"] += result.num_accepted or 0
        counts["lawful_rejected"] += num_draft > (result.num_accepted or 0)

    def committed(self, session_id: int, delta: RoundDelta) -> None:
        """Each verification emits what it accepted and one token more, unless the text ends."""
        served, counts = self.served[session_id], self.world.checker.counts
        counts["accepted"] += delta.num_accepted_tokens
        counts["rejected"] += delta.num_draft_tokens - delta.num_accepted_tokens
        counts["plain"] += delta.num_draft_tokens == 0
        counts["prompt_logprobs"] += len(delta.prompt_logprobs)
        counts["cached_prompts"] += delta.num_cached_tokens > 0
        counts["committed"] += len(delta.token_ids)
        source, num_draft = delta.source, delta.num_draft_tokens
        require(bool(source) == (num_draft > 0), "proposals from nowhere", source, num_draft)
        if source:
            names = self._sources(session_id)
            require(source in names, "a source that was not asked for", source, names)
            counts[f"{source} accepted"] += delta.num_accepted_tokens
            counts[f"{source} rejected"] += num_draft - delta.num_accepted_tokens
        num_full = delta.num_accepted_tokens + 1
        is_full = len(delta.token_ids) == num_full
        is_cut = delta.finish_reason is not None and 0 < len(delta.token_ids) <= num_full
        require(is_full or is_cut, "not what was accepted and one more", delta)
        require(delta.choice == served.choice, "another choice's delta", delta.choice)
        served.text += delta.token_ids
        served.num_rounds += 1
        sequence = self.scheduler._sequences.get(session_id)
        if sequence is not None:
            session = sequence.session
            committed = session.log.slice(0, session.committed_len)
            require(committed == tuple(served.text), "the log is not what was sent", committed)

    def passed(self, life: int, session_ids: Iterable[int]) -> None:
        """Their tokens are committed and what is due is sent: who goes on, and from where."""
        for session_id in session_ids:
            sequence = self.scheduler._sequences.get(session_id)
            if sequence is not None:
                self.world.checker.adopted(life, sequence.session)
                self.world.checker.passed(life, sequence.session)

    def bounds(self) -> None:
        """Every queue has a limit."""
        scenario, scheduler = self.world.scenario, self.scheduler
        num_running, num_waiting = scheduler.num_running, scheduler.num_waiting
        require(num_running <= scenario.max_num_seqs, "more than max_num_seqs run", num_running)
        queued = scheduler._roster.num_queued
        require(queued <= scenario.max_queued_seqs, "more than max_queued_seqs wait", queued)
        most = scenario.max_num_seqs + scenario.max_queued_seqs
        require(num_running + num_waiting <= most, "too many sequences", num_running, num_waiting)
        num = len(scheduler._sequences)
        require(num == num_running + num_waiting, "sequences that nobody counts", num)
        for sequence in scheduler._sequences.values():
            self._check_alternates(sequence)
            window = sequence.session.window_len
            require(window <= scenario.max_draft_ahead, "window too long", window)
        for link in scheduler.drafts.pool.links().values():
            most = min(scenario.draft_max_sessions, max(0, num_running))
            require(len(link.sessions) <= scenario.draft_max_sessions, "too many on one draft")
            require(link.allowance <= link.max_allowance, "allowance beyond its limit")

    def _check_alternates(self, sequence: TargetSequence) -> None:
        session, most = sequence.session, self.world.scenario.max_alternates
        num, positions = len(session.alternates), session.alternates.positions
        require(num <= most, "too many alternates", num, most)
        if positions:
            require(min(positions) >= session.committed_len, "dead alternates are kept", positions)
            most = session.committed_len + self.world.scenario.max_draft_ahead
            require(max(positions) < most, "alternates beyond the credit", positions, most)
