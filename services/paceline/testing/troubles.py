"""Makes happen what a `FaultPlan` counts: to links, to processes and to clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from paceline.testing.faults import Fault
from paceline.testing.network import Stream
from paceline.testing.simulated_draft import SimulatedDraft
from paceline.testing.simulated_target import SimulatedTarget

if TYPE_CHECKING:
    from paceline.testing.cluster import SimulatedCluster

RESTART_US = 12_000
PARTITION_US = 30_000
PEER_TIMEOUT_US = 12_000
HANG_US = 60_000
SLOW_US = 40_000
SLOW_FACTORS = (3, 10)
BUSY_US = 20_000


class Troubles:
    """Of one run. Times and victims come from the cluster's one source of chance."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._rng = cluster.world.rng
        self._clock = cluster.world.clock

    def schedule(self) -> None:
        plan = self._cluster.scenario.faults
        for count, fault in (
            (plan.num_partitions, self._partition),
            (plan.num_one_ways, self._one_way),
            (plan.num_cuts, self._cut),
            (plan.num_kills, self._kill_draft),
            (plan.num_slow_drafts, self._slow_draft),
            (plan.num_drains, self._drain),
            (plan.num_busy, self._refuse),
            (plan.num_target_kills, self._kill_target),
            (plan.num_hangs, self._hang),
            (plan.num_failed_passes, self._fail_pass),
            (plan.num_breaks, self._break),
            (plan.num_slow_targets, self._slow_target),
            (plan.num_gateway_partitions, self._partition_gateway),
            (plan.num_controller_kills, self._kill_controller),
            (plan.num_aborts, self._abort),
        ):
            for _ in range(count):
                self._clock.call_at(self._rng.randrange(plan.horizon_us), partial(self._run, fault))

    def _run(self, fault: Callable[[], None]) -> None:
        if not self._world.network.is_healed:
            fault()

    # -- links ------------------------------------------------------------------------------

    def _stream(self) -> Stream | None:
        streams = self._cluster.links.open_streams()
        return self._rng.choice(streams) if streams else None

    def _partition(self) -> None:
        stream = self._stream()
        if stream is not None:
            duration_us = self._rng.randrange(PARTITION_US)
            self._world.network.block(duration_us, stream.draft_end, stream.target_end)
            self._world.fire(Fault.PARTITION)

    def _one_way(self) -> None:
        """The end that hears nothing for too long gives the stream up."""
        stream = self._stream()
        if stream is not None:
            duration_us = self._rng.randrange(PARTITION_US)
            end = self._rng.choice((stream.draft_end, stream.target_end))
            self._world.network.block(duration_us, end)
            if duration_us > PEER_TIMEOUT_US:
                cut = partial(self._cluster.links.cut, stream)
                self._clock.call_after(PEER_TIMEOUT_US, cut)
            self._world.fire(Fault.ONE_WAY)

    def _cut(self) -> None:
        stream = self._stream()
        if stream is not None:
            self._cluster.links.cut(stream)
            self._world.fire(Fault.CUT)

    def _partition_gateway(self) -> None:
        ways, rng = self._cluster.ways, self._rng
        pair = (rng.randrange(len(self._cluster.gateways)), rng.randrange(len(self._targets)))
        there, back = rng.choice(((True, True), (True, False), (False, True)))
        ways.block(pair, rng.randrange(PARTITION_US), there=there, back=back)
        self._world.fire(Fault.GATEWAY_PARTITION)

    # -- drafts -----------------------------------------------------------------------------

    def _draft(self) -> SimulatedDraft | None:
        up = [draft for draft in self._cluster.drafts if draft.is_up]
        return self._rng.choice(up) if up else None

    def _kill_draft(self) -> None:
        draft = self._draft()
        if draft is None:
            return
        self._world.fire(Fault.KILL)
        self._cluster.links.draft_died(draft, draft.kill())
        if self._rng.random() < self._cluster.scenario.faults.restart_share:
            self._restart_later(draft)

    def _restart_later(self, draft: SimulatedDraft) -> None:
        boot = draft.num_boots

        def restart() -> None:
            if not draft.is_up and draft.num_boots == boot:
                self._world.fire(Fault.RESTART)
                self._cluster.boot(draft)

        self._clock.call_after(self._rng.randrange(RESTART_US), restart)

    def _slow_draft(self) -> None:
        draft = self._draft()
        if draft is not None:
            self._world.fire(Fault.SLOW_DRAFT)
            self._slow_down(draft)

    def _slow_down(self, process: SimulatedDraft | SimulatedTarget) -> None:
        process.slow = self._rng.choice(SLOW_FACTORS)

        def recover() -> None:
            process.slow = 1

        self._clock.call_after(self._rng.randrange(SLOW_US), recover)

    def _drain(self) -> None:
        draft = self._draft()
        if draft is None or draft.table.is_draining:
            return
        self._world.fire(Fault.DRAIN)
        draft.on_leave = partial(self._leave, draft)
        draft.drain()

    def _leave(self, draft: SimulatedDraft) -> None:
        if self._cluster.controller.is_up:
            self._cluster.controller.goodbye(draft)
        for stream in list(draft.streams.values()):
            self._cluster.links.leave(draft, stream)
        if draft.is_up:
            draft.kill()
            self._restart_later(draft)

    def _refuse(self) -> None:
        draft = self._draft()
        if draft is not None:
            self._world.fire(Fault.BUSY)
            draft.refuse(self._rng.randrange(BUSY_US))

    # -- targets ----------------------------------------------------------------------------

    @property
    def _targets(self) -> Sequence[SimulatedTarget]:
        return self._cluster.targets

    def _target(self) -> SimulatedTarget | None:
        up = [target for target in self._targets if target.is_up]
        return self._rng.choice(up) if up else None

    def _kill_target(self) -> None:
        target = self._target()
        if target is not None:
            self._world.fire(Fault.TARGET_KILL)
            target.kill()

    def target_died(self, target: SimulatedTarget, streams: list[Stream]) -> None:
        """Whatever killed it; some come back."""
        self._cluster.links.target_died(target, streams)
        if self._rng.random() >= self._cluster.scenario.faults.target_restart_share:
            return
        boot = target.num_boots

        def restart() -> None:
            if not target.is_up and target.num_boots == boot:
                self._world.fire(Fault.TARGET_RESTART)
                target.start()

        self._clock.call_after(self._rng.randrange(RESTART_US), restart)

    def _hang(self) -> None:
        target = self._target()
        if target is not None:
            self._world.fire(Fault.HANG)
            target.hang(self._rng.randrange(HANG_US))

    def _fail_pass(self) -> None:
        target = self._target()
        if target is not None:
            target.fail_next_pass()

    def _break(self) -> None:
        target = self._target()
        if target is not None:
            target.break_down()

    def _slow_target(self) -> None:
        target = self._target()
        if target is not None:
            self._world.fire(Fault.SLOW_TARGET)
            self._slow_down(target)

    # -- the rest ---------------------------------------------------------------------------

    def _kill_controller(self) -> None:
        controller = self._cluster.controller
        if not (self._cluster.scenario.is_controlled and controller.is_up):
            return
        self._world.fire(Fault.CONTROLLER_KILL)
        controller.kill()

        def restart() -> None:
            self._world.fire(Fault.CONTROLLER_RESTART)
            controller.start()

        self._clock.call_after(self._rng.randrange(RESTART_US), restart)

    def _abort(self) -> None:
        """A client leaves one of its choices, or all."""
        gateway = self._rng.choice(self._cluster.gateways)
        choices = range(len(gateway.tickets))
        some = list(choices) if self._rng.random() < 0.5 else [self._rng.choice(choices)]
        if gateway.leave(some):
            self._world.fire(Fault.ABORT)
