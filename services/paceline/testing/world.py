"""What all simulated replicas share: scenario, clock, network, checker and the code under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from paceline.controller.registry import Registry
from paceline.engine.base import EngineInfo, StepItem, StepResult
from paceline.engine.toy import ToyEngine
from paceline.engine.toy_rules import ToyRow
from paceline.gateway.failover import Failover
from paceline.protocol.draft_session import DraftSession
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.target_session import TargetSession
from paceline.target.scheduler import Scheduler
from paceline.testing.clock import LocalClock, VirtualClock
from paceline.testing.faults import Fault
from paceline.testing.invariants import Checker
from paceline.testing.network import SimulatedNetwork
from paceline.testing.scenario import BLOCK_SIZE, MAX_MODEL_LEN, Scenario, engine_info

MAX_REMEMBERED = 1 << 16
MAX_CLOCK_OFFSET_US = 3_600_000_000


class RememberingToyEngine(ToyEngine):
    """Thousands of schedules meet the same contexts; each is sampled once in a process."""

    _tokens: ClassVar[dict[tuple[object, ...], int]] = {}  # a subclass needs its own
    _rows: ClassVar[dict[tuple[object, ...], list[float]]] = {}
    _ranked: ClassVar[dict[tuple[object, ...], tuple[tuple[int, ...], ...]]] = {}

    def __init__(
        self, info: EngineInfo, *, seed: int = 0, error_rate: float = 0.0, error_seed: int = 1
    ) -> None:
        super().__init__(info, seed=seed, error_rate=error_rate, error_seed=error_seed)
        self._law = (info.vocab_size, error_rate, error_seed)

    def _logits(self, state: int) -> list[float]:
        key = (state, self._law)
        logits = self._rows.get(key)
        if logits is None:
            if len(self._rows) >= MAX_REMEMBERED:
                self._rows.clear()
            logits = self._rows[key] = super()._logits(state)
        return logits

    def _sample(self, state: int, item: StepItem, offset: int) -> int:
        key = (state, item.output_index + offset, item.sampling, self._law)
        token_id = self._tokens.get(key)
        if token_id is None:
            if len(self._tokens) >= MAX_REMEMBERED:
                self._tokens.clear()
            token_id = self._tokens[key] = super()._sample(state, item, offset)
        return token_id

    def _runner_ups(self, item: StepItem, states: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        if len(states) != 1:
            return super()._runner_ups(item, states)
        key = (states[0], item.output_index, item.sampling, item.num_runner_ups, self._law)
        runner_ups = self._ranked.get(key)
        if runner_ups is None:
            if len(self._ranked) >= MAX_REMEMBERED:
                self._ranked.clear()
            runner_ups = self._ranked[key] = super()._runner_ups(item, states)
        return runner_ups


class NearMissToyEngine(RememberingToyEngine):
    """A draft's: in every second context that it gets wrong it takes the target's token for the
    next best one, and the target's next best for its own. (The toy's other errors have nothing to
    do with the target; laws, in the rejection modes, have only those.)"""

    _tokens: ClassVar[dict[tuple[object, ...], int]] = {}
    _rows: ClassVar[dict[tuple[object, ...], list[float]]] = {}
    _ranked: ClassVar[dict[tuple[object, ...], tuple[tuple[int, ...], ...]]] = {}

    def __init__(
        self, info: EngineInfo, *, seed: int = 0, error_rate: float = 0.0, error_seed: int = 1
    ) -> None:
        super().__init__(info, seed=seed, error_rate=error_rate, error_seed=error_seed)
        self._right = RememberingToyEngine(info, seed=seed)

    def _is_near(self, state: int) -> bool:
        return state % 2 == 0 and self._logits(state) != self._right._logits(state)

    def _row(self, state: int, item: StepItem, offset: int) -> ToyRow:
        row = super()._row(state, item, offset)
        if item.rule is None and self._is_near(state):
            return replace(row, logits=self._right._logits(state))
        return row

    def _sample(self, state: int, item: StepItem, offset: int) -> int:
        best = super()._sample(state, item, offset)
        if offset or not self._is_near(state):
            return best
        [others] = super()._runner_ups(replace(item, num_runner_ups=1), [state])
        return others[0] if others else best

    def _runner_ups(self, item: StepItem, states: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        ranked = super()._runner_ups(item, states)
        if len(states) != 1 or not ranked[0] or not self._is_near(states[0]):
            return ranked
        return ((super()._sample(states[0], item, 0), *ranked[0][1:]),)


@dataclass(frozen=True, slots=True)
class Parts:
    """The code under test. Teeth tests put a subclass with a planted bug in a place."""

    target_session: type[TargetSession] = TargetSession
    draft_session: type[DraftSession] = DraftSession
    draft_table: type[DraftTable] = DraftTable
    scheduler: type[Scheduler] = Scheduler
    target_engine: type[RememberingToyEngine] = RememberingToyEngine
    failover: type[Failover] = Failover
    registry: type[Registry] = Registry
    # The simulated gateway, target and draft: stand-ins for asyncio code. None: the usual ones.
    gateway: type[Any] | None = None
    target: type[Any] | None = None
    draft: type[Any] | None = None


@dataclass(frozen=True, slots=True)
class World:
    """What every replica shares."""

    scenario: Scenario
    clock: VirtualClock
    network: SimulatedNetwork
    checker: Checker
    parts: Parts
    rng: Random
    trace: list[tuple[object, ...]]

    def local_clock(self) -> LocalClock:
        """A new process's own."""
        skew = self.scenario.skew_permille
        if not skew:
            return LocalClock(self.clock)
        offset_us = self.rng.randrange(MAX_CLOCK_OFFSET_US)
        return LocalClock(self.clock, offset_us, 1000 + self.rng.randrange(-skew, skew + 1))

    def take_over(self, session: TargetSession) -> None:
        """A target has made it; where a planted bug gets in."""
        session.__class__ = self.parts.target_session
        session.max_untold = self.scenario.max_untold
        session.alternates.max_tokens = self.scenario.max_alternates

    def poison_of(self, gateway_id: int) -> int | None:
        """The output token that no target survives, if the gateway's request has one."""
        clients = self.scenario.clients
        return clients[gateway_id].poison_at if gateway_id < len(clients) else None

    def fire(self, fault: Fault) -> None:
        self.network.fired[fault] += 1
        self.note("fault", fault.value)

    def note(self, *event: object) -> None:
        self.trace.append((self.clock.now_us, *event))


class RecordingEngine:
    """A `ToyEngine` that remembers which tokens each cache was fed."""

    def __init__(self, engine: ToyEngine) -> None:
        self.engine = engine
        self.cached: dict[int, list[int]] = {}

    def run(self, released: Sequence[int], items: Sequence[StepItem]) -> list[StepResult]:
        for sequence_id in released:
            if self.cached.pop(sequence_id, None) is not None:
                self.engine.free(sequence_id)
        for item in items:
            if item.sequence_id not in self.cached:
                self.engine.add(item.sequence_id)
                self.cached[item.sequence_id] = []
        results = self.engine.step(items) if items else []
        for item in items:
            if item.fork_of is not None:
                self.cached[item.sequence_id] = self.cached[item.fork_of][: item.start]
        for item, result in zip(items, results, strict=True):
            cached = self.cached[item.sequence_id]
            end = item.start + len(item.token_ids)
            end = end if result.cached_len is None else result.cached_len
            del cached[item.start :]
            rows = item.token_ids
            if item.tree_parents:
                rows = (*rows[: -len(item.tree_parents)], *result.token_ids[:-1])
            cached += rows[: end - item.start]
        return results

    @property
    def num_free_blocks(self) -> int:
        return self.engine.stats().num_free_blocks


class Reference:
    """A target's model without cache, scheduler or history: each item is computed from nothing."""

    def __init__(self, engine_seed: int) -> None:
        info = engine_info("reference", 2 * MAX_MODEL_LEN // BLOCK_SIZE, MAX_MODEL_LEN)
        self._engine = ToyEngine(info, seed=engine_seed, enable_prefix_caching=False)

    def step(self, item: StepItem) -> StepResult:
        """An item that starts at position 0."""
        self._engine.add(item.sequence_id)
        [result] = self._engine.step([item])
        self._engine.free(item.sequence_id)
        return result
