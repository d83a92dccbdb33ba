"""A target replica of the simulation: the shipped scheduler and desk on a virtual clock.

It does what `target.driver` does with asyncio and gRPC, and nothing more: move messages, run
passes, hand results back. Decisions stay in the code under test.
"""

from __future__ import annotations

from paceline.engine.base import StepResult
from paceline.protocol.messages import DraftTokens, Hello, OpenSession, Verdict
from paceline.protocol.target_session import TargetSession
from paceline.target.scheduler import Hold, PassPlan
from paceline.target.sequence import PassTimes
from paceline.testing.invariants import TargetView, Ticket, require
from paceline.testing.network import Envelope, Stream
from paceline.testing.world import RecordingEngine, RememberingToyEngine, World


class SimulatedTarget:
    """One target replica."""

    def __init__(self, target_id: int, world: World) -> None:
        scenario = world.scenario
        self.target_id = target_id
        self._world = world
        info = scenario.target_info()
        self.engine = RecordingEngine(RememberingToyEngine(info, seed=scenario.engine_seed))
        self.scheduler = world.parts.scheduler(
            info, scenario.target, scenario.speculation, scenario.rpc
        )
        self.tickets: dict[int, Ticket] = {}
        self.streams: dict[int, Stream] = {}
        self._in_pass = False

    # -- requests ---------------------------------------------------------------------------

    def submit(self, ticket: Ticket, client_index: int) -> None:
        world = self._world
        request = world.scenario.clients[client_index].request
        session_id = self.scheduler.add(request, world.clock.now_us)
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
        plan = self.scheduler.plan(world.clock.now_us)
        self.flush()
        if isinstance(plan, Hold):
            self._check_hold(plan)
            self.engine.run(self.scheduler.take_released(), ())
            if plan.until_us is not None:
                world.clock.call_at(plan.until_us, self.wake)
            return
        self._in_pass = True
        self._check_plan(plan)
        started_us = world.clock.now_us
        results = self.engine.run(self.scheduler.take_released(), plan.items)
        for entry in plan.entries:
            cached = self.engine.cached[entry.session_id]
            log = self.session(entry.session_id).log
            world.checker.cache_is("target", cached, log.slice(0, len(cached)))
        world.clock.call_after(
            world.scenario.pass_us, lambda: self._end_pass(plan, results, started_us)
        )

    def _end_pass(self, plan: PassPlan, results: list[StepResult], started_us: int) -> None:
        world = self._world
        self._in_pass = False
        world.checker.counts["passes"] += 1
        times = PassTimes(started_us, world.clock.now_us)
        for session_id, delta in self.scheduler.end_pass(plan, results, times):
            world.note("commit", self.target_id, session_id, delta.token_ids)
            world.checker.counts["accepted"] += delta.num_accepted_tokens
            world.checker.counts["rejected"] += delta.num_draft_tokens - delta.num_accepted_tokens
            world.checker.counts["plain"] += delta.num_draft_tokens == 0
            ticket = self.tickets[session_id]
            ticket.receive(delta.token_ids, delta.finish_reason is not None)
            if not ticket.is_done:
                session = self.session(session_id)
                committed = session.log.slice(0, session.committed_len)
                require(committed == (*ticket.prompt, *ticket.received), "log differs from client")
        self.flush()
        self.wake()

    def _check_plan(self, plan: PassPlan) -> None:
        """Never-wait: a pass contains every runnable sequence, but for prefills without room."""
        planned = {entry.session_id for entry in plan.entries}
        has_room = plan.num_rows < self._world.scenario.max_rows_per_pass
        for session_id in self.scheduler._running:
            sequence = self.scheduler._sequences[session_id]
            if sequence.is_decoding or has_room:
                require(session_id in planned, "a runnable sequence was left out", session_id)

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
