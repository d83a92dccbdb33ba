"""A target replica of the simulation: the shipped scheduler and desk on a virtual clock.

It does what `target.driver` does with asyncio, gRPC and Serve, and nothing more: move messages,
run passes, hand results back. Decisions stay in the code under test. `start`, `kill`, `hang` and
`break_down` are what befalls the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from paceline.engine.base import OutOfBlocks, StepResult
from paceline.errors import RequestError
from paceline.gateway.failover import target_died, target_lost
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.messages import DraftTokens, Hello
from paceline.protocol.target_session import TargetSession
from paceline.target.endings import Ending
from paceline.target.intake import living_outputs
from paceline.target.passes import Hold, PassPlan
from paceline.target.sequence import PassTimes
from paceline.testing.channel import NEVER_US, Channel
from paceline.testing.clock import Action
from paceline.testing.desk_checks import DeskChecks
from paceline.testing.faults import Fault
from paceline.testing.invariants import TargetView, require
from paceline.testing.local_proposals import take_over_proposers
from paceline.testing.network import Envelope, Stream
from paceline.testing.random_lookahead import calm, take_over
from paceline.testing.scenario import ALIVE_US, is_lawful
from paceline.testing.target_checks import Answers, Served, TargetChecks
from paceline.testing.world import RecordingEngine, World

NOTICE_US = 6_000  # until a gateway notices that a process is gone


class SimulatedTarget:
    """One target replica. `trouble_until_us`: what befell it was over then, true time."""

    def __init__(self, target_id: int, world: World) -> None:
        self.target_id = target_id
        self._world = world
        self.is_up = False
        self.num_boots = 0
        self.trouble_until_us = 0
        self.counts: Counter[str] = Counter()  # of earlier lives
        self.on_death: Callable[[list[Stream]], None] = lambda streams: None
        self.streams: dict[int, Stream] = {}
        self._backlog: list[Action] = []
        self.is_hung = False
        self.start()

    # -- the process ------------------------------------------------------------------------

    def start(self) -> None:
        world, scenario = self._world, self._world.scenario
        info = scenario.target_info()
        self.clock = world.local_clock()
        self.engine = RecordingEngine(world.parts.target_engine(info, seed=scenario.engine_seed))
        self.scheduler = world.parts.scheduler(
            info, scenario.target, scenario.speculation, scenario.rpc
        )
        self.num_boots += 1
        take_over(self.scheduler, scenario, self.life, is_calm=world.network.is_healed)
        guesses = world.parts.target_engine(info, seed=scenario.engine_seed)
        take_over_proposers(self.scheduler, guesses, scenario.seed)
        self.checks = TargetChecks(world, self.scheduler)
        self.desk_checks = DeskChecks(world, self.scheduler, self.clock)
        self.requests: dict[Channel, Answers] = {}
        self.served: dict[int, Served] = self.checks.served
        self.streams = {}
        self._backlog = []
        self._in_pass = self.is_hung = self._breaks = self._fails = False
        self.slow = 1
        self.trouble_until_us = world.clock.now_us if self.num_boots > 1 else 0
        self.is_up = True

    @property
    def life(self) -> int:
        """A number that no other life of any target has."""
        return self.num_boots * 100 + self.target_id

    def kill(self) -> None:
        """Everything is lost at once; who was connected notices by and by."""
        world = self._world
        self.is_up = False
        self.trouble_until_us = NEVER_US
        self.counts.update(self.life_counts())
        for channel in self.requests:
            channel.die(target_died(), world.rng.randrange(NOTICE_US))
        streams = list(self.streams.values())
        for stream in streams:
            stream.target_end.is_open = False
        self.requests.clear()
        self.streams.clear()
        self._backlog.clear()
        self.on_death(streams)

    def hang(self, duration_us: int) -> None:
        """The process stands still; what arrives meanwhile waits for it."""
        self.is_hung = True
        self.trouble_until_us = self._world.clock.now_us + duration_us
        self._world.clock.call_at(self.trouble_until_us, partial(self._go_on, self.num_boots))

    def _go_on(self, boot: int) -> None:
        if boot != self.num_boots or self.trouble_until_us > self._world.clock.now_us:
            return
        self.is_hung = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            action()

    def break_down(self) -> None:
        self._breaks = True  # the next pass is the engine's last

    def fail_next_pass(self) -> None:
        self._fails = True  # the engine raises and can go on

    def heal(self) -> None:
        """What has not befallen it yet will not."""
        self._breaks = self._fails = False
        self.slow = 1
        calm(self.scheduler)

    def life_counts(self) -> Counter[str]:
        return self.checks.life_counts()

    def _do(self, action: Action) -> None:
        """Now, or when the process goes on."""
        if self.is_hung:
            self._backlog.append(action)
        elif self.is_up:
            action()

    def _of_this_life(self, action: Action) -> Action:
        boot = self.num_boots
        return lambda: self._do(action) if boot == self.num_boots else None

    # -- requests ---------------------------------------------------------------------------

    def hear(self, channel: Channel, action: Action) -> None:
        """Something has arrived from a gateway; a process that is gone refuses connections."""
        if not self.is_up or channel.boot != self.num_boots:
            channel.to_gateway(target_lost())
        else:
            self._do(action)

    def submit(self, channel: Channel, request: GenerateRequest) -> None:
        world, now_us = self._world, self.clock.now_us
        outputs = living_outputs(request)
        try:
            first = self.scheduler.add(request, now_us)
        except RequestError as error:
            self.checks.refused(error, len(outputs))
            channel.to_gateway(error)
            return
        world.checker.counts["groups"] += len(outputs) > 1
        answers = Answers(channel, request, first, set(outputs), now_us, now_us)
        self.requests[channel] = answers
        for choice, output in outputs.items():
            text = [*request.prompt_token_ids, *output]
            self.served[first + choice] = Served(answers, choice, text)
            # the scheduler makes the session; a planted bug takes it over here
            world.take_over(self.session(first + choice))
            world.note("submit", self.target_id, first + choice)
        self._say_alive_later(answers)
        self.wake()

    def abort(self, channel: Channel, choice: int | None) -> None:
        """End a request, or one choice of it; unknown ones are ignored."""
        answers = self.requests.get(channel)
        if answers is None:
            return
        for each in sorted(answers.open) if choice is None else [choice]:
            if each in answers.open:
                self.scheduler.abort(answers.first_session_id + each)
                self._end_choice(answers, each)
        self.wake()

    def _end_choice(self, answers: Answers, choice: int) -> None:
        answers.open.discard(choice)
        if not answers.open:
            self.requests.pop(answers.channel, None)

    def _end(self, endings: Iterable[Ending]) -> None:
        """The scheduler gives requests up."""
        for session_id, error in endings:
            served = self.served[session_id]
            answers = served.answers
            self.checks.ended(served, error, self.clock.now_us)
            if self.requests.get(answers.channel) is answers:
                answers.channel.to_gateway(error)
                for choice in sorted(answers.open):
                    self.scheduler.abort(answers.first_session_id + choice)
                    self._end_choice(answers, choice)

    def session(self, session_id: int) -> TargetSession:
        return self.scheduler._sequences[session_id].session

    def _say_alive_later(self, answers: Answers) -> None:
        at_us = answers.sent_us + ALIVE_US
        self.clock.call_at(at_us, self._of_this_life(partial(self._say_alive, answers)))

    def _say_alive(self, answers: Answers) -> None:
        if self.requests.get(answers.channel) is not answers:
            return
        now_us = self.clock.now_us
        if now_us >= answers.sent_us + ALIVE_US:
            self._end(self.scheduler.expire(now_us))
            if self.requests.get(answers.channel) is not answers:
                return
            answers.sent_us = now_us
            answers.channel.to_gateway(None)
        self._say_alive_later(answers)

    # -- streams ----------------------------------------------------------------------------

    def connect(self, stream: Stream) -> None:
        """A draft dials; its Hello is heard when the process gets to it."""
        self.streams[stream.link_id] = stream

    def attach(self, stream: Stream, hello: Hello) -> None:
        self._do(partial(self._attach, stream, hello))

    def _attach(self, stream: Stream, hello: Hello) -> None:
        if stream.link_id in self.streams:
            self.scheduler.drafts.attach(stream.link_id, hello)
            self.wake()

    def detach(self, stream: Stream) -> None:
        if stream.link_id in self.streams:
            self._do(partial(self._detach, stream))

    def _detach(self, stream: Stream) -> None:
        if self.streams.pop(stream.link_id, None) is not None:
            stream.target_end.is_open = False
            self.scheduler.drafts.detach(stream.link_id)
            self.wake()

    def receive(self, stream: Stream, envelope: Envelope) -> None:
        self._do(partial(self._receive, stream, envelope))

    def _receive(self, stream: Stream, envelope: Envelope) -> None:
        if stream.link_id not in self.streams:
            return
        message, world, desk = envelope.message, self._world, self.scheduler.drafts
        sequence = None
        if isinstance(message, DraftTokens):
            sequence = self.scheduler._sequences.get(message.session_id)
        is_served = sequence is not None and sequence.draft_id == stream.link_id
        before = TargetView.of(sequence.session) if sequence is not None else None
        world.note("to_target", self.target_id, stream.link_id, envelope.kind)
        link = desk.pool.get(stream.link_id)
        self.desk_checks.receiving(link)
        desk.receive(stream.link_id, message, self.clock.now_us)  # type: ignore[arg-type]
        self.desk_checks.received(link, envelope)
        if sequence is not None and before is not None and is_served:
            world.checker.target_received(self.life, before, sequence.session, envelope)
        self.flush()
        self.wake()

    def flush(self) -> None:
        """Send what the desk wants sent; end the streams of drafts that broke rules too often."""
        pool = self.scheduler.drafts.pool
        for link_id, messages in pool.take_outbox().items():
            for message in messages:
                self.checks.sends(self.life, message)
                self._world.network.to_draft(self.streams[link_id], Envelope(message))
        for link_id in pool.take_outlaws():
            self._world.checker.counts["outlaw"] += 1
            self._world.network.hang_up(self.streams[link_id])

    # -- passes -----------------------------------------------------------------------------

    def wake(self) -> None:
        if self._in_pass or self.is_hung or not self.is_up:
            return
        max_tries = self.scheduler.num_running + self.scheduler.num_waiting + 2
        for _ in range(max_tries):
            now_us = self.clock.now_us
            self._end(self.scheduler.expire(now_us))
            plan = self.scheduler.plan(now_us)
            self._deliver()
            self.flush()
            if isinstance(plan, Hold):
                self._hold(plan)
                return
            self.checks.plan(plan)
            self.desk_checks.planned(now_us)
            if self._begin_pass(plan):
                return
        require(False, "no plan fits the cache", max_tries)

    def _hold(self, hold: Hold) -> None:
        self.checks.hold(hold, self.clock.now_us)
        self.engine.run(self.scheduler.take_released(), ())
        self.scheduler.learn_free_blocks(self.engine.num_free_blocks)
        if hold.until_us is not None:
            self.clock.call_at(hold.until_us, self._of_this_life(self.wake))

    def _later(self, action: Action) -> None:
        """When the pass that begins now has ended."""
        delay_us = self._world.scenario.pass_us * self.slow
        self._world.clock.call_after(delay_us, self._of_this_life(action))

    def _begin_pass(self, plan: PassPlan) -> bool:
        """False when the cache had no room for it."""
        world, started_us = self._world, self.clock.now_us
        released = self.scheduler.take_released()
        if self._breaks or self._fails or self._is_poisoned(plan):
            self.engine.run(released, ())
            self._in_pass = True
            self._later(partial(self._fail_pass, plan))
            return True
        try:
            results = self.engine.run(released, plan.items)
        except OutOfBlocks:
            world.checker.counts["out_of_blocks"] += 1
            require(self.scheduler.make_room(plan), "a lone sequence does not fit")
            return False
        self._in_pass = True
        self.checks.rows(plan, results)
        self.checks.caches(plan, results, self.engine.cached)
        free = self.engine.num_free_blocks
        self._later(lambda: self._end_pass(plan, results, started_us, free))
        return True

    def _end_pass(
        self, plan: PassPlan, results: list[StepResult], started_us: int, num_free_blocks: int
    ) -> None:
        world = self._world
        self._in_pass = False
        world.checker.counts["passes"] += 1
        for entry, result in zip(plan.entries, results, strict=True):
            answers = self.served[entry.session_id].answers
            is_aborted = self.scheduler._sequences[entry.session_id].is_aborted
            if is_lawful(answers.request) and result.token_ids and not is_aborted:
                self.checks.rejection(entry, result)
        times = PassTimes(started_us, self.clock.now_us)
        windows = self.checks.windows(plan)
        self.scheduler.commit_pass(plan, results, times, num_free_blocks)
        self.checks.kept(windows)
        self.wake()

    def _deliver(self) -> None:
        """As the driver does it: who is told of a pass is told when the next one is planned."""
        world, deltas = self._world, self.scheduler.finish_pass()
        if not deltas:
            return
        items: dict[Channel, list[RoundDelta]] = {}
        for session_id, delta in deltas:
            world.note("commit", self.target_id, session_id, delta.token_ids)
            self.checks.committed(session_id, delta)
            answers = self.served[session_id].answers
            if delta.choice in answers.open:
                items.setdefault(answers.channel, []).append(delta)
                answers.sent_us = self.clock.now_us
                if delta.finish_reason is not None:
                    self._end_choice(answers, delta.choice)
        for channel, item in items.items():
            channel.to_gateway(item)
        self.checks.bounds()
        self.flush()
        self.checks.passed(self.life, [session_id for session_id, _ in deltas])

    # -- failures ---------------------------------------------------------------------------

    def _is_poisoned(self, plan: PassPlan) -> bool:
        return any(self.checks.is_poisoned(entry) for entry in plan.entries)

    def _fail_pass(self, plan: PassPlan) -> None:
        world = self._world
        self._in_pass = False
        if self._breaks:
            world.fire(Fault.BREAK)
            self.trouble_until_us = NEVER_US
            self._end(self.scheduler.break_pass(plan))
            require(not self.requests, "the engine broke, and a request was not told")
            self.kill()
            return
        if self._fails:
            world.fire(Fault.FAIL)
            self._fails = False
            self.trouble_until_us = world.clock.now_us
            ended = self.scheduler.fail_pass(plan)
            require(not ended or len(plan.entries) == 1, "a batch failed for one of it")
            self._end(ended)
            self.flush()
            self.wake()
            return
        world.fire(Fault.POISON)
        for entry in plan.entries:
            if self.checks.is_poisoned(entry):
                self.checks.dies_of(self.served[entry.session_id].answers)
        self.kill()
