"""What the simulator must agree with: the shipped scheduler and draft table on a virtual clock.

One target and one draft with scripted engines, token by token and message by message. Costs,
delays and traffic come from the same configuration that `Fleet` gets; nothing reads a real clock.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from paceline.config import RpcConfig, TargetConfig
from paceline.draft.steps import step_item, work_result
from paceline.engine.base import EngineInfo
from paceline.engine.scripted import Script, ScriptedEngine
from paceline.generation import GenerateRequest
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable, PassItem
from paceline.protocol.messages import PROTOCOL_VERSION, Hello
from paceline.sampling.params import SamplingParams
from paceline.simulate.config import SimulateConfig
from paceline.simulate.costs import PassCost
from paceline.target.passes import PassPlan
from paceline.target.scheduler import Scheduler
from paceline.target.sequence import PassTimes

LINK = 1
PROMPT_LEN = 16


class Reference:
    """`tokens_per_s` after `run`; lengths of answers are not simulated: they do not end."""

    def __init__(self, config: SimulateConfig) -> None:
        self.config = config
        (item,) = config.traffic.classes
        info = EngineInfo("scripted", 1 << 15, 1 << 20, 16, 1 << 20)
        target = TargetConfig(
            max_num_seqs=config.target_kind.max_num_seqs,
            max_rows_per_pass=config.target_kind.max_rows_per_pass,
        )
        self.scheduler = Scheduler(info, target, config.speculation, RpcConfig())
        self.target = ScriptedEngine(info)
        assert isinstance(item.acceptance, float)
        script = Script.steady(item.acceptance, item.runner_up)
        self.draft = ScriptedEngine(info, script)
        self.table = DraftTable(max_sessions=4096, max_len=1 << 20, session_idle_us=1 << 60)
        self.has_draft = config.fleet.num_drafts > 0
        self.delay_us = int(500 * config.network.rtt_ms)
        self.now_us = 0
        self.num_tokens = 0
        self.busy_us = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._num_due = 0
        self._in_pass = self._in_step = False
        self._ready_us = 0
        self._cost = PassCost(config.target_kind)
        self._known: dict[int, set[int]] = {0: set(), 1: set()}
        self._is_measured = False

    def run(self) -> float:
        """Tokens per second in the measured time."""
        config = self.config
        if self.has_draft:
            self.scheduler.drafts.attach(LINK, self._hello())
        for number in range(config.traffic.arrivals.sessions_per_target):
            prompt = (number + 1, *range(1, PROMPT_LEN))
            greedy = SamplingParams(temperature=0.0)
            request = GenerateRequest(str(number), prompt, 1 << 18, greedy, ignore_eos=True)
            self.scheduler.add(request, 0)
        self._wake_target()
        self._run_until(int(1e6 * config.warmup_s))
        self._is_measured = True
        self._run_until(self.now_us + int(1e6 * config.duration_s))
        return self.num_tokens / config.duration_s

    def _run_until(self, until_us: int) -> None:
        while self._due and self._due[0][0] <= until_us:
            self.now_us, _, action = heappop(self._due)
            action()
        self.now_us = until_us

    def _at(self, at_us: float, action: Callable[[], None]) -> None:
        self._num_due += 1
        heappush(self._due, (max(self.now_us, int(at_us)), self._num_due, action))

    def _hello(self) -> Hello:
        info = self.draft.info
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            boot_id="reference",
            replica_id="reference",
            model_id=info.model_id,
            vocab_size=info.vocab_size,
            tokenizer_hash="",
            max_model_len=info.max_model_len,
            max_sessions=4096,
            modes=SUPPORTED_MODES,
        )

    # -- the target -------------------------------------------------------------------------

    def _wake_target(self) -> None:
        if self._in_pass or self.now_us < self._ready_us:
            return
        self.scheduler.policy.learn_rtt(2.0 * self.delay_us)
        plan = self.scheduler.plan(self.now_us)
        self._flush()
        if not isinstance(plan, PassPlan):
            if plan.until_us is not None:
                self._at(plan.until_us, self._wake_target)
            return
        self._in_pass = True
        started_us = self.now_us
        self._add(0, self.target, [item.sequence_id for item in plan.items])
        num_before = self.target.stats().num_rows
        results = self.target.step(plan.items)
        num_rows = self.target.stats().num_rows - num_before
        num_decoding = sum(not entry.is_prefill for entry in plan.entries)
        ended_us = started_us + int(self._cost.us(num_rows, num_decoding))

        def end() -> None:
            times = PassTimes(started_us, ended_us)
            free_blocks = self.target.stats().num_free_blocks
            deltas = self.scheduler.end_pass(plan, results, times, free_blocks)
            if self._is_measured:
                self.num_tokens += sum(len(delta.token_ids) for _, delta in deltas)
                self.busy_us += ended_us - started_us
            self._in_pass = False
            self._flush()
            self._ready_us = self.now_us + int(1000 * self.config.target_kind.overhead_ms)
            self._at(self._ready_us, self._wake_target)

        self._at(ended_us, end)

    def _flush(self) -> None:
        for link_id, messages in self.scheduler.drafts.pool.take_outbox().items():
            for message in messages:

                def arrive(link_id: int = link_id, message: object = message) -> None:
                    answers = self.table.receive(link_id, message, self.now_us)
                    for answer in answers:
                        self._to_target(answer)
                    self._wake_draft()

                self._at(self.now_us + self.delay_us, arrive)

    # -- the draft --------------------------------------------------------------------------

    def _to_target(self, message: object) -> None:
        def arrive() -> None:
            self.scheduler.drafts.receive(LINK, message, self.now_us)  # type: ignore[arg-type]
            self._flush()
            self._wake_target()

        self._at(self.now_us + self.delay_us, arrive)

    def _wake_draft(self) -> None:
        if self._in_step or not self.has_draft:
            return
        items: list[PassItem] = self.table.begin_pass(1 << 20)
        for sequence_id in self.table.take_released():
            self.draft.free(sequence_id)
        if not items:
            return
        self._in_step = True
        steps = [step_item(item) for item in items]
        self._add(1, self.draft, [step.sequence_id for step in steps])
        num_before = self.draft.stats().num_rows
        results = self.draft.step(steps)
        num_rows = self.draft.stats().num_rows - num_before
        kind = self.config.draft_kind
        assert kind is not None
        step_us = int(1000 * (kind.base_ms + kind.row_ms * num_rows))

        def end() -> None:
            self.table.end_pass(items, [work_result(result) for result in results], step_us)
            self._in_step = False
            for drafts in self.table.take_drafts(self.now_us).values():
                for draft in drafts:
                    self._to_target(draft)
            self._wake_draft()

        self._at(self.now_us + step_us + int(1000 * kind.overhead_ms), end)

    def _add(self, side: int, engine: ScriptedEngine, sequence_ids: list[int]) -> None:
        for sequence_id in set(sequence_ids) - self._known[side]:
            engine.add(sequence_id)
        self._known[side].update(sequence_ids)
