"""Moves bytes and time between the scheduler, the engine thread, drafts and requests.

No decisions here: it asks the pure `Scheduler`, runs what it says and delivers what comes out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from paceline.config import AppConfig
from paceline.engine.base import EngineBroken, OutOfBlocks
from paceline.engine.worker import EngineWorker, PassResult, monotonic_us
from paceline.errors import RequestError
from paceline.generation import GenerateRequest, RoundDelta
from paceline.pass_loop import PassLoop
from paceline.protocol.messages import PROTOCOL_VERSION, Hello, Welcome
from paceline.rpc.errors import StreamLost
from paceline.rpc.server import SpeculationServer
from paceline.rpc.stream import TargetStream
from paceline.target import endings
from paceline.target.endings import Ending
from paceline.target.intake import living_outputs
from paceline.target.round_clock import NO_TRACES
from paceline.target.scheduler import Hold, PassPlan, Scheduler
from paceline.target.sequence import PassTimes
from paceline.target.traces import RequestTrace, TargetTracer
from paceline.tracing.guard import SpanGuard
from paceline.tracing.spans import Tracer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Answers:
    """What comes out of one request. `open`: choices that have not ended."""

    first_session_id: int
    open: set[int]
    # Bounded by max_tokens deltas a choice; None: look at `open` again.
    queue: asyncio.Queue[RoundDelta | RequestError | None] = field(default_factory=asyncio.Queue)


class TargetDriver:
    """One target replica without Ray. `async with` starts it; `generate` serves requests."""

    def __init__(
        self,
        worker: EngineWorker,
        config: AppConfig,
        replica_id: str,
        boot_id: str,
        tracer: Tracer | None = None,
    ) -> None:
        self.worker = worker
        self.scheduler = Scheduler(worker.info, config.target, config.speculation, config.rpc)
        self._tracer: TargetTracer | None = None
        if tracer is not None:
            self._tracer = TargetTracer(tracer, replica_id, config.tracing.slow_request_s)
        self._guard = SpanGuard()
        self._alive_interval_s = config.target.alive_interval_s
        self._requests: dict[str, _Answers] = {}
        self._checks: dict[str, asyncio.Task[None]] = {}  # of requests that are to come
        self._answers: dict[int, _Answers] = {}  # the same by session id
        self._streams: dict[int, TargetStream] = {}
        self._next_link_id = 1
        info = worker.info
        self.welcome = Welcome(
            protocol_version=PROTOCOL_VERSION,
            boot_id=boot_id,
            replica_id=replica_id,
            model_id=info.model_id,
            vocab_size=info.vocab_size,
            tokenizer_hash=info.tokenizer_hash,
            unix_offset_us=0 if tracer is None else tracer.unix_offset_us,
        )
        self.server = SpeculationServer(
            config.rpc,
            config.target.host,
            config.target.port_min,
            config.target.port_max,
            self.welcome,
            self._serve_draft,
        )
        self._loop = PassLoop("target", self._turn, self._fail_all)

    async def start(self) -> None:
        await self.server.start()
        self._loop.start()

    async def stop(self, grace_s: float = 1.0) -> None:
        """End all streams and the pass loop; requests in progress get an error."""
        await self.server.stop(grace_s)
        await self._loop.stop()
        self._flush_spans()
        self.worker.close()

    async def __aenter__(self) -> TargetDriver:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def check_health(self) -> None:
        """Raises when the pass loop has ended."""
        self._loop.check_health()

    # -- requests ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RoundDelta | None, None]:
        """One delta per round of each choice; closing the iterator early aborts what is left.

        None says that there is no news but the target lives: so often as
        `target.alive_interval_s` while a request waits, for a place or for a long pass.
        When the target stops, its requests end in a 503: `engine_broken` if they were in the
        pass that broke the engine and so may be the cause, else `target_lost`.
        """
        if request.request_id in self._requests or request.request_id in self._checks:
            raise RequestError("a request with this id is in progress", "request_id")
        has_grammar = bool(request.sampling.grammar)
        if has_grammar:
            async with aclosing(self._check(request)) as waiting:
                async for _ in waiting:
                    yield None
        if not self._loop.is_running:
            raise endings.target_lost()
        now_us = monotonic_us()
        trace = self._begin_trace(request, now_us)
        traces = NO_TRACES if trace is None else trace.choices
        first_session_id = self.scheduler.add(request, now_us, has_grammar, traces)
        answers = _Answers(first_session_id, set(living_outputs(request)))
        session_ids = [first_session_id + choice for choice in answers.open]
        self._requests[request.request_id] = answers
        self._answers.update(dict.fromkeys(session_ids, answers))
        self._loop.wake()
        failure: RequestError | None = None
        try:
            while answers.open:
                try:
                    async with asyncio.timeout(self._alive_interval_s):
                        delta = await answers.queue.get()
                except TimeoutError:
                    # Also amid a pass, however long it takes: who waits for a place is not in it.
                    self._end(self.scheduler.expire(monotonic_us()))
                    yield None
                    continue
                if isinstance(delta, RequestError):
                    failure = delta
                    raise delta
                if delta is None or delta.choice not in answers.open:
                    continue  # this choice was aborted
                if delta.finish_reason is not None:
                    answers.open.discard(delta.choice)
                yield delta
        finally:
            del self._requests[request.request_id]
            for session_id in session_ids:
                del self._answers[session_id]
                if self.scheduler.abort(session_id):
                    self._loop.wake()
            if trace is not None:
                self._end_trace(trace, failure)

    def _begin_trace(self, request: GenerateRequest, now_us: int) -> RequestTrace | None:
        with self._guard:
            return None if self._tracer is None else self._tracer.begin(request, now_us)
        return None

    def _end_trace(self, trace: RequestTrace, failure: RequestError | None) -> None:
        with self._guard:
            trace.end(monotonic_us(), failure)
        if self._loop.is_running:
            self._loop.wake()  # it makes the spans
        else:
            self._flush_spans()

    async def _check(self, request: GenerateRequest) -> AsyncGenerator[None, None]:
        """In a thread, since a grammar may take seconds; an item as often as a sign of life is due.

        A check that is left, or aborted, runs to its end there, and nobody hears of it.
        """
        name, check = request.request_id, asyncio.to_thread(self.scheduler.intake.check, request)
        self._checks[name] = task = asyncio.create_task(check)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not task.done() and self._checks.get(name) is task:
                await asyncio.wait((task,), timeout=self._alive_interval_s)
                if not task.done():
                    yield None
            if self._checks.get(name) is not task:
                raise endings.aborted()
            task.result()
        finally:
            task.cancel()
            if self._checks.get(name) is task:
                del self._checks[name]

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request wherever it is, or one choice of it while the others go on.

        A whole request ends in an error (499), a choice without another delta. False when this
        target does not have it (any more).
        """
        answers = self._requests.get(request_id)
        if answers is None:
            check = self._checks.pop(request_id, None) if choice is None else None
            return check is not None
        if choice is None:
            self._fail(answers, endings.aborted())
            return True
        if choice not in answers.open:
            return False
        answers.open.discard(choice)
        answers.queue.put_nowait(None)
        self._abort_choice(answers, choice)
        return True

    def _end(self, ended: Iterable[Ending]) -> None:
        for session_id, error in ended:
            answers = self._answers.get(session_id)
            if answers is not None:
                self._fail(answers, error)

    def _fail(self, answers: _Answers, error: RequestError) -> None:
        answers.queue.put_nowait(error)
        for choice in answers.open:
            self._abort_choice(answers, choice)

    def _abort_choice(self, answers: _Answers, choice: int) -> None:
        if self.scheduler.abort(answers.first_session_id + choice):
            self._loop.wake()

    # -- passes -----------------------------------------------------------------------------

    async def _turn(self) -> None:
        self._end(self.scheduler.expire(monotonic_us()))
        plan = self.scheduler.plan(monotonic_us())
        if isinstance(plan, Hold):
            self._deliver()
            await self._run_released()
            until_us = plan.until_us
            if self._tracer is not None and self._tracer.has_waiting:
                until_us = 0  # go on with spans, but let others have their turn
            await self._loop.wait(
                None if until_us is None else max(0, until_us - monotonic_us()) / 1e6
            )
        else:
            await self._pass(plan)

    def _fail_all(self) -> None:
        for answers in self._requests.values():
            self._fail(answers, endings.target_lost())

    async def _run_released(self) -> None:
        released = self.scheduler.take_released()
        if released:
            done = await self.worker.run(released, [])
            self.scheduler.learn_free_blocks(done.num_free_blocks)

    async def _run(self, plan: PassPlan) -> PassResult | None:
        """None: the pass has failed, and the engine can go on."""
        released = self.scheduler.take_released()
        running = self.worker.start(released, plan.items)
        try:
            self._deliver()  # what the pass before has brought, while this one runs
        except BaseException:
            running.close()  # our bug: it must not look like a pass that failed
            raise
        try:
            return await running
        except (OutOfBlocks, EngineBroken):
            raise
        except Exception:
            # One bad batch must not end the replica, nor one bad request its batch.
            logger.exception("a pass over %d sequences failed", len(plan.entries))
            await self.worker.probe()
            self._end(self.scheduler.fail_pass(plan))
            return None

    async def _pass(self, plan: PassPlan) -> None:
        try:
            done = await self._run(plan)
        except OutOfBlocks:
            # Nothing was changed: the next turn plans again, with less.
            if not self.scheduler.make_room(plan):
                logger.exception("the cache cannot hold a lone sequence")
                self._end(self.scheduler.fail_pass(plan))
            return
        except EngineBroken:
            self._end(self.scheduler.break_pass(plan))
            self._flush()
            raise  # ends the pass loop, so that this replica is replaced
        if done is None:
            return
        times = PassTimes(done.started_us, done.ended_us, done.logits_us)
        self.scheduler.commit_pass(plan, done.results, times, done.num_free_blocks)

    def _deliver(self) -> None:
        """The last pass's tokens to its requests, and whatever drafts are to hear."""
        for session_id, delta in self.scheduler.finish_pass(monotonic_us()):
            answers = self._answers.get(session_id)
            if answers is not None:
                answers.queue.put_nowait(delta)
        self._flush()
        self._flush_spans()

    def _flush_spans(self) -> None:
        """Some of what waits to become spans; when passes have ended, all, which is bounded."""
        tracer = self._tracer
        if tracer is None:
            return
        with self._guard:
            tracer.flush()
        while tracer.has_waiting and not self._loop.is_running:
            with self._guard:
                tracer.flush()

    # -- drafts -----------------------------------------------------------------------------

    def _flush(self) -> None:
        for link_id, messages in self.scheduler.drafts.pool.take_outbox().items():
            for message in messages:
                self._streams[link_id].send(message)
        for link_id in self.scheduler.drafts.pool.take_outlaws():
            self._streams[link_id].close("too many broken rules")

    async def _serve_draft(self, hello: Hello, stream: TargetStream) -> None:
        """One attached draft, until its stream ends."""
        link_id, self._next_link_id = self._next_link_id, self._next_link_id + 1
        desk = self.scheduler.drafts
        self._streams[link_id] = stream
        desk.attach(link_id, hello)
        self._loop.wake()
        logger.info("draft %s attached as link %d", hello.replica_id, link_id)
        try:
            while True:
                messages = await stream.receive()
                now_us = monotonic_us()
                if stream.clock.rtt_us is not None:
                    self.scheduler.policy.learn_rtt(stream.clock.rtt_us)
                offset_us = stream.clock.offset_us
                for message in messages:
                    desk.receive(link_id, message, now_us, offset_us)
                self._flush()
                self._loop.wake()
        except StreamLost as lost:
            logger.info("draft %s (link %d) left: %s", hello.replica_id, link_id, lost)
        finally:
            desk.detach(link_id, monotonic_us(), stream.num_remote_errors)
            del self._streams[link_id]
            self._loop.wake()

    @property
    def num_links(self) -> int:
        return len(self._streams)

    @property
    def rtt_us(self) -> dict[str, int]:
        """Least recent round trip by draft replica, of those that have answered a ping."""
        links = self.scheduler.drafts.pool.links()
        return {
            links[link_id].hello.replica_id: stream.clock.rtt_us
            for link_id, stream in self._streams.items()
            if stream.clock.rtt_us is not None
        }
