"""A draft process of the simulation: the shipped draft table on a virtual clock.

It does what `draft.driver` does with asyncio and gRPC, and nothing more. `start`, `kill`, `drain`
and `refuse` are what befalls the process; killing it loses all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from paceline.draft.steps import step_item, work_result
from paceline.engine.base import OutOfBlocks, StepResult
from paceline.protocol.draft_table import SUPPORTED_MODES, PassItem
from paceline.protocol.messages import (
    DraftMessage,
    DraftTokens,
    Drain,
    Hello,
    OpenSession,
    TargetMessage,
    Verdict,
)
from paceline.protocol.token_log import TokenLog
from paceline.testing.invariants import DraftView, require
from paceline.testing.network import Envelope, Stream
from paceline.testing.scenario import BLOCK_SIZE
from paceline.testing.world import NearMissToyEngine, RecordingEngine, World

STALL_US = 40_000
DRAIN_TIMEOUT_US = 12_000


class SimulatedDraft:
    """One draft process; `start` and `kill` are its lives.

    `on_leave`: called when a drain is over, to end the streams in order. `wanted`: the targets
    that it should have streams to.
    """

    def __init__(self, draft_id: int, world: World) -> None:
        self.draft_id = draft_id
        self._world = world
        self.streams: dict[int, Stream] = {}
        self.wanted: set[int] = set()
        self.on_leave: Callable[[], None] = lambda: None
        self.counts: Counter[str] = Counter()  # of earlier lives
        self.is_up = False
        self.num_boots = 0
        self._start_empty()

    def _start_empty(self) -> None:
        scenario = self._world.scenario
        info = scenario.draft_info()
        self.clock = self._world.local_clock()
        self.slow = 1
        self.engine = RecordingEngine(
            NearMissToyEngine(
                info,
                seed=scenario.engine_seed,
                error_rate=scenario.draft_errors[self.draft_id],
                error_seed=1 + self.draft_id,
            )
        )
        self.table = self._world.parts.draft_table(
            max_sessions=scenario.draft_max_sessions,
            max_len=info.max_model_len,
            session_idle_us=scenario.session_idle_us,
            block_size=BLOCK_SIZE,
        )
        self._in_pass = False

    def life_counts(self) -> Counter[str]:
        stats = self.table.stats
        return Counter(
            rewinds=stats.num_rewinds,
            busy_drafts=stats.num_busy,
            expired=stats.num_expired,
            promoted=stats.num_promoted,
        )

    def start(self) -> None:
        self.counts.update(self.life_counts())
        self._start_empty()
        self.is_up = True
        self.num_boots += 1

    def kill(self) -> list[Stream]:
        """Everything is lost at once; returns the streams whose other ends will notice."""
        self.is_up = False
        streams = list(self.streams.values())
        for stream in streams:
            stream.draft_end.is_open = False
        self.streams.clear()
        return streams

    def drain(self) -> None:
        """Ask the targets to move, serve on until none counts on this draft, then leave."""
        self.table.is_draining = True
        self.wanted.clear()
        for stream in self.streams.values():
            self._send(stream, Drain())
        boot = self.num_boots
        self._world.clock.call_after(DRAIN_TIMEOUT_US, lambda: self._leave(boot))
        self._check_left()

    def _check_left(self) -> None:
        if self.is_up and self.table.is_draining and len(self.table) == 0:
            self._leave(self.num_boots)

    def _leave(self, boot: int) -> None:
        if boot == self.num_boots and self.is_up:
            self._world.checker.counts["stayed"] += len(self.table)
            self.on_leave()

    def refuse(self, duration_us: int) -> None:
        """Every new sequence gets BUSY for a while."""
        table, places = self.table, self._world.scenario.draft_max_sessions
        table.max_sessions = 0

        def accept() -> None:
            table.max_sessions = places

        self._world.clock.call_after(duration_us, accept)

    def hello(self) -> Hello:
        info = self._world.scenario.draft_info()
        return Hello(
            protocol_version=1,
            boot_id=f"boot-{self.draft_id}-{self.num_boots}",
            replica_id=f"draft-{self.draft_id}",
            model_id=info.model_id,
            vocab_size=info.vocab_size,
            tokenizer_hash="",
            max_model_len=info.max_model_len,
            max_sessions=self._world.scenario.draft_max_sessions,
            modes=SUPPORTED_MODES,
        )

    def lose(self, stream: Stream) -> None:
        if self.streams.pop(stream.link_id, None) is not None:
            stream.draft_end.is_open = False
            self.table.lose_link(stream.link_id)
            self._check_left()
            self.wake()

    def receive(self, stream: Stream, envelope: Envelope) -> None:
        world = self._world
        message: TargetMessage = envelope.message  # type: ignore[assignment]
        world.note("to_draft", self.draft_id, stream.link_id, envelope.kind)
        session, before = None, None
        if isinstance(message, Verdict):
            session = self.table.session((stream.link_id, message.session_id))
            before = None if session is None else DraftView.of(session)
        for answer in self.table.receive(stream.link_id, message, self.clock.now_us):
            self._send(stream, answer)
        if isinstance(message, OpenSession):
            opened = self.table.session((stream.link_id, message.session_id))
            if opened is not None:
                opened.__class__ = world.parts.draft_session  # where a planted bug gets in
        if isinstance(message, Verdict) and session is not None and before is not None:
            world.checker.draft_received(stream.target_life, before, session, message)
        self._check_left()
        self.wake()

    def _send(self, stream: Stream, message: DraftMessage, context: tuple[int, ...] = ()) -> None:
        self._world.network.to_target(stream, Envelope(message, context))

    def wake(self) -> None:
        if self._in_pass or not self.is_up:
            return
        world = self._world
        for link_id, close in self.table.expire(self.clock.now_us):
            if link_id in self.streams:
                self._send(self.streams[link_id], close)
        self._check_left()
        if not self.is_up:
            return
        items = self.table.begin_pass(world.scenario.draft_rows_per_pass)
        if not items:
            self.engine.run(self.table.take_released(), ())
            return
        try:
            results = self.engine.run(self.table.take_released(), [step_item(i) for i in items])
        except OutOfBlocks:
            self._make_room(items)
            return
        for item in items:
            session = self.table.session(item.key)
            assert session is not None
            cached, text = self.engine.cached[item.sequence_id], session.text_of(item.sequence_id)
            assert text is not None
            world.checker.cache_is("draft", cached, text[: len(cached)])
        self._in_pass = True
        boot = self.num_boots
        world.clock.call_after(self._pass_us(), lambda: self._end_pass(boot, items, results))

    def _pass_us(self) -> int:
        world = self._world
        if world.network.draw_stall():
            return STALL_US
        return world.scenario.draft_us * self.slow

    def _make_room(self, items: list[PassItem]) -> None:
        self.table.cancel_pass(items)
        evicted = self.table.evict_newest()
        self._world.checker.counts["branches_given_up" if evicted is None else "evicted"] += 1
        if evicted is not None and evicted[0] in self.streams:
            self._send(self.streams[evicted[0]], evicted[1])
        self._world.clock.call_after(self._world.scenario.draft_us, self.wake)

    def _end_pass(self, boot: int, items: list[PassItem], results: list[StepResult]) -> None:
        if boot != self.num_boots or not self.is_up:
            return  # the process that computed this is gone
        world = self._world
        self._in_pass = False
        outcomes = [work_result(result) for result in results]
        self.table.end_pass(items, outcomes, world.scenario.draft_us)
        for item in items:
            session = self.table.session(item.key)
            stream = self.streams.get(item.key[0])
            if session is not None and stream is not None:
                world.checker.draft_holds(stream.target_life, session)
        for link_id, drafts in self.table.take_drafts(self.clock.now_us).items():
            for draft in drafts:
                if link_id in self.streams:
                    self._send_draft(self.streams[link_id], draft)
        self.wake()

    def _send_draft(self, stream: Stream, draft: DraftTokens) -> None:
        self._world.checker.draft_sends(stream.target_life, draft)
        session = self.table.session((stream.link_id, draft.session_id))
        assert session is not None
        texts = [session.log.slice(0)]
        if draft.is_branch:
            texts = [branch.text(session.log) for branch in session.branches.live]
        self._send(stream, draft, _context(draft, texts))


def _context(draft: DraftTokens, texts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The text before the proposals: the one of these that is meant."""
    for text in texts:
        context = text[: draft.start]
        if TokenLog(context).hash_at(len(context)) == draft.context_hash:
            return context
    require(False, "a proposal of no text", draft)
    return ()
