"""Many sequences, one draft: while a pass verifies, every correction that can be foreseen gets a
branch that fills the next pass. Scripted engines; steps are counted, not timed."""

from __future__ import annotations

import random

from paceline.draft.steps import step_item, work_result
from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.scripted import Script, ScriptedEngine
from paceline.protocol.draft_table import MAX_BRANCH_ROWS, DraftTable
from paceline.protocol.messages import OpenSession, Verdict
from paceline.sampling.params import SamplingParams, VerificationMode

NUM_SEQUENCES = 32
K = 4
STEPS_PER_PASS = 8
CREDIT = 2 * K + 1
INFO = EngineInfo("scripted", 5000, 1024, 16, 100_000)
GREEDY = SamplingParams(temperature=0.0)


class Pair:
    """A draft that is right three times in four; `corrections` are those of the measured passes:
    how many tokens were sent behind each, None where it was not foreseen."""

    def __init__(self) -> None:
        self.target = ScriptedEngine(INFO)
        self.draft = ScriptedEngine(INFO, Script.steady(0.75, (0.5, 0.66)))
        self.table = DraftTable(NUM_SEQUENCES, INFO.max_model_len, session_idle_us=10**9)
        self.known: set[int] = set()
        self.num_messages = 0
        self.corrections: list[int | None] = []
        rng = random.Random(3)
        self.texts: list[list[int]] = []
        for session_id in range(NUM_SEQUENCES):
            prompt = tuple(rng.choices(range(5000), k=rng.randint(100, 200)))
            self.texts.append(list(prompt))
            self.target.add(session_id)
            self.target.step([StepItem(session_id, 0, prompt, 0, GREEDY)])
            mode, limit = VerificationMode.GREEDY, len(prompt) + CREDIT
            message = OpenSession(
                session_id, 1, len(prompt), prompt, GREEDY, mode, limit, fan_out=2
            )
            self.table.receive(1, message, 0)

    def step(self) -> int:
        """A draft step; its rows."""
        items = self.table.begin_pass(512)
        for sequence_id in self.table.take_released():
            self.draft.free(sequence_id)
        for item in items:
            if item.sequence_id not in self.known:
                self.known.add(item.sequence_id)
                self.draft.add(item.sequence_id)
        num_rows = self.draft.stats().num_rows
        results = self.draft.step([step_item(item) for item in items])
        self.table.end_pass(items, [work_result(result) for result in results], 3000)
        self.num_messages += sum(map(len, self.table.take_drafts(0).values()))
        return self.draft.stats().num_rows - num_rows

    def verify(self) -> list[int]:
        """A target pass beside draft steps, whose rows are returned."""
        windows = []
        for session_id, text in enumerate(self.texts):
            session = self.table.session((1, session_id))
            assert session is not None
            windows.append(session.log.slice(len(text), min(len(text) + K, session.sent_len)))
        num_rows = [self.step() for _ in range(STEPS_PER_PASS)]
        for session_id, window in enumerate(windows):
            self.commit(session_id, window)
        return num_rows

    def commit(self, session_id: int, window: tuple[int, ...]) -> None:
        text, session = self.texts[session_id], self.table.session((1, session_id))
        assert session is not None
        start, rows = len(text), (text[-1], *window)
        [result] = self.target.step([StepItem(session_id, start - 1, rows, len(rows), GREEDY)])
        agreed = 0
        while agreed < len(window) and window[agreed] == result.token_ids[agreed]:
            agreed += 1
        new = result.token_ids[: agreed + 1]
        position = start + agreed
        if position < len(session.log) and session.log[position] != new[-1]:
            branch = session.branches.find(position, new[-1])
            num_sent = None if branch is None else branch.sent_len - position - 1
            self.corrections.append(num_sent)
        text += new
        limit = len(text) + CREDIT
        self.table.receive(
            1, Verdict(session_id, 1, start, new, agreed, limit, len(text), fan_out=2), 0
        )


def test_foreseen_corrections_have_a_whole_window() -> None:
    pair = Pair()
    for _ in range(3):
        pair.verify()
    pair.corrections.clear()
    pair.num_messages, num_passes = 0, 12
    num_rows = [rows for _ in range(num_passes) for rows in pair.verify()]
    foreseen = [num for num in pair.corrections if num is not None]
    assert len(pair.corrections) > 100
    # the script names two corrections in three, and that is what two runner-ups can hold
    assert 0.55 < len(foreseen) / len(pair.corrections) < 0.75
    assert sum(num >= K for num in foreseen) > 0.97 * len(foreseen)
    assert max(num_rows) <= NUM_SEQUENCES + MAX_BRANCH_ROWS
    assert pair.num_messages < 0.5 * sum(num_rows), "a branch goes in one message, not in many"
    assert pair.draft.stats().num_prefix_tokens == 0, "nothing looked for, nothing hashed"
