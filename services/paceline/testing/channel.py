"""The way between a gateway and a target for one try of a request: in order, with delay.

What is on its way when a target dies may arrive or not; what arrives at a closed end is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from paceline.errors import RequestError
from paceline.generation import RoundDelta
from paceline.testing.clock import Action, VirtualClock

if TYPE_CHECKING:
    from paceline.testing.simulated_target import SimulatedTarget

# What a target says: what a pass committed, how the request ended, or that there is no news.
Item = list[RoundDelta] | RequestError | None
NEVER_US = 1 << 60


@dataclass
class Ways:
    """Which (gateway, target) pairs are cut, until when: towards the target, and back."""

    clock: VirtualClock
    rng: Random
    latency_us: int
    to_target_us: dict[tuple[int, int], int] = field(default_factory=dict)
    to_gateway_us: dict[tuple[int, int], int] = field(default_factory=dict)

    def block(self, pair: tuple[int, int], duration_us: int, *, there: bool, back: bool) -> None:
        until_us = self.clock.now_us + duration_us
        if there:
            self.to_target_us[pair] = until_us
        if back:
            self.to_gateway_us[pair] = until_us

    def blocked_until_us(self, pair: tuple[int, int]) -> int:
        """When the last cut of this pair ended or will end."""
        return max(self.to_target_us.get(pair, 0), self.to_gateway_us.get(pair, 0))

    def wait_us(self) -> int:
        return self.latency_us + self.rng.randrange(self.latency_us // 4 + 1)


@dataclass(slots=True, eq=False)
class Channel:
    """One try at one life of a target. `heard_us`: when the gateway last got something."""

    ways: Ways
    gateway_id: int
    target: SimulatedTarget
    boot: int
    receive: Callable[[Channel, Item], None]
    heard_us: int
    is_open: bool = True  # at the gateway
    is_dead: bool = False  # the target's life is over, and what it sent last is lost
    free_there_us: int = 0
    free_back_us: int = 0

    @property
    def pair(self) -> tuple[int, int]:
        return self.gateway_id, self.target.target_id

    def to_target(self, action: Action) -> None:
        """Do something at the target, if it still lives then."""
        ways = self.ways
        at_us = max(
            ways.clock.now_us + ways.wait_us(),
            ways.to_target_us.get(self.pair, 0),
            self.free_there_us,
        )
        self.free_there_us = at_us
        ways.clock.call_at(at_us, lambda: self.target.hear(self, action))

    def to_gateway(self, item: Item, extra_us: int = 0) -> None:
        ways = self.ways
        at_us = max(
            ways.clock.now_us + ways.wait_us() + extra_us,
            ways.to_gateway_us.get(self.pair, 0),
            self.free_back_us,
        )
        self.free_back_us = at_us
        ways.clock.call_at(at_us, lambda: self._arrive(item))

    def die(self, error: RequestError, extra_us: int) -> None:
        """The target's process is gone; the gateway notices some time later."""
        self.is_dead = self.ways.rng.random() < 0.5
        self.to_gateway(error, extra_us)

    def _arrive(self, item: Item) -> None:
        if self.is_dead and not isinstance(item, RequestError):
            return
        self.receive(self, item)
