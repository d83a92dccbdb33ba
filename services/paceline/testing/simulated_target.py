"""A target replica of the simulation: the shipped scheduler and desk on a virtual clock.

It does what `target.driver` does with asyncio and gRPC, and nothing more: move messages, run
passes, hand results back. Decisions stay in the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.engine.base import OutOfBlocks, StepResult, Verify
from paceline.protocol.messages import DraftTokens, Hello, OpenSession, Verdict
from paceline.protocol.target_session import TargetSession
from paceline.target.passes import Hold, PassEntry, PassPlan
from paceline.target.sequence import PassTimes
from paceline.target.sequence import Sequence as TargetSequence
from paceline.testing.invariants import TargetView, Ticket, require
from paceline.testing.network import Envelope, Stream
from paceline.testing.scenario import BLOCK_SIZE
from paceline.testing.world import RecordingEngine, Reference, World


class SimulatedTarget:
    """One target replica."""

    def __init__(self, target_id: int, world: World) -> None:
        scenario = world.scenario
        self.target_id = target_id
        self._world = world
        info = scenario.target_info()
        engine = world.parts.target_engine(info, seed=scenario.engine_seed)
        self.engine = RecordingEngine(engine)
        self.scheduler = world.parts.scheduler(
            info, scenario.target, scenario.speculation, scenario.rpc
        )
        self.tickets: dict[int, Ticket] = {}
        self.streams: dict[int, Stream] = {}
        self._in_pass = False
        self._reference = Reference(scenario.engine_seed)
        self._last_rounds: dict[int, int] = {}

    # -- requests ---------------------------------------------------------------------------

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """One request; a ticket for each of its choices."""
        world = self._world
        first = self.scheduler.add(tickets[0].request, world.clock.now_us)
        world.checker.counts["groups"] += len(tickets) > 1
        for session_id, ticket in enumerate(tickets, first):
            self.tickets[session_id] = ticket
            # the scheduler makes the session; a planted bug takes it over here
            self.session(session_id).__class__ = world.parts.target_session
            world.note("submit", self.target_id, session_id)
        self.wake()

    def abort(self, ticket: Ticket) -> bool:
        for session_id, other in self.tickets.items():
            if other is ticket and not ticket.is_done:
                ticket.is_done = ticket.is_aborted = True
                self.scheduler.abort(session_id)
                self._world.note("abort", self.target_id, session_id)
                self.wake()
                return True
        return False

    def session(self, session_id: int) -> TargetSession:
        return self.scheduler._sequences[session_id].session

    # -- streams ----------------------------------------------------------------------------

    def attach(self, stream: Stream, hello: Hello) -> None:
        self.streams[stream.link_id] = stream
        self.scheduler.drafts.attach(stream.link_id, hello)
        self.wake()

    def detach(self, stream: Stream) -> None:
        if self.streams.pop(stream.link_id, None) is not None:
            stream.target_end.is_open = False
            self.scheduler.drafts.detach(stream.link_id)
            self.wake()

    def receive(self, stream: Stream, envelope: Envelope) -> None:
        message = envelope.message
        desk = self.scheduler.drafts
        sequence = None
        if isinstance(message, DraftTokens):
            sequence = self.scheduler._sequences.get(message.session_id)
        is_served = sequence is not None and sequence.draft_id == stream.link_id
        before = TargetView.of(sequence.session) if sequence is not None else None
        self._world.note("to_target", self.target_id, stream.link_id, envelope.kind)
        desk.receive(stream.link_id, message, self._world.clock.now_us)  # type: ignore[arg-type]
        if sequence is not None and before is not None and is_served:
            self._world.checker.target_received(before, sequence.session, envelope)
        self.flush()
        self.wake()

    def flush(self) -> None:
        """Send what the desk wants sent; end the streams of drafts that broke rules too often."""
        pool = self.scheduler.drafts.pool
        for link_id, messages in pool.take_outbox().items():
            for message in messages:
                if isinstance(message, OpenSession | Verdict):
                    self._world.checker.target_sends(self.target_id, message)
                self._world.network.to_draft(self.streams[link_id], Envelope(message))
        for link_id in pool.take_outlaws():
            self._world.checker.counts["outlaw"] += 1
            self._world.network.hang_up(self.streams[link_id])

    # -- passes -----------------------------------------------------------------------------

    def wake(self) -> None:
        if self._in_pass:
            return
        world = self._world
        max_tries = self.scheduler.num_running + self.scheduler.num_waiting + 2
        for _ in range(max_tries):
            plan = self.scheduler.plan(world.clock.now_us)
            self.flush()
            if isinstance(plan, Hold):
                self._hold(plan)
                return
            self._check_plan(plan)
            if self._begin_pass(plan):
                return
        require(False, "no plan fits the cache", max_tries)

    def _hold(self, hold: Hold) -> None:
        self._check_hold(hold)
        self.engine.run(self.scheduler.take_released(), ())
        self.scheduler.learn_free_blocks(self.engine.num_free_blocks)
        if hold.until_us is not None:
            self._world.clock.call_at(hold.until_us, self.wake)

    def _begin_pass(self, plan: PassPlan) -> bool:
        """False when the cache had no room for it."""
        world = self._world
        started_us = world.clock.now_us
        try:
            results = self.engine.run(self.scheduler.take_released(), plan.items)
        except OutOfBlocks:
            world.checker.counts["out_of_blocks"] += 1
            require(self.scheduler.make_room(plan), "a lone sequence does not fit")
            return False
        self._in_pass = True
        for entry, result in zip(plan.entries, results, strict=True):
            cached = self.engine.cached[entry.session_id]
            log = self.session(entry.session_id).log
            world.checker.cache_is("target", cached, log.slice(0, len(cached)))
            world.checker.counts["unfinished_prefills"] += not result.token_ids
        num_rows = sum(e.num_computed(r) for e, r in zip(plan.entries, results, strict=True))
        most = min(plan.num_rows, world.scenario.max_rows_per_pass)
        require(num_rows <= most, "more rows than a pass may have", num_rows, most)
        free = self.engine.num_free_blocks
        world.clock.call_after(
            world.scenario.pass_us, lambda: self._end_pass(plan, results, started_us, free)
        )
        return True

    def _end_pass(
        self, plan: PassPlan, results: list[StepResult], started_us: int, num_free_blocks: int
    ) -> None:
        world = self._world
        self._in_pass = False
        world.checker.counts["passes"] += 1
        for entry, result in zip(plan.entries, results, strict=True):
            if self.tickets[entry.session_id].expected is None and result.token_ids:
                self._check_lawful(entry, result)
        times = PassTimes(started_us, world.clock.now_us)
        deltas = self.scheduler.end_pass(plan, results, times, num_free_blocks)
        for session_id, delta in deltas:
            world.note("commit", self.target_id, session_id, delta.token_ids)
            world.checker.counts["accepted"] += delta.num_accepted_tokens
            world.checker.counts["rejected"] += delta.num_draft_tokens - delta.num_accepted_tokens
            world.checker.counts["plain"] += delta.num_draft_tokens == 0
            world.checker.counts["prompt_logprobs"] += len(delta.prompt_logprobs)
            world.checker.counts["cached_prompts"] += delta.num_cached_tokens > 0
            ticket = self.tickets[session_id]
            ticket.receive(delta)
            if not ticket.is_done:
                session = self.session(session_id)
                committed = session.log.slice(0, session.committed_len)
                require(committed == ticket.text, "log differs from client")
        self.flush()
        self.wake()

    def _check_lawful(self, entry: PassEntry, result: StepResult) -> None:
        """Rejection modes: the same from the client's text, in one go and without a cache.

        And no round's noise is used twice: what was seen must not be drawn again.
        """
        item, ticket = entry.item, self.tickets[entry.session_id]
        if ticket.is_aborted:
            return
        require(isinstance(item.rule, Verify), "verified by no rule", item.rule)
        assert isinstance(item.rule, Verify)
        last = self._last_rounds.get(entry.session_id, -1)
        require(item.rule.round > last, "a round's noise is used again", item.rule.round, last)
        self._last_rounds[entry.session_id] = item.rule.round
        text = (*ticket.text, *entry.draft_token_ids)
        expected = self._reference.step(replace(item, start=0, token_ids=text, max_rows=None))
        got = (result.token_ids, result.num_accepted)
        require(got == (expected.token_ids, expected.num_accepted), "not by the rule", got)
        num_draft = len(entry.draft_token_ids)
        counts = self._world.checker.counts
        counts["lawful_accepted"] += result.num_accepted or 0
        counts["lawful_rejected"] += num_draft > (result.num_accepted or 0)

    def _check_plan(self, plan: PassPlan) -> None:
        """Never-wait: a pass contains every runnable sequence, but for prefills without room."""
        planned = {entry.session_id for entry in plan.entries}
        require(bool(planned), "an empty pass")
        has_room = plan.num_rows < self._world.scenario.max_rows_per_pass
        for session_id in self.scheduler._running:
            sequence = self.scheduler._sequences[session_id]
            if self._waits_for_prompt(sequence):
                require(session_id not in planned, "a prompt was computed twice", session_id)
            elif sequence.is_decoding or has_room:
                require(session_id in planned, "a runnable sequence was left out", session_id)

    def _waits_for_prompt(self, sequence: TargetSequence) -> bool:
        """Choice 0 of its request is about to compute a block that this one could use."""
        leader_id = sequence.session.session_id - sequence.choice
        leader = self.scheduler._sequences.get(leader_id)
        return (
            leader is not None
            and sequence.choice > 0
            and not leader.is_aborted
            and leader_id in self.scheduler._running
            and len(sequence.request.prompt_token_ids) > BLOCK_SIZE
            and leader.session.num_output_tokens == 0
        )

    def _check_hold(self, hold: Hold) -> None:
        running = len(self.scheduler._running)
        if hold.until_us is None:
            require(running == 0, "an idle target with work", running)
            return
        require(running == 1, "a pass was held with several sequences", running)
        longest_us = int(self._world.scenario.max_lone_wait_ms * 1000)
        wait_us = hold.until_us - self._world.clock.now_us
        require(wait_us <= longest_us, "a wait beyond its cap", wait_us)
        self._world.checker.counts["lone_holds"] += 1
