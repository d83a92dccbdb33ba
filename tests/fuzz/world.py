"""A live target with sequences in flight and two live drafts: what fuzzed messages run into.

Everything is real but the bytes between them: scheduler, desk, tables, toy engines. Whatever a
message is, the texts must stay those of the target alone, byte for byte (greedy and coupled), and
nothing may grow. Time is a number that `tick` moves.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from paceline.config import RpcConfig, SpeculationConfig, TargetConfig
from paceline.draft.steps import step_item, work_result
from paceline.engine.base import EngineInfo, OutOfBlocks
from paceline.engine.toy import ToyEngine
from paceline.generation import GenerateRequest, SpeculationRequest
from paceline.protocol.draft_table import SUPPORTED_MODES, DraftTable
from paceline.protocol.messages import DraftMessage, Hello, TargetMessage
from paceline.sampling.acceptance import coupled_token
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.target.round_clock import MAX_ROUND_ARRIVALS
from paceline.target.scheduler import Hold, PassPlan, Scheduler
from paceline.target.sequence import PassTimes

VOCAB_SIZE = 64
INFO = EngineInfo("toy", VOCAB_SIZE, max_model_len=160, block_size=16, num_blocks=48)
RPC = RpcConfig(
    max_message_bytes=64 << 10,
    max_tokens_per_item=16_384,
    redial_min_s=0.001,
    redial_max_s=0.01,
    open_timeout_s=0.5,
    breaker_failures=12,
    breaker_min_s=0.02,
    breaker_max_s=0.1,
    stall_timeout_s=60.0,
    ping_interval_s=600.0,
    peer_timeout_s=3600.0,
)
NUM_TEXTS = 24
NUM_RUNNING = 5
TICK_US = 20_000
DRAFT_MAX_LEN = 96
DRAFT_SESSIONS = 12
# A message of ours to a draft about each of its sequences, several times over; the stream of a
# real draft holds rpc.max_outbox_messages.
MAX_OUTBOX = 2048


def _request(number: int) -> GenerateRequest:
    """One of `NUM_TEXTS` requests; every fifth is in a rejection mode."""
    rng = random.Random(number)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 17, 40))))
    mode = None
    temperature = rng.choice((0.0, 0.7, 1.0))
    if number % 5 == 4:
        mode = rng.choice((VerificationMode.REJECTION, VerificationMode.BLOCK))
        temperature = 1.0
    return GenerateRequest(
        f"r{number}",
        prompt,
        rng.randrange(8, 60),
        SamplingParams(temperature=temperature, seed=number),
        (rng.randrange(VOCAB_SIZE),),
        SpeculationRequest(mode=mode),
    )


@cache
def oracle(number: int) -> tuple[int, ...]:
    """The text of the target alone: no scheduler, no cache, no draft."""
    request, engine = _request(number), ToyEngine(INFO)
    tokens = list(request.prompt_token_ids)
    for index in range(request.max_tokens):
        tokens.append(coupled_token(engine.logits(tokens), request.sampling, index))
        if tokens[-1] in request.stop_token_ids:
            break
    return tuple(tokens[len(request.prompt_token_ids) :])


@dataclass
class Draft:
    """One draft replica. `link_id` is the target's name for its stream."""

    link_id: int
    table: DraftTable
    engine: ToyEngine
    known: set[int] = field(default_factory=set)

    def run_pass(self) -> None:
        """As the driver does it: what does not fit costs a sequence, anything else is a bug."""
        items = self.table.begin_pass(256)
        for sequence_id in self.table.take_released():
            if sequence_id in self.known:
                self.known.discard(sequence_id)
                self.engine.free(sequence_id)
        for item in items:
            if item.sequence_id not in self.known:
                self.known.add(item.sequence_id)
                self.engine.add(item.sequence_id)
        if not items:
            return
        try:
            results = self.engine.step([step_item(item) for item in items])
        except OutOfBlocks:
            self.table.cancel_pass(items)
            self.table.evict_newest()
            return
        self.table.end_pass(items, [work_result(result) for result in results], 100)


@dataclass
class Flight:
    """One sequence under way: its number in the catalogue, and what it has written."""

    number: int
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False


class World:
    """`seen` counts by kind of message what both sides acted on."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_us = 1_000_000
        self.seen: Counter[str] = Counter()
        self.engine = ToyEngine(INFO)
        self.scheduler = Scheduler(
            INFO,
            TargetConfig(max_num_seqs=NUM_RUNNING),
            SpeculationConfig(max_lone_wait_ms=0.0),
            RPC,
        )
        self.desk = self.scheduler.drafts
        self.drafts: dict[int, Draft] = {}
        self.flights: dict[int, Flight] = {}
        self.num_finished = 0
        self.num_closed_streams = 0
        self._known: set[int] = set()
        self._next_link_id = 1
        for _ in range(2):
            self.dial()

    # -- links ------------------------------------------------------------------------------

    def dial(self) -> Draft:
        """A draft that has just started."""
        link_id, self._next_link_id = self._next_link_id, self._next_link_id + 1
        rate = self.rng.choice((0.0, 0.2))
        info = EngineInfo("toy", VOCAB_SIZE, DRAFT_MAX_LEN, 16, 40)
        table = DraftTable(DRAFT_SESSIONS, DRAFT_MAX_LEN, 10**12, num_blocks=40, block_size=16)
        draft = Draft(link_id, table, ToyEngine(info, error_rate=rate))
        name = f"draft-{link_id}"
        hello = Hello(
            1, "boot", name, "toy", VOCAB_SIZE, "", DRAFT_MAX_LEN, DRAFT_SESSIONS, SUPPORTED_MODES
        )
        self.drafts[link_id] = draft
        self.desk.attach(link_id, hello)
        return draft

    def hang_up(self, link_id: int) -> None:
        """The stream of a draft is over; another draft dials."""
        del self.drafts[link_id]
        self.desk.detach(link_id)
        self.num_closed_streams += 1
        self.dial()

    # -- messages ---------------------------------------------------------------------------

    def tell_target(self, link_id: int, messages: list[DraftMessage]) -> None:
        for message in messages:
            self.seen[type(message).__name__] += 1
            self.desk.receive(link_id, message, self.now_us)

    def tell_draft(self, link_id: int, messages: list[TargetMessage]) -> list[DraftMessage]:
        answers: list[DraftMessage] = []
        for message in messages:
            self.seen[type(message).__name__] += 1
            answers += self.drafts[link_id].table.receive(link_id, message, self.now_us)
        return answers

    def take_outbox(self) -> dict[int, list[TargetMessage]]:
        return self.desk.pool.take_outbox()

    def hints(self) -> dict[str, list[int]]:
        """What a peer with a perfect view would lie about."""
        hints: dict[str, list[int]] = {name: [] for name in ("session_id", "epoch", "start")}
        hashes, rounds = [], []
        for session_id in self.flights:
            sequence = self.scheduler._sequences.get(session_id)
            if sequence is None:
                continue
            session = sequence.session
            hints["session_id"].append(session_id)
            hints["epoch"].append(session.epoch)
            hints["start"] += [session.committed_len, len(session.log), session.prompt_len]
            hashes += [session.log.hash_at(len(session.log)), session.log.hash_at(1)]
            rounds.append(session.round)
        hints["have_len"] = hints["limit_position"] = hints["prompt_len"] = hints["start"]
        hints["context_hash"], hints["last_round"], hints["round"] = hashes, rounds, rounds
        for name in ("token_ids", "stop_token_ids", "logit_bias_token_ids"):
            hints[name] = [1, 5, 17, 33, 62]
        hints["weights"] = [65536, 32768, 1]
        return hints

    # -- passes -----------------------------------------------------------------------------

    def fill(self) -> None:
        """Keep sequences in flight."""
        while self.scheduler.num_running + self.scheduler.num_waiting < NUM_RUNNING:
            number = self.rng.randrange(NUM_TEXTS)
            session_id = self.scheduler.add(_request(number), self.now_us)
            self.flights[session_id] = Flight(number)

    def draft_pass(self) -> dict[int, list[DraftMessage]]:
        """A few passes of every draft, so that it gets ahead; returns what they have to say."""
        said: dict[int, list[DraftMessage]] = {}
        for link_id, draft in self.drafts.items():
            for _ in range(self.rng.choice((1, 3, 6))):
                draft.run_pass()
            said[link_id] = [*draft.table.take_drafts(self.now_us).get(link_id, [])]
        return said

    def tick(self) -> None:
        """One target pass, and every promise checked."""
        self.now_us += TICK_US
        plan = self.scheduler.plan(self.now_us)
        if not isinstance(plan, Hold):
            self._run(plan)
        for link_id in self.desk.pool.take_outlaws():
            self.hang_up(link_id)
        for link_id, link in list(self.desk.pool.links().items()):
            if link.is_draining and self.rng.random() < 0.3:
                self.hang_up(link_id)  # else all would soon be idle
        self._check_bounds()

    def _run(self, plan: PassPlan) -> None:
        self._free()
        for item in plan.items:
            if item.sequence_id not in self._known:
                self._known.add(item.sequence_id)
                self.engine.add(item.sequence_id)
        try:
            results = self.engine.step(plan.items)
        except OutOfBlocks:
            assert self.scheduler.make_room(plan)
            return
        started_us, self.now_us = self.now_us, self.now_us + 500
        free = self.engine.stats().num_free_blocks
        times = PassTimes(started_us, self.now_us)
        for session_id, delta in self.scheduler.end_pass(plan, results, times, free):
            self._receive(session_id, delta)
        self._free()

    def _free(self) -> None:
        for session_id in self.scheduler.take_released():
            self._known.discard(session_id)
            self.engine.free(session_id)
        self.scheduler.learn_free_blocks(self.engine.stats().num_free_blocks)

    def _receive(self, session_id: int, delta: Any) -> None:
        flight = self.flights[session_id]
        flight.tokens += delta.token_ids
        request, text = _request(flight.number), oracle(flight.number)
        if request.speculation.mode is None:
            got = tuple(flight.tokens)
            assert got == text[: len(got)], f"text {flight.number} changed: {got} is not {text}"
        if delta.finish_reason is None:
            return
        is_stopped = flight.tokens[-1] in request.stop_token_ids
        assert delta.finish_reason == ("stop" if is_stopped else "length")
        assert is_stopped or len(flight.tokens) == request.max_tokens
        if request.speculation.mode is None:
            assert len(flight.tokens) == len(text), f"text {flight.number} ended early"
        del self.flights[session_id]
        self.num_finished += 1

    # -- promises ---------------------------------------------------------------------------

    def _check_bounds(self) -> None:
        for link in self.desk.pool.links().values():
            assert len(link.outbox) <= MAX_OUTBOX, "the outbox of a draft grows"
            assert len(link.sessions) <= NUM_RUNNING
        for sequence in self.scheduler._sequences.values():
            assert sequence.session.window_len <= 16
            assert len(sequence.clock._arrivals) <= MAX_ROUND_ARRIVALS, "arrivals grow"
        for draft in self.drafts.values():
            assert len(draft.table) <= DRAFT_SESSIONS, "the sessions of a draft grow"
            for session in _sessions(draft.table):
                assert len(session.log) <= DRAFT_MAX_LEN, "the text of a draft's session grows"

    def finish(self) -> None:
        """Let everything end without a word from anybody; nothing may be left."""
        for _ in range(100_000):
            if not self.scheduler.num_running + self.scheduler.num_waiting:
                break
            self.take_outbox()
            self.tick()
        assert not self.flights, f"{len(self.flights)} sequences never ended"
        self._free()
        self.engine.check_integrity()
        assert self.engine.stats().num_sequences == 0
        assert self.engine.stats().num_free_blocks == INFO.num_blocks
        assert not self.scheduler._sequences
        assert all(not link.sessions for link in self.desk.pool.links().values())
        for draft in self.drafts.values():
            draft.table.lose_link(draft.link_id)
            draft.run_pass()
            draft.engine.check_integrity()
            assert draft.engine.stats().num_sequences == 0


def _sessions(table: DraftTable) -> list[Any]:
    return [entry.session for entry in table._entries.values()]
