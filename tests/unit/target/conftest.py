"""A scheduler with a toy engine and any number of toy drafts, driven by hand without a clock."""

from dataclasses import replace

import pytest

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.draft.steps import step_item, work_result
from paceline.engine.base import EngineInfo, OutOfBlocks
from paceline.engine.toy import ToyEngine
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable
from paceline.protocol.messages import Hello
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams
from paceline.target.scheduler import Hold, Scheduler
from paceline.target.sequence import PassTimes

INFO = EngineInfo("toy", vocab_size=64, max_model_len=512, block_size=16, num_blocks=64)
PASS_US = 500


class ToyDraft:
    """One draft replica: table and engine, one pass per call."""

    def __init__(self, error_rate, max_len, **table):
        info = EngineInfo("toy", INFO.vocab_size, max_len, 16, 1024)
        self.engine = ToyEngine(info, error_rate=error_rate)
        self.table = DraftTable(
            **{"max_sessions": 64, "session_idle_us": 10**12, **table}, max_len=max_len
        )
        self._known = set()

    def run_pass(self):
        items = self.table.begin_pass(10_000)
        for item in items:
            if item.sequence_id not in self._known:
                self._known.add(item.sequence_id)
                self.engine.add(item.sequence_id)
        results = self.engine.step([step_item(item) for item in items])
        self.table.end_pass(items, [work_result(r) for r in results], 100 * len(items))
        for sequence_id in self.table.take_released():
            self._known.discard(sequence_id)
            self.engine.free(sequence_id)


class PlantedError(Exception):
    """An engine's ordinary failure."""


class Rig:
    """`out` collects each sequence's tokens, `plans` every pass; `now` only moves when told."""

    def __init__(self, *, info=INFO, target=None, speculation=None, rpc=None):
        self.info = info
        self.engine = ToyEngine(info)
        self.scheduler = Scheduler(
            info,
            TargetConfig(**(target or {})),
            SpeculationConfig(
                **{"lookahead": "fixed", "max_lone_wait_ms": 0.0, **(speculation or {})}
            ),
            RpcConfig(**(rpc or {})),
        )
        self.desk = self.scheduler.drafts
        self.drafts = {}
        self.now = 0
        self.out = {}
        self.deltas = {}
        self.plans = []
        self.failed_plans = []
        self.ended = []  # (session id, error) of those that the target itself ended
        self.sent = []  # every message to a draft, as (link_id, message)
        self._known = set()

    # -- drafts -----------------------------------------------------------------------------

    def hello(self, link_id, *, modes=SUPPORTED_MODES, max_sessions=64, max_len=512):
        name = f"draft-{link_id}"
        return Hello(1, "boot", name, "toy", self.info.vocab_size, "", max_len, max_sessions, modes)

    def add_draft(self, link_id, *, error_rate=0.0, max_len=512, hello_sessions=64, **table):
        self.drafts[link_id] = ToyDraft(error_rate, max_len, **table)
        self.desk.attach(link_id, self.hello(link_id, max_sessions=hello_sessions, max_len=max_len))
        return self.drafts[link_id]

    def lose_draft(self, link_id):
        del self.drafts[link_id]
        self.desk.detach(link_id)

    def take_sent(self):
        """What the target has for its drafts, without delivering it."""
        sent = [(i, m) for i, ms in self.desk.pool.take_outbox().items() for m in ms]
        self.sent.extend(sent)
        return sent

    def deliver(self):
        for link_id, message in self.take_sent():
            if link_id in self.drafts:
                for answer in self.drafts[link_id].table.receive(link_id, message, self.now):
                    self.desk.receive(link_id, answer, self.now)

    def draft(self, num_passes):
        for _ in range(num_passes):
            self.deliver()
            for link_id, draft in self.drafts.items():
                draft.run_pass()
                for messages in draft.table.take_drafts(self.now).values():
                    for message in messages:
                        self.desk.receive(link_id, message, self.now)
        self.deliver()

    # -- requests ---------------------------------------------------------------------------

    def request(self, prompt=(1, 2, 3), max_tokens=20, *, seed=None, stop=(), **speculation):
        sampling = SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed or 0)
        asked = SpeculationRequest(**speculation)
        return GenerateRequest("r", tuple(prompt), max_tokens, sampling, stop, asked)

    def add(self, *args, **kwargs):
        return self.submit(self.request(*args, **kwargs))[0]

    def submit(self, request):
        """The session ids of a request's choices."""
        first = self.scheduler.add(request, self.now)
        session_ids = list(range(first, first + request.n))
        for session_id in session_ids:
            self.out[session_id], self.deltas[session_id] = [], []
        return session_ids

    def oracle(self, prompt, max_tokens, *, seed=None, stop=(), choice=0):
        """The target-only text, computed with no scheduler, cache or draft at all."""
        sampling = replace(self.request(seed=seed).sampling, choice=choice)
        tokens, end = list(prompt), min(len(prompt) + max_tokens, self.info.max_model_len)
        while len(tokens) < end:
            index = len(tokens) - len(prompt)
            tokens.append(coupled_token(self.engine.logits(tokens), sampling, index))
            if tokens[-1] in stop or tokens[-1] in self.info.eos_token_ids:
                break
        return tokens[len(prompt) :]

    # -- passes -----------------------------------------------------------------------------

    def free(self):
        for session_id in self.scheduler.take_released():
            self._known.discard(session_id)
            self.engine.free(session_id)
        self.scheduler.learn_free_blocks(self.engine.stats().num_free_blocks)

    def begin(self):
        """Plan a pass and run the engine; `end` applies the results.

        Plans that do not fit are made again, as the driver does it.
        """
        plan = self.scheduler.plan(self.now)
        if isinstance(plan, Hold):
            return plan, None
        self.free()
        for item in plan.items:
            if item.sequence_id not in self._known:
                self._known.add(item.sequence_id)
                self.engine.add(item.sequence_id)
        try:
            results = self.engine.step(plan.items)
        except OutOfBlocks:
            assert self.scheduler.make_room(plan)
            return self.begin()
        except PlantedError:
            self.ended += self.scheduler.fail_pass(plan)
            self.failed_plans.append(plan)
            return self.begin()
        self.plans.append(plan)
        return plan, results

    def end(self, plan, results):
        started, self.now = self.now, self.now + PASS_US
        times = PassTimes(started, self.now)
        num_free_blocks = self.engine.stats().num_free_blocks
        deltas = self.scheduler.end_pass(plan, results, times, num_free_blocks)
        for session_id, delta in deltas:
            self.out[session_id].extend(delta.token_ids)
            self.deltas[session_id].append(delta)
            sequence = self.scheduler._sequences.get(session_id)
            if sequence is not None:  # all but the newest token is cached
                cached = self.engine.cached_len(session_id)
                assert sequence.cached_len == sequence.session.committed_len - 1 <= cached
        self.free()
        return dict(deltas)

    def step(self):
        plan, results = self.begin()
        return plan if results is None else self.end(plan, results)

    def run(self, num_draft_passes=0):
        while self.scheduler.num_running or self.scheduler.num_waiting:
            self.draft(num_draft_passes)
            self.step()
        self.deliver()

    def check_clean(self):
        """Nothing is left of any sequence, on either side."""
        self.deliver()
        self.free()
        self.engine.check_integrity()
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.scheduler.num_free_blocks == self.info.num_blocks
        assert self.engine.stats().num_free_blocks == self.info.num_blocks
        assert self.engine.stats().num_sequences == 0
        assert not self.scheduler._sequences
        assert all(not link.sessions for link in self.desk.pool.links().values())
        for draft in self.drafts.values():
            draft.run_pass()
            assert len(draft.table) == 0
            assert draft.engine.stats().num_sequences == 0


@pytest.fixture
def make_rig():
    return Rig
