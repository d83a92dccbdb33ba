"""Proposals on their way from a draft to the targets that are equally far from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from paceline.simulate.clock import Clock
from paceline.simulate.places import Ints, Places


@dataclass(frozen=True, slots=True)
class Delivery:
    """One draft step's proposals, with the length that each sequence's chain has then."""

    arrives_us: float
    places: Ints
    lengths: Ints
    chains: Ints
    branch_ends: Ints | None
    step_us: float


class Line:
    """One way, `delay_us` long; messages keep their order. `listeners` see what arrives just
    before it does; a target that waits is called at each arrival of its own."""

    def __init__(self, places: Places, clock: Clock, delay_us: float) -> None:
        self._places, self._clock = places, clock
        self.delay_us = delay_us
        self._under_way: deque[Delivery] = deque()
        self.listeners: list[Callable[[Delivery], None]] = []
        # By target: its places [from, to) and whom to call.
        self._waiting: dict[int, tuple[int, int, Callable[[float], None]]] = {}

    def ship(self, delivery: Delivery) -> None:
        self._under_way.append(delivery)
        for low, high, call in self._waiting.values():
            self._announce(delivery, low, high, call)

    def wait(self, target: int, low: int, high: int, call: Callable[[float], None]) -> None:
        """Call at each arrival for places [low, high), what is under way included."""
        self._waiting[target] = (low, high, call)
        for delivery in self._under_way:
            self._announce(delivery, low, high, call)

    def stop_waiting(self, target: int) -> None:
        self._waiting.pop(target, None)

    def _announce(
        self, delivery: Delivery, low: int, high: int, call: Callable[[float], None]
    ) -> None:
        if ((delivery.places >= low) & (delivery.places < high)).any():
            self._clock.at(delivery.arrives_us, call)

    def deliver(self, now_us: float) -> None:
        """Everything that has arrived by now is at its target."""
        under_way, places = self._under_way, self._places
        while under_way and under_way[0].arrives_us <= now_us:
            delivery = under_way.popleft()
            for listener in self.listeners:
                listener(delivery)
            index = delivery.places
            if delivery.branch_ends is None:
                places.arrived[index] = delivery.lengths
                places.arrived_chain[index] = delivery.chains
            else:
                self._deliver_branches(delivery, delivery.branch_ends)

    def _deliver_branches(self, delivery: Delivery, ends: Ints) -> None:
        """A branch may get here after the correction that it was made for."""
        places, index = self._places, delivery.places
        late = (delivery.chains == places.chain[index] - 1) & (ends > 0)
        places.arrived[index] = np.where(late, ends, delivery.lengths)
        places.arrived_chain[index] = delivery.chains + late
        places.branch_end[index] = np.where(late, 0, ends)
