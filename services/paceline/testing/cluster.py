"""A whole Paceline in one thread and no time: gateways x targets x drafts, faults, and a verdict.

It drives the shipped `Failover`, `Scheduler`, `TargetSession`, `DraftTable`, `DraftSession` and
`Registry` over a simulated network. One seed decides everything, so a failure is replayed by its
seed. It knows no asyncio, torch, gRPC, Ray or wall clock.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from paceline.errors import PacelineError
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.testing.channel import Ways
from paceline.testing.clock import VirtualClock
from paceline.testing.draw import draw_scenario
from paceline.testing.faults import Fault
from paceline.testing.invariants import Checker, Ticket, require
from paceline.testing.links import Links
from paceline.testing.network import SimulatedNetwork
from paceline.testing.scenario import (
    GREEDY,
    VOCAB_SIZE,
    Client,
    Scenario,
    is_lawful,
    target_only,
)
from paceline.testing.simulated_controller import BEAT_US, SimulatedController
from paceline.testing.simulated_draft import SimulatedDraft
from paceline.testing.simulated_gateway import SimulatedGateway
from paceline.testing.simulated_target import SimulatedTarget
from paceline.testing.troubles import Troubles
from paceline.testing.world import Parts, World

MAX_EVENTS = 60_000
# Passes so long that a draft's answer is there before the text ends.
RECOVERY_PASS_US = 5_000
# Longer than any fault lasts and any breaker stays dark.
RECOVERY_US = 120_000
RECOVERY_REQUEST = GenerateRequest(
    "recovery", (3, 5, 7), 16, GREEDY, (), SpeculationRequest("model"), ignore_eos=True
)
DEFAULT_PARTS = Parts()
# How code that is wrong may fail.
FAILURES = (
    *(AssertionError, ArithmeticError, AttributeError, LookupError, PacelineError),
    *(TypeError, ValueError),
)


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
        rng = Random(scenario.seed ^ 0x5EED)
        self.network = SimulatedNetwork(self.clock, rng, scenario.faults, VOCAB_SIZE)
        self.checker = Checker(scenario.max_draft_ahead, scenario.max_fan_out, scenario.max_untold)
        self.world = World(scenario, self.clock, self.network, self.checker, parts, rng, [])
        self.ways = Ways(self.clock, rng, scenario.gateway_us)
        make_target = parts.target or SimulatedTarget
        make_draft = parts.draft or SimulatedDraft
        make_gateway = parts.gateway or SimulatedGateway
        self.targets: list[SimulatedTarget] = [
            make_target(i, self.world) for i in range(scenario.num_targets)
        ]
        self.drafts: list[SimulatedDraft] = [
            make_draft(i, self.world) for i in range(scenario.num_drafts)
        ]
        self.gateways: list[SimulatedGateway] = [
            make_gateway(i, client, _tickets(scenario, client), self.world, self.ways, self.targets)
            for i, client in enumerate(scenario.clients)
        ]
        self.controller = SimulatedController(self.world)
        self.links = Links(self.world, self.targets, self.drafts)
        self.network.hang_up = self.links.cut
        self.troubles = Troubles(self)
        self.num_events = 0
        for target in self.targets:
            target.on_death = partial(self.troubles.target_died, target)

    # -- the run ----------------------------------------------------------------------------

    def run(self) -> Report:
        """Play the schedule to its end. Raises `InvariantError` when a promise is broken."""
        if self.scenario.skew_permille:
            self.world.fire(Fault.SKEW)
        if self.scenario.is_overload:
            self.world.fire(Fault.OVERLOAD)
        if self.scenario.is_controlled:
            for target in self.targets:
                self._beat_target(target)
        if self.scenario.are_drafts_up:
            for draft in self.drafts:
                self.clock.call_after(self.world.rng.randrange(1_000), partial(self.boot, draft))
        for gateway in self.gateways:
            self.clock.call_at(gateway.client.start_us, gateway.start)
        self.troubles.schedule()
        self._play(lambda: all(gateway.is_done for gateway in self.gateways))
        done = all(gateway.is_done for gateway in self.gateways)
        require(done, "a request never finished")
        self._heal()
        self._settle()
        return self.report()

    def report(self) -> Report:
        counts = self.checker.counts.copy()
        for target in self.targets:
            counts.update(target.counts)
            if target.is_up:
                counts.update(target.life_counts())
        for draft in self.drafts:
            counts.update(draft.counts)
            counts.update(draft.life_counts())
        tickets = [ticket for gateway in self.gateways for ticket in gateway.tickets]
        counts["tokens"] = sum(len(ticket.received) for ticket in tickets)
        counts["finished"] = sum(not (t.is_aborted or t.error) for t in tickets)
        trace = tuple(self.world.trace)
        return Report(self.scenario.seed, self.num_events, self.network.fired, counts, trace)

    def _play(self, is_over: Callable[[], bool] = lambda: False) -> None:
        while not is_over():
            if not self.clock.run_next():
                return
            self.num_events += 1
            require(self.num_events < MAX_EVENTS, "the cluster does not come to rest")

    # -- after the faults -------------------------------------------------------------------

    def _heal(self) -> None:
        """Everything works again. Some time later drafts must be of use again."""
        self.network.is_healed = True
        for target in self.targets:
            target.heal()
        scenario = self.scenario
        # A close that was lost may still hold a draft's last place, and a draft that may not run
        # ahead is too late for short passes.
        can_recover = not scenario.faults.may_lose_messages and scenario.max_draft_ahead > 1
        can_recover &= scenario.pass_us >= RECOVERY_PASS_US
        if not (scenario.checks_recovery and can_recover):
            return
        until_us = self.clock.now_us + RECOVERY_US
        self.clock.call_at(until_us, lambda: None)
        self._play(lambda: self.clock.now_us >= until_us)
        for target in self.targets:
            if target.is_up and any(stream.draft_end.is_open for stream in target.streams.values()):
                self._require_speculation(target)

    def _require_speculation(self, target: SimulatedTarget) -> None:
        client = Client(target.target_id, 0, RECOVERY_REQUEST)
        tickets = _tickets(self.scenario, client)
        gateway_id = len(self.gateways)
        make_gateway = self.world.parts.gateway or SimulatedGateway
        gateway: SimulatedGateway = make_gateway(
            gateway_id, client, tickets, self.world, self.ways, self.targets
        )
        self.gateways.append(gateway)
        counts = target.scheduler.drafts.counts
        num_kept = counts["kept"]
        gateway.start()
        self._play(lambda: gateway.is_done)
        is_whole = gateway.is_done and tickets[0].error is None
        require(is_whole, "a request failed after the faults", tickets[0].error)
        require(counts["kept"] > num_kept, "no draft is used after the faults", target.target_id)
        self.checker.counts["recovered"] += 1

    # -- at rest ----------------------------------------------------------------------------

    def _settle(self) -> None:
        """All requests are over: nothing may be left on any side."""
        self.links.is_over = True
        self._play()
        if not self.scenario.faults.may_lose_messages:
            self._require_no_sessions("after the last close")
        idle_us = self.scenario.session_idle_us
        self.clock.now_us += idle_us + idle_us // 4
        for draft in self.drafts:
            draft.wake()
        self._play()
        self._require_no_sessions("after the idle limit")
        for target in self.targets:
            if target.is_up:
                target.wake()
                self._require_clean(target)

    def _require_clean(self, target: SimulatedTarget) -> None:
        scheduler, engine = target.scheduler, target.engine
        require(scheduler.num_running + scheduler.num_waiting == 0, "sequences left")
        require(not scheduler._sequences and not target.requests, "requests left at a target")
        links = scheduler.drafts.pool.links().values()
        require(not any(link.sessions or link.outbox for link in links), "links not empty")
        self._require_empty("target", engine.engine.stats().num_sequences)
        engine.engine.check_integrity()
        num_free = (engine.num_free_blocks, scheduler.num_free_blocks)
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

    # -- processes --------------------------------------------------------------------------

    def boot(self, draft: SimulatedDraft) -> None:
        draft.start()
        self.world.note("boot", draft.draft_id)
        if self.scenario.is_controlled:
            self._beat_draft(draft, draft.num_boots)
        else:
            self.links.assign(draft, set(range(self.scenario.num_targets)))

    def _beat_draft(self, draft: SimulatedDraft, boot: int) -> None:
        if self.links.is_over or not draft.is_up or draft.num_boots != boot:
            return
        if self.controller.is_up and not draft.table.is_draining:
            self.links.assign(draft, self.controller.report_draft(draft))
        self.clock.call_after(BEAT_US, partial(self._beat_draft, draft, boot))

    def _beat_target(self, target: SimulatedTarget) -> None:
        if self.links.is_over:
            return
        if self.controller.is_up and target.is_up and not target.is_hung:
            self.controller.report_target(target)
        self.clock.call_after(BEAT_US, partial(self._beat_target, target))


def _tickets(scenario: Scenario, client: Client) -> list[Ticket]:
    request = client.request
    return [
        Ticket(
            request,
            choice,
            None if is_lawful(request) else target_only(scenario.engine_seed, request, choice),
        )
        for choice in range(request.n)
    ]


def run_scenario(scenario: Scenario, parts: Parts = DEFAULT_PARTS) -> Report:
    """One schedule; a failure says when it happened."""
    cluster = SimulatedCluster(scenario, parts)
    try:
        return cluster.run()
    except FAILURES as broken:
        broken.add_note(f"replay: run_seed({scenario.seed}), broken at {cluster.clock.now_us} us")
        raise


def run_seed(seed: int, parts: Parts = DEFAULT_PARTS) -> Report:
    return run_scenario(draw_scenario(seed), parts)
