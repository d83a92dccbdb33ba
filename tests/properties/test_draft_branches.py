"""A draft with branches against one without, both on real (toy) engines, whatever happens.

The oracle: a proposal is a function of its context. So the main text of the one with branches is
the other's, or is further; everything that it says was sent was sent; and its engine holds nothing
but the sequences that it has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.draft.steps import step_item, work_result
from paceline.engine.base import EngineInfo, OutOfBlocks
from paceline.engine.toy import ToyEngine
from paceline.engine.toy_rules import ToyRow, best_tokens
from paceline.protocol.draft_session import DraftSession, WorkResult
from paceline.protocol.draft_table import DraftTable, PassItem
from paceline.protocol.messages import (
    CloseReason,
    CloseSession,
    DraftTokens,
    Nack,
    OpenSession,
    Verdict,
)
from paceline.protocol.token_log import TokenLog, extend_hash
from paceline.sampling.params import SamplingParams, VerificationMode

VOCAB_SIZE = 50
BLOCK_SIZE = 4
MAX_LEN = 160
MAX_TEXT, MAX_SHORT_TEXT = 120, 60  # beyond it a sequence ends
MAX_GROWTH = 15 + 12  # what one verdict may commit, and grant beyond
NUM_SESSIONS = 3
SESSIONS = range(NUM_SESSIONS)


class Draft:
    """A table and an engine, driven as `draft.driver` does it."""

    def __init__(self, num_blocks: int) -> None:
        info = EngineInfo("toy", VOCAB_SIZE, MAX_LEN, BLOCK_SIZE, num_blocks)
        self.engine = ToyEngine(info, seed=3)
        self.table = DraftTable(
            max_sessions=NUM_SESSIONS, max_len=MAX_LEN, session_idle_us=10**9, block_size=BLOCK_SIZE
        )
        self.known: set[int] = set()
        self.running: tuple[list[PassItem], list[WorkResult]] | None = None
        # epoch, position, hash of what is before -> token, of all that was sent
        self.sent: dict[tuple[int, int, int, int], int] = {}
        self.num_full = 0

    def session(self, session_id: int) -> DraftSession | None:
        return self.table.session((1, session_id))

    def begin_pass(self, max_rows: int) -> None:
        items = self.table.begin_pass(max_rows)
        self.free()
        for item in items:
            if item.sequence_id not in self.known:
                self.known.add(item.sequence_id)
                self.engine.add(item.sequence_id)
        try:
            results = self.engine.step([step_item(item) for item in items]) if items else []
        except OutOfBlocks:
            self.num_full += 1
            self.table.cancel_pass(items)
            assert self.table.evict_newest() is None, "there is room enough without branches"
            return
        self.running = (items, [work_result(result) for result in results])
        for item in items:
            session = self.session(item.key[1])
            assert session is not None
            text = session.text_of(item.sequence_id)
            assert text is not None
            cached = self.engine.cached_len(item.sequence_id)
            assert tuple(self.engine._pool.table(item.sequence_id).token_ids) == text[:cached]

    def end_pass(self) -> None:
        if self.running is None:
            return
        items, outcomes = self.running
        self.running = None
        self.table.end_pass(items, outcomes, 1)
        for drafts in self.table.take_drafts(0).values():
            for draft in drafts:
                self.note(draft)

    def note(self, draft: DraftTokens) -> None:
        session = self.session(draft.session_id)
        assert session is not None
        end = draft.start + len(draft.token_ids)
        assert session.committed_len <= draft.start < end <= session.limit_position
        assert draft.token_ids, "an empty message"
        before = draft.context_hash
        for position, token_id in enumerate(draft.token_ids, draft.start):
            self.sent[draft.session_id, draft.epoch, position, before] = token_id
            before = extend_hash(before, token_id)

    def free(self) -> None:
        for sequence_id in self.table.take_released():
            if sequence_id in self.known:
                self.known.discard(sequence_id)
                self.engine.free(sequence_id)


class World:
    """Two drafts that are told the same. `texts` are the committed ones."""

    def __init__(self, seed: int, num_blocks: int, is_roomy: bool = True) -> None:
        self.rng = random.Random(seed)
        # Where rows or blocks are short, passes go by in which only one of the two draws a token.
        self.is_roomy = is_roomy
        self.max_text = MAX_TEXT if is_roomy else MAX_SHORT_TEXT
        self.draft, self.plain = Draft(num_blocks), Draft(1024)
        self.sampling = [
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.9, seed=seed),
            SamplingParams(temperature=1.1, seed=seed + 1, top_k=3, presence_penalty=0.7),
        ]
        self.texts: dict[int, list[int]] = {}
        self.epochs = dict.fromkeys(SESSIONS, 0)
        self.rounds = dict.fromkeys(SESSIONS, 0)
        self.told: dict[int, int] = {}
        self.limits: dict[int, int] = {}
        self.known_best: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}

    def tell(self, message: OpenSession | Verdict | Nack | CloseSession) -> None:
        for answer in self.draft.table.receive(1, message, 0):
            assert not isinstance(answer, CloseSession), answer
        plain = message
        if isinstance(message, OpenSession | Verdict):
            plain = _without_branches(message)
        self.plain.table.receive(1, plain, 0)

    def open(self, session_id: int) -> None:
        self.epochs[session_id] += 1
        if session_id not in self.texts:
            prompt = [self.rng.randrange(VOCAB_SIZE) for _ in range(9)]
            self.texts[session_id] = prompt
        text = self.texts[session_id]
        self.told[session_id] = len(text)
        self.limits[session_id] = len(text) + self.rng.randint(0, 9)
        self.tell(
            OpenSession(
                session_id,
                self.epochs[session_id],
                9,
                tuple(text),
                self.sampling[session_id],
                VerificationMode.COUPLED if session_id else VerificationMode.GREEDY,
                self.limits[session_id],
                cache_salt=session_id,
                fan_out=self.rng.choice((0, 1, 2, 3)),
            )
        )

    def commit(self, session_id: int) -> None:
        """A few proposals are right, then comes a runner-up, or anything; and so once more."""
        text = self.texts[session_id]
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            for _ in range(self.rng.randint(0, 4)):
                text.append(self.best(session_id, text)[0])
            named = self.best(session_id, text)
            token_id = named[min(self.rng.choice((0, 1, 1, 1, 2, 3)), len(named) - 1)]
            text.append(self.rng.choice((token_id,) * 7 + (self.rng.randrange(VOCAB_SIZE),)))
        self.rounds[session_id] += 1
        if self.rng.random() < 0.2:
            return  # a draft that rests is told later
        start = self.told[session_id] - self.rng.choice((0, 0, 0, 2))
        start = max(start, 9)
        limit = len(text) + self.rng.choice((0, 3, 7, 9, 9, 12))
        self.limits[session_id] = max(self.limits[session_id], limit)
        self.told[session_id] = len(text)
        self.tell(
            Verdict(
                session_id,
                self.epochs[session_id],
                start,
                tuple(text[start:]),
                0,
                self.limits[session_id],
                self.rounds[session_id],
                fan_out=self.rng.choice((0, 1, 1, 2, 2, 2, 3)),
            )
        )

    def nack(self, session_id: int) -> None:
        session = self.draft.session(session_id)
        if session is not None:
            have_len = self.rng.randint(session.committed_len, len(session.log))
            self.tell(Nack(session_id, self.epochs[session_id], have_len))

    def close(self, session_id: int) -> None:
        self.texts.pop(session_id, None)
        self.tell(CloseSession(session_id, self.epochs[session_id], CloseReason.FINISHED))

    def best(self, session_id: int, text: Sequence[int]) -> tuple[int, ...]:
        """What the draft's model has for the token after `text`, best first."""
        key = (session_id, tuple(text))
        if key not in self.known_best:
            logits = self.draft.engine.logits(text)
            histories = (key[1][:9], key[1][9:])
            row = ToyRow(logits, self.sampling[session_id], len(text) - 9, *histories)
            self.known_best[key] = best_tokens(row, 4)
        return self.known_best[key]

    def act(self) -> None:
        session_id = self.rng.choice(SESSIONS)
        session = self.draft.session(session_id)
        if session is None:
            self.open(session_id)
            return
        match self.rng.randrange(12):
            case 0 if self.rng.random() < 0.15:
                self.open(session_id)
            case 1 | 4 if len(self.texts[session_id]) < self.max_text:
                self.commit(session_id)
            case 1:
                self.close(session_id)
            case 2:
                self.nack(session_id)
            case 3 if self.rng.random() < 0.05:
                self.close(session_id)
            case 5 if self.rng.random() < 0.02:
                self.texts.clear()
                for draft in (self.draft, self.plain):
                    draft.table.lose_link(1)
            case _:
                max_rows = 512 if self.is_roomy else self.rng.choice((3, 8, 30, 512))
                for draft in (self.draft, self.plain):
                    if draft.running is None:
                        draft.begin_pass(max_rows)
                    else:
                        draft.end_pass()

    def check(self) -> None:
        for session_id in SESSIONS:
            session, plain = self.draft.session(session_id), self.plain.session(session_id)
            assert (session is None) == (plain is None)
            if session is None or plain is None:
                continue
            text = session.log.slice(0)
            assert session.committed_len == plain.committed_len
            assert len(text) <= max(session.committed_len, session.limit_position)
            if self.is_roomy:
                assert text[: len(plain.log)] == plain.log.slice(0)
            self.check_texts(session_id, session)
            for position in range(session.committed_len, session.sent_len):
                key = (session_id, session.epoch, position, session.log.hash_at(position))
                assert self.draft.sent[key] == text[position], "said to be sent, and was not"

    def check_texts(self, session_id: int, session: DraftSession) -> None:
        """Every proposal is what the model has for its context, a branch's first is next to it."""
        text = session.log.slice(0)
        for position in range(session.committed_len, len(text)):
            assert text[position] == self.best(session_id, text[:position])[0]
        for branch in session.branches.live:
            context = text[: branch.position]
            assert branch.position >= session.committed_len
            assert branch.token_ids[0] == self.best(session_id, context)[1 + branch.rank]
            assert branch.hashes[-1] == TokenLog(branch.text(session.log)).hash_at(branch.end)
            whole = (*context, *branch.token_ids)
            for position in range(branch.position + 1, branch.end):
                assert whole[position] == self.best(session_id, whole[:position])[0]

    def check_leaks(self) -> None:
        self.draft.free()
        engine, table = self.draft.engine, self.draft.table
        engine.check_integrity()
        assert self.draft.known <= set(table.sequences())
        assert engine.stats().num_sequences == len(self.draft.known)

    def end(self) -> None:
        """Everything goes; amid a pass, if one is under way."""
        self.draft.table.lose_link(1)
        self.draft.end_pass()
        self.check_leaks()
        stats = self.draft.engine.stats()
        assert stats.num_sequences == 0
        assert stats.num_free_blocks == self.draft.engine.info.num_blocks


def _without_branches(message: OpenSession | Verdict) -> OpenSession | Verdict:
    fields = {name: getattr(message, name) for name in message.__slots__}
    return type(message)(**{**fields, "fan_out": 0})


def run(seed: int, num_blocks: int, num_acts: int, *, is_roomy: bool) -> World:
    world = World(seed, num_blocks, is_roomy)
    for session_id in SESSIONS:
        world.open(session_id)
    for index in range(num_acts):
        world.act()
        world.check()
        if index % 25 == 0:
            world.check_leaks()
    return world


@pytest.mark.parametrize("seed", range(8))
def test_proposals_are_those_of_a_draft_without_branches(seed: int) -> None:
    world = run(seed, 1024, 300, is_roomy=True)
    stats = world.draft.table.stats
    assert stats.num_promoted > 3
    assert stats.num_branch_tokens > 50
    world.end()


@pytest.mark.parametrize("seed", range(4))
def test_rows_and_blocks_for_little_more_than_the_main_texts(seed: int) -> None:
    """Branches are given up whenever the cache is full; no sequence is."""
    num_blocks = NUM_SESSIONS * -(-(MAX_SHORT_TEXT + MAX_GROWTH) // BLOCK_SIZE)
    world = run(seed, num_blocks, 400, is_roomy=False)
    assert world.draft.num_full > 0
    assert world.draft.table.stats.num_branch_tokens > 50
    assert world.draft.table.stats.num_evicted == 0
    world.end()


def test_branches_help() -> None:
    """One sequence whose corrections are first runner-ups: proposals are there at once."""
    lengths = []
    for fan_out in (0, 1):
        world = World(5, 1024)
        world.texts[0] = list(range(9))
        draft = world.draft
        greedy = world.sampling[0]
        draft.table.receive(
            1,
            OpenSession(0, 1, 9, tuple(range(9)), greedy, VerificationMode.GREEDY, 18, 0, fan_out),
            0,
        )
        num_held = 0
        for round in range(1, 20):
            for _ in range(9):
                draft.begin_pass(512)
                draft.end_pass()
            text = world.texts[0]
            start = len(text)
            text += [world.best(0, text)[0]]
            text += [world.best(0, text)[1]]
            limit = len(text) + 9
            message = Verdict(0, 1, start, tuple(text[start:]), 1, limit, round, fan_out=fan_out)
            draft.table.receive(1, message, 0)
            session = draft.session(0)
            assert session is not None
            num_held += len(session.log) - session.committed_len
        lengths.append(num_held)
    assert lengths[0] == 0
    assert lengths[1] >= 4 * 19
