"""A whole Paceline in one thread and no time: targets x drafts x clients, faults, and a verdict.

It drives the shipped `Scheduler`, `TargetSession`, `DraftTable` and `DraftSession` over a
simulated network. One seed decides everything, so a failure is replayed by its seed. It knows
no asyncio, torch, gRPC, Ray or wall clock.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import partial
from random import Random

from paceline.errors import PacelineError
from paceline.generation import GenerateRequest
from paceline.testing.clock import VirtualClock
from paceline.testing.faults import Fault
from paceline.testing.invariants import Checker, Ticket, require
from paceline.testing.network import End, SimulatedNetwork, Stream
from paceline.testing.scenario import (
    VOCAB_SIZE,
    Scenario,
    draw_scenario,
    is_lawful,
    target_only,
)
from paceline.testing.simulated_draft import SimulatedDraft
from paceline.testing.simulated_target import SimulatedTarget
from paceline.testing.world import Parts, World

MAX_EVENTS = 20_000
NOTICE_US = 6_000
REDIAL_US = 1_500
RESTART_US = 12_000
PARTITION_US = 30_000
DEFAULT_PARTS = Parts()


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did. `fired` counts faults, `counts` interesting cases of the protocol."""

    seed: int
    num_events: int
    fired: Counter[str]
    counts: Counter[str]
    trace: tuple[tuple[object, ...], ...]

    @property
    def trace_hash(self) -> str:
        return hashlib.sha256(repr(self.trace).encode()).hexdigest()


class SimulatedCluster:
    """Build from a scenario, call `run` once."""

    def __init__(self, scenario: Scenario, parts: Parts = DEFAULT_PARTS) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.rng = Random(scenario.seed ^ 0x5EED)
        self.network = SimulatedNetwork(self.clock, self.rng, scenario.faults, VOCAB_SIZE)
        self.network.hang_up = self.cut
        self.checker = Checker(scenario.max_draft_ahead)
        self.world = World(scenario, self.clock, self.network, self.checker, parts, [])
        self.targets = [SimulatedTarget(i, self.world) for i in range(scenario.num_targets)]
        self.drafts = [SimulatedDraft(i, self.world) for i in range(scenario.num_drafts)]
        # A client's tickets, one for each of its choices; and all of them.
        self.orders = [_tickets(scenario, client.request) for client in scenario.clients]
        self.tickets = [ticket for order in self.orders for ticket in order]
        self.num_events = 0

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> Report:
        """Play the schedule to its end. Raises `InvariantError` when a promise is broken."""
        if self.scenario.are_drafts_up:
            for draft in self.drafts:
                self.clock.call_after(self.rng.randrange(1_000), partial(self._boot, draft))
        for client, order in zip(self.scenario.clients, self.orders, strict=True):
            target = self.targets[client.target_id]
            self.clock.call_at(client.start_us, partial(target.submit, order))
        self._schedule_faults()
        self._play(until_done=True)
        require(all(ticket.is_done for ticket in self.tickets), "a request never finished")
        self._settle()
        return self.report()

    def report(self) -> Report:
        counts = self.checker.counts.copy()
        for target in self.targets:
            counts.update(target.scheduler.drafts.counts)
            counts["preempted"] += target.scheduler.stats.num_preemptions
            counts["prefix_tokens"] += target.scheduler.stats.num_prefix_tokens
        for draft in self.drafts:
            counts["rewinds"] += draft.table.stats.num_rewinds
            counts["busy_drafts"] += draft.table.stats.num_busy
            counts["expired"] += draft.table.stats.num_expired
        return Report(
            self.scenario.seed, self.num_events, self.network.fired, counts, tuple(self.world.trace)
        )

    def _play(self, *, until_done: bool) -> None:
        open_tickets = self.tickets if until_done else []
        while not until_done or open_tickets:
            if not self.clock.run_next():
                return
            self.num_events += 1
            if open_tickets and open_tickets[0].is_done:
                open_tickets = open_tickets[1:]
            require(self.num_events < MAX_EVENTS, "the cluster does not come to rest")

    def _settle(self) -> None:
        """All requests are over: nothing may be left on either side."""
        self.network.is_healed = True
        self._play(until_done=False)
        if not self.scenario.faults.may_lose_messages:
            self._require_no_sessions("after the last close")
        self.clock.now_us += self.scenario.session_idle_us + 1
        for draft in self.drafts:
            draft.wake()
        self._play(until_done=False)
        self._require_no_sessions("after the idle limit")
        for target in self.targets:
            target.wake()
            scheduler = target.scheduler
            require(scheduler.num_running + scheduler.num_waiting == 0, "sequences left")
            links = scheduler.drafts.pool.links().values()
            require(not any(link.sessions or link.outbox for link in links), "links not empty")
            self._require_empty("target", target.engine.engine.stats().num_sequences)
            target.engine.engine.check_integrity()
            num_free = (target.engine.num_free_blocks, scheduler.num_free_blocks)
            num_blocks = scheduler.info.num_blocks
            require(num_free == (num_blocks, num_blocks), "blocks lost", num_free, num_blocks)

    def _require_no_sessions(self, when: str) -> None:
        for draft in self.drafts:
            if draft.is_up:
                require(len(draft.table) == 0, f"draft sessions left {when}", draft.draft_id)
                self._require_empty("draft", draft.engine.engine.stats().num_sequences)
                draft.engine.engine.check_integrity()

    def _require_empty(self, what: str, num_sequences: int) -> None:
        require(num_sequences == 0, f"{what} cache still holds sequences", num_sequences)

    # -- links and processes ----------------------------------------------------------------

    def _boot(self, draft: SimulatedDraft) -> None:
        draft.start()
        self.world.note("boot", draft.draft_id)
        for target in self.targets:
            self._dial(draft, target)

    def _dial(self, draft: SimulatedDraft, target: SimulatedTarget) -> None:
        if not draft.is_up:
            return
        stream = self.network.connect(
            draft.draft_id, target.target_id, End(draft.receive), End(target.receive)
        )
        self.world.note("dial", stream.link_id, draft.draft_id, target.target_id)
        draft.streams[stream.link_id] = stream
        target.attach(stream, draft.hello())

    def cut(self, stream: Stream) -> None:
        """The stream ends; either end notices when it does, and the draft dials again."""
        draft, target = self.drafts[stream.draft_id], self.targets[stream.target_id]
        self.clock.call_after(self.rng.randrange(NOTICE_US), lambda: target.detach(stream))
        self.clock.call_after(
            self.rng.randrange(NOTICE_US), lambda: self._lose(draft, target, stream)
        )

    def _lose(self, draft: SimulatedDraft, target: SimulatedTarget, stream: Stream) -> None:
        if stream.link_id in draft.streams:
            draft.lose(stream)
            boot = draft.num_boots
            self.clock.call_after(REDIAL_US, lambda: self._redial(draft, target, boot))

    def _redial(self, draft: SimulatedDraft, target: SimulatedTarget, boot: int) -> None:
        if draft.num_boots == boot:
            self._dial(draft, target)

    # -- faults -----------------------------------------------------------------------------

    def _schedule_faults(self) -> None:
        plan = self.scenario.faults
        for count, fault in (
            (plan.num_partitions, self._partition),
            (plan.num_cuts, self._cut_some),
            (plan.num_kills, self._kill_some),
            (plan.num_aborts, self._abort_some),
        ):
            for _ in range(count):
                self.clock.call_at(self.rng.randrange(plan.horizon_us), fault)

    def _open_streams(self) -> list[Stream]:
        return [stream for draft in self.drafts for stream in draft.streams.values()]

    def _partition(self) -> None:
        streams = self._open_streams()
        if streams and not self.network.is_healed:
            self.network.block(self.rng.choice(streams), self.rng.randrange(PARTITION_US))
            self._fire(Fault.PARTITION)

    def _cut_some(self) -> None:
        streams = self._open_streams()
        if streams and not self.network.is_healed:
            self.cut(self.rng.choice(streams))
            self._fire(Fault.CUT)

    def _kill_some(self) -> None:
        up = [draft for draft in self.drafts if draft.is_up]
        if not up or self.network.is_healed:
            return
        draft = self.rng.choice(up)
        self._fire(Fault.KILL)
        for stream in draft.kill():
            target = self.targets[stream.target_id]
            self.clock.call_after(self.rng.randrange(NOTICE_US), partial(target.detach, stream))
        if self.rng.random() < self.scenario.faults.restart_share:
            self.clock.call_after(self.rng.randrange(RESTART_US), lambda: self._restart(draft))

    def _restart(self, draft: SimulatedDraft) -> None:
        if not draft.is_up:
            self._fire(Fault.RESTART)
            self._boot(draft)

    def _abort_some(self) -> None:
        """A client leaves one of its choices, or all."""
        index = self.rng.randrange(len(self.orders))
        order = self.orders[index]
        target = self.targets[self.scenario.clients[index].target_id]
        for ticket in order if self.rng.random() < 0.5 else [self.rng.choice(order)]:
            if target.abort(ticket):
                self._fire(Fault.ABORT)

    def _fire(self, fault: Fault) -> None:
        self.network.fired[fault] += 1
        self.world.note("fault", fault.value)


def _tickets(scenario: Scenario, request: GenerateRequest) -> list[Ticket]:
    return [
        Ticket(
            request,
            choice,
            None if is_lawful(request) else target_only(scenario.engine_seed, request, choice),
        )
        for choice in range(request.n)
    ]


def run_seed(seed: int, parts: Parts = DEFAULT_PARTS) -> Report:
    """One schedule; a failure says how to replay it."""
    cluster = SimulatedCluster(draw_scenario(seed), parts)
    try:
        return cluster.run()
    except (AssertionError, LookupError, PacelineError) as broken:
        broken.add_note(f"replay: run_seed({seed}), broken at {cluster.clock.now_us} us")
        raise
