"""A target and a draft in lock-step in one thread: the same scheduler, sessions and engines.

No network, no clock, no waiting: before each pass the draft proposes as much as it may, branches
included, so every window is as full as K allows. K is the configuration's fixed one: nothing can
be measured here that an adaptive one could go by. For exactness tests and for measuring
acceptance; never for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.draft.steps import step_item, work_result
from paceline.engine.base import Engine, OutOfBlocks, StepItem, StepResult
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable, PassItem
from paceline.protocol.lookahead import Grant, LookaheadPolicy, SequenceLookahead
from paceline.protocol.messages import PROTOCOL_VERSION, Hello
from paceline.target.scheduler import PassPlan, Scheduler
from paceline.target.sequence import PassTimes

_LINK = 1
_TICK_US = 1000


@dataclass
class Run:
    """What one request got: the deltas of all its choices in the order in which they came."""

    deltas: list[RoundDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        """Of choice 0."""
        return self.text(0)

    @property
    def num_draft_tokens(self) -> int:
        return sum(delta.num_draft_tokens for delta in self.deltas)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(delta.num_accepted_tokens for delta in self.deltas)

    def of(self, choice: int) -> list[RoundDelta]:
        return [delta for delta in self.deltas if delta.choice == choice]

    def text(self, choice: int) -> list[int]:
        return [token_id for delta in self.of(choice) for token_id in delta.token_ids]


class _Granting(LookaheadPolicy):
    """K as configured, with branches for so many runner-ups."""

    fan_out = 0

    def grant(self, lookahead: SequenceLookahead) -> Grant:
        return replace(super().grant(lookahead), fan_out=self.fan_out)


class Loopback:
    """`draft=None` runs the target alone through the same scheduler. `fan_out`: runner-ups of each
    proposal for which the draft prepares a branch."""

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        speculation: SpeculationConfig,
        config: TargetConfig | None = None,
        fan_out: int = 0,
    ) -> None:
        self._target = target
        self._draft = draft
        self._now_us = 0
        self._added: dict[int, set[int]] = {id(target): set(), id(draft): set()}
        # A lone sequence's wait needs a clock; here the window is full before each pass anyway.
        still = speculation.model_copy(update={"max_lone_wait_ms": 0.0, "lookahead": "fixed"})
        self.scheduler = Scheduler(target.info, config or TargetConfig(), still, RpcConfig())
        if fan_out:
            policy = _Granting(self.scheduler.policy.limits)
            policy.fan_out = fan_out
            self.scheduler.policy = self.scheduler.drafts._policy = policy
            self.scheduler.local.policy = policy
        info = target.info if draft is None else draft.info
        self.table = DraftTable(
            max_sessions=1024,
            max_len=info.max_model_len,
            session_idle_us=1 << 60,
            block_size=info.block_size,
        )
        self._runs: dict[int, Run] = {}
        if draft is not None:
            self.scheduler.drafts.attach(_LINK, _hello(draft))

    def run(self, requests: Sequence[GenerateRequest]) -> list[Run]:
        """All of them together, to their ends; results in order."""
        runs = [self.add(request)[1] for request in requests]
        while self.step():
            pass
        self._runs.clear()
        return runs

    def add(self, request: GenerateRequest) -> tuple[range, Run]:
        """Queue a request: the session ids of its choices, and what will become of it."""
        first = self.scheduler.add(request, self._now_us)
        session_ids, run = range(first, first + request.n), Run()
        self._runs.update((session_id, run) for session_id in session_ids)
        return session_ids, run

    def step(self, during: Callable[[], None] = lambda: None) -> bool:
        """One round of all; False when nothing is left. `during` is called amid the pass."""
        self._now_us += _TICK_US
        self.propose()
        plan = self.scheduler.plan(self._now_us)
        if not isinstance(plan, PassPlan):
            self._deliver()
            self._free()
            return False
        for session_id, delta in self.verify(plan, during):
            self._runs[session_id].deltas.append(delta)
        return True

    def propose(self) -> None:
        """Draft passes until every sequence has reached its limit."""
        self._deliver()
        while self._draft is not None and (items := self.table.begin_pass(1 << 20)):
            self._free()
            self._draft_pass(self._draft, items)

    def _draft_pass(self, draft: Engine, items: list[PassItem]) -> None:
        try:
            results = self._step(draft, [step_item(item) for item in items])
        except OutOfBlocks:
            self.table.cancel_pass(items)
            evicted = self.table.evict_newest()
            if evicted is not None:
                self.scheduler.drafts.receive(*evicted, self._now_us)
            return
        self.table.end_pass(items, [work_result(result) for result in results], 0)
        for drafts in self.table.take_drafts(self._now_us).values():
            for message in drafts:
                self.scheduler.drafts.receive(_LINK, message, self._now_us)

    def verify(
        self, plan: PassPlan, during: Callable[[], None] = lambda: None
    ) -> list[tuple[int, RoundDelta]]:
        """One target pass; nothing when there was no room for it and the next asks for less."""
        self._free()
        try:
            results = self._step(self._target, plan.items)
        except OutOfBlocks:
            if not self.scheduler.make_room(plan):
                raise
            return []
        during()
        num_free_blocks = self._target.stats().num_free_blocks
        times = PassTimes(self._now_us, self._now_us)
        return self.scheduler.end_pass(plan, results, times, num_free_blocks)

    def _step(self, engine: Engine, items: Sequence[StepItem]) -> list[StepResult]:
        known = self._added[id(engine)]
        for item in items:
            if item.sequence_id not in known:
                engine.add(item.sequence_id)
                known.add(item.sequence_id)
        return engine.step(items)

    def _deliver(self) -> None:
        for link_id, messages in self.scheduler.drafts.pool.take_outbox().items():
            for message in messages:
                for answer in self.table.receive(link_id, message, self._now_us):
                    self.scheduler.drafts.receive(link_id, answer, self._now_us)

    def _free(self) -> None:
        self._release(self._target, self.scheduler.take_released())
        if self._draft is not None:
            self._release(self._draft, self.table.take_released())
        self.scheduler.learn_free_blocks(self._target.stats().num_free_blocks)

    def _release(self, engine: Engine, released: Sequence[int]) -> None:
        for sequence_id in released:
            self._added[id(engine)].discard(sequence_id)
            engine.free(sequence_id)


def _hello(draft: Engine) -> Hello:
    info = draft.info
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        boot_id="loopback",
        replica_id="loopback",
        model_id=info.model_id,
        vocab_size=info.vocab_size,
        tokenizer_hash=info.tokenizer_hash,
        max_model_len=info.max_model_len,
        max_sessions=1024,
        modes=SUPPORTED_MODES,
    )
