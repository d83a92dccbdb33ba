"""A target and a draft in lock-step in one thread: the same scheduler, sessions and engines.

No network, no clock, no waiting: before each pass the draft proposes as much as it may, so every
window is as full as K allows. For exactness tests and for measuring acceptance; never for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.engine.base import Engine, StepItem, StepResult
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable
from paceline.protocol.messages import PROTOCOL_VERSION, Hello
from paceline.target.scheduler import PassPlan, Scheduler
from paceline.target.sequence import PassTimes

_LINK = 1
_TICK_US = 1000


@dataclass
class Run:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    deltas: list[RoundDelta] = field(default_factory=list)

    @property
    def num_draft_tokens(self) -> int:
        return sum(delta.num_draft_tokens for delta in self.deltas)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(delta.num_accepted_tokens for delta in self.deltas)


class Loopback:
    """`draft=None` runs the target alone through the same scheduler."""

    def __init__(
        self, target: Engine, draft: Engine | None, speculation: SpeculationConfig
    ) -> None:
        self._target = target
        self._draft = draft
        self._now_us = 0
        self._added: dict[int, set[int]] = {id(target): set(), id(draft): set()}
        # A lone sequence's wait needs a clock; here the window is full before each pass anyway.
        still = speculation.model_copy(update={"max_lone_wait_ms": 0.0})
        self.scheduler = Scheduler(target.info, TargetConfig(), still, RpcConfig())
        max_len = target.info.max_model_len if draft is None else draft.info.max_model_len
        self.table = DraftTable(max_sessions=1024, max_len=max_len, session_idle_us=1 << 60)
        if draft is not None:
            self.scheduler.drafts.attach(_LINK, _hello(draft))

    def run(self, requests: Sequence[GenerateRequest]) -> list[Run]:
        """All of them together, to their ends; results in order."""
        runs: dict[int, Run] = {}
        for request in requests:
            runs[self.scheduler.add(request, self._now_us)] = Run()
        while self.scheduler.num_running:
            self._now_us += _TICK_US
            self.propose()
            plan = self.scheduler.plan(self._now_us)
            if isinstance(plan, PassPlan):
                for session_id, delta in self.verify(plan):
                    runs[session_id].deltas.append(delta)
                    runs[session_id].token_ids.extend(delta.token_ids)
        self._deliver()
        self._free()
        return list(runs.values())

    def propose(self) -> None:
        """Draft passes until every sequence has reached its limit."""
        self._deliver()
        draft = self._draft
        while draft is not None and (items := self.table.begin_pass(1 << 20)):
            steps = [
                StepItem(
                    sequence_id=item.sequence_id,
                    start=item.work.start,
                    token_ids=item.work.token_ids,
                    num_samples=int(item.work.is_sampled),
                    sampling=item.sampling,
                    output_index=item.work.output_index,
                )
                for item in items
            ]
            results = [result.token_ids for result in self._step(draft, steps)]
            self.table.end_pass(items, [tokens[0] if tokens else None for tokens in results], 0)
            for drafts in self.table.take_drafts(self._now_us).values():
                for message in drafts:
                    self.scheduler.drafts.receive(_LINK, message, self._now_us)

    def verify(self, plan: PassPlan) -> list[tuple[int, RoundDelta]]:
        """One target pass."""
        self._free()
        results = self._step(self._target, plan.items)
        return self.scheduler.end_pass(plan, results, PassTimes(self._now_us, self._now_us))

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
        for sequence_id in self.scheduler.take_released():
            self._target.free(sequence_id)
        for sequence_id in self.table.take_released():
            if self._draft is not None:
                self._draft.free(sequence_id)


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
