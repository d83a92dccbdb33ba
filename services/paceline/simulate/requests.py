"""Requests come: from clients that ask again, at random, or from a trace; and go to a target.

Routing is Ray Serve's: of two targets picked at random, the one with less to do. Clients of
`sessions_per_target` stay with theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from paceline.simulate.clock import Clock
from paceline.simulate.config import SimulateConfig
from paceline.simulate.draws import draw_length
from paceline.simulate.load import TraceRow
from paceline.simulate.metrics import Metrics
from paceline.simulate.target import Request, SimTarget

_S = 1e6
RETRY_US = _S  # a client that was refused asks again


class Requests:
    """All clients. Every request that was made runs, waits, has ended or was refused."""

    def __init__(
        self, config: SimulateConfig, clock: Clock, metrics: Metrics, trace: Sequence[TraceRow]
    ) -> None:
        self._classes = config.traffic.classes
        self._arrivals = config.traffic.arrivals
        self._clock, self._metrics = clock, metrics
        self._random = Random(config.seed)
        self._shares = [item.share for item in self._classes]
        self._trace = iter(trace)
        self._class_ids = {item.name: index for index, item in enumerate(self._classes)}
        self._targets: list[SimTarget] = []
        self.num_made = self.num_ended = self.num_refused = 0
        self.ended_tokens = 0  # of all answers that have ended

    def start(self, targets: list[SimTarget]) -> None:
        self._targets = targets
        arrivals = self._arrivals
        if arrivals.process == "poisson":
            self._next_random(0.0)
        elif arrivals.process == "trace":
            self._next_of_trace(0.0)
        elif arrivals.sessions_per_target:
            for target in targets:
                for _ in range(arrivals.sessions_per_target):
                    self._ask(0.0, target, is_new=True)
        else:
            for _ in range(arrivals.sessions):
                self._ask(0.0, None, is_new=True)

    def ended(self, now_us: float, request: Request, target: SimTarget) -> None:
        """Its client, if it has one, asks again."""
        self.num_ended += 1
        self.ended_tokens += request.output_tokens
        if request.is_from_client:
            home = target if self._arrivals.sessions_per_target else None
            due_us = now_us + _S * self._arrivals.think_s
            self._clock.at(due_us, lambda time_us: self._ask(time_us, home))

    def _make(self, now_us: float, is_new: bool) -> Request:
        (class_id,) = self._random.choices(range(len(self._classes)), self._shares)
        item = self._classes[class_id]
        output = draw_length(item.output_tokens, self._random)
        if is_new:
            # As if it had begun before: else all that begin together would end together.
            output = self._random.randint(1, output)
        prompt = draw_length(item.prompt_tokens, self._random)
        is_from_client = self._arrivals.process == "closed"
        return Request(now_us, prompt, output, class_id, is_from_client)

    def _ask(self, now_us: float, home: SimTarget | None, is_new: bool = False) -> None:
        self._send(now_us, self._make(now_us, is_new), home)

    def _send(self, now_us: float, request: Request, home: SimTarget | None) -> None:
        self.num_made += 1
        target = home or self._choose()
        if target.add(request, now_us):
            return
        self.num_refused += 1
        self._metrics.num_refused += self._metrics.is_measured(now_us)
        if request.is_from_client:
            self._clock.at(now_us + RETRY_US, lambda time_us: self._ask(time_us, home))

    def _choose(self) -> SimTarget:
        first, second = (self._random.randrange(len(self._targets)) for _ in range(2))
        pair = (self._targets[first], self._targets[second])
        return min(pair, key=lambda target: target.num_ongoing)

    def _next_random(self, now_us: float) -> None:
        gap_us = self._random.expovariate(self._arrivals.requests_per_s) * _S
        self._clock.at(now_us + gap_us, self._random_arrival)

    def _random_arrival(self, now_us: float) -> None:
        self._ask(now_us, None)
        self._next_random(now_us)

    def _next_of_trace(self, now_us: float) -> None:
        row = next(self._trace, None)
        if row is None:
            return
        due_us = _S * row.time_s
        request = Request(
            due_us, row.prompt_tokens, row.output_tokens, self._class_ids[row.class_name]
        )

        def arrive(time_us: float) -> None:
            self._send(time_us, request, None)
            self._next_of_trace(time_us)

        self._clock.at(due_us, arrive)
