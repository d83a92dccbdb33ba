"""One client's gateway: the shipped `Failover` on a virtual clock.

It does what `gateway.service` does with asyncio and Serve, and nothing more: choose a target,
listen, notice silence, try again, tell a target that nobody listens any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.errors import OverloadedError, RequestError
from paceline.gateway.failover import MAX_TRIES, Failover, target_lost
from paceline.generation import GenerateRequest
from paceline.testing.channel import Channel, Item, Ways
from paceline.testing.clock import LocalClock
from paceline.testing.invariants import Ticket, require
from paceline.testing.scenario import SILENCE_US, Client
from paceline.testing.simulated_target import SimulatedTarget
from paceline.testing.world import World


class SimulatedGateway:
    """One request, from its start to the end of all its choices."""

    def __init__(
        self,
        gateway_id: int,
        client: Client,
        tickets: list[Ticket],
        world: World,
        ways: Ways,
        targets: Sequence[SimulatedTarget],
    ) -> None:
        self.gateway_id = gateway_id
        self.client = client
        self.tickets = tickets
        self.channel: Channel | None = None
        self._world = world
        self._ways = ways
        self._targets = targets
        self._clock: LocalClock = world.local_clock()
        self._failover: Failover = world.parts.failover(client.request, world.scenario.max_retries)
        self._heard_us = 0
        self._num_tries = 0
        self._num_failures = 0  # since the last token

    @property
    def is_done(self) -> bool:
        return all(ticket.is_done for ticket in self.tickets)

    def start(self) -> None:
        self._try(self.client.request)

    # -- tries ------------------------------------------------------------------------------

    def _try(self, request: GenerateRequest) -> None:
        if self.is_done:
            return  # the client left meanwhile
        self._num_tries += 1
        require(self._num_tries <= MAX_TRIES, "too many tries", self._num_tries)
        target, world = self._choose(), self._world
        world.note("try", self.gateway_id, target.target_id, request.request_id)
        self.channel = channel = Channel(
            self._ways,
            self.gateway_id,
            target,
            target.num_boots,
            self._receive,
            world.clock.now_us,
        )
        channel.to_target(lambda: target.submit(channel, request))
        self._heard_us = self._clock.now_us
        self._watch(channel, self._heard_us)

    def _choose(self) -> SimulatedTarget:
        """The one that the client names, later another than the last."""
        if self.channel is None:
            return self._targets[self.client.target_id]
        last = self.channel.target
        others = [target for target in self._targets if target is not last]
        living = [target for target in others if target.is_up] or others
        return self._world.rng.choice(living) if living else last

    def _watch(self, channel: Channel, heard_us: int) -> None:
        """Count the target as lost when nothing has come for long; times are this clock's."""
        self._clock.call_at(heard_us + SILENCE_US, lambda: self._look(channel, heard_us))

    def _look(self, channel: Channel, heard_us: int) -> None:
        if not channel.is_open:
            return
        if self._heard_us > heard_us:
            self._watch(channel, self._heard_us)
        else:
            self._world.checker.counts["silence"] += 1
            self._world.checker.silenced.add(channel.gateway_id)
            self._lose(channel, target_lost())

    # -- what a target says -----------------------------------------------------------------

    def _is_heard(self, channel: Channel, item: Item) -> bool:
        """Only the newest try may speak to the client, and only while it is listened to."""
        return channel.is_open

    def _receive(self, channel: Channel, item: Item) -> None:
        world = self._world
        if not self._is_heard(channel, item):
            world.checker.counts["stale_try"] += isinstance(item, list)
            return
        channel.heard_us = world.clock.now_us
        self._heard_us = self._clock.now_us
        if item is None:
            world.checker.counts["alive"] += 1
        elif isinstance(item, RequestError):
            self._lose(channel, item)
        else:
            for delta in item:
                self._num_failures = 0
                seen = self._failover.receive(delta)
                ticket = self.tickets[delta.choice]
                if not ticket.is_aborted:
                    ticket.receive(seen)
            if self.is_done:
                self._hang_up(channel)

    def _lose(self, channel: Channel, error: RequestError) -> None:
        """The try has ended before its answer: the next one, or an error for the client."""
        world = self._world
        world.note("lost", self.gateway_id, channel.target.target_id, error.code)
        self._check_cause(channel, error)
        self._num_failures += 1
        self._hang_up(channel)
        attempt = self._failover.next_try(error)
        if attempt is not None:
            world.checker.counts["failovers"] += 1
            world.checker.counts["resumed"] += attempt.request.resumption is not None
            world.clock.call_after(int(attempt.pause_s * 1e6), partial(self._try, attempt.request))
            return
        self._check_end(error)
        for ticket in self.tickets:
            if not ticket.is_done:
                ticket.fail(error)

    def _hang_up(self, channel: Channel) -> None:
        """Listen no more, and tell the target, which may not have ended by itself."""
        channel.is_open = False
        channel.to_target(partial(channel.target.abort, channel, None))

    def leave(self, choices: Sequence[int]) -> int:
        """The client leaves some of its choices; how many of them had not ended."""
        left = [choice for choice in choices if not self.tickets[choice].is_done]
        for choice in left:
            ticket = self.tickets[choice]
            ticket.is_done = ticket.is_aborted = True
            self._failover.end_choice(choice)
            self._world.note("abort", self.gateway_id, choice)
        channel = self.channel
        if channel is None or not channel.is_open:
            return len(left)
        if left and self.is_done:
            self._hang_up(channel)
        else:
            for choice in left:
                channel.to_target(partial(channel.target.abort, channel, choice))
        return len(left)

    # -- what must hold ---------------------------------------------------------------------

    def _check_cause(self, channel: Channel, error: RequestError) -> None:
        """Blast radius: only what befell the target, or the way to it, ends a try."""
        if isinstance(error, OverloadedError) or error.code in ("queue_timeout", "engine_error"):
            return  # `TargetChecks` knows better
        target = channel.target
        is_gone = channel.boot != target.num_boots or not target.is_up
        trouble_us = max(target.trouble_until_us, self._ways.blocked_until_us(channel.pair))
        is_caused = is_gone or trouble_us >= channel.heard_us
        require(is_caused, "a try was given up without a target fault", error.code)

    def _check_end(self, error: RequestError) -> None:
        """A request may end with an error only for one of these reasons."""
        counts, code = self._world.checker.counts, error.code
        if isinstance(error, OverloadedError) or code == "queue_timeout":
            counts["refused"] += 1
        elif code == "engine_error":
            counts["engine_errors"] += 1
        elif code in ("target_died", "engine_broken"):
            require(self._num_failures >= 2, "failed at its first target", code)
            counts["quarantined"] += 1
        else:
            most = self._world.scenario.max_retries + 1
            require(code == "target_lost", "an unlisted error", code)
            require(self._num_failures >= most, "gave up too early", self._num_failures)
            counts["no_target"] += 1
