"""A draft with branches and a target's session, on toy engines: the text is the target's own, and a
foreseen correction costs no round trip."""

from __future__ import annotations

import pytest

from paceline.draft.steps import step_item, work_result
from paceline.engine.base import EngineInfo, StepItem
from paceline.engine.toy import ToyEngine
from paceline.engine.toy_rules import ToyRow, best_tokens
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.messages import Opened, OpenStatus
from paceline.protocol.target_session import TargetSession
from paceline.sampling.acceptance import accept_matching, coupled_token
from paceline.sampling.params import SamplingParams, VerificationMode

VOCAB_SIZE = 60
PROMPT = tuple(range(1, 12))
NUM_TOKENS = 80
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=0.8, seed=4)
INFO = EngineInfo("toy", VOCAB_SIZE, 200, 4, 400)


class NearlyRight:
    """The draft's engine: the target's own model, whose second best it takes at every third
    position for the best."""

    def __init__(self) -> None:
        self.engine = ToyEngine(INFO)
        self.known: set[int] = set()

    def run(self, table: DraftTable) -> None:
        items = table.begin_pass(512)
        for sequence_id in table.take_released():
            if sequence_id in self.known:
                self.engine.free(sequence_id)
                self.known.discard(sequence_id)
        for item in items:
            if item.sequence_id not in self.known:
                self.engine.add(item.sequence_id)
                self.known.add(item.sequence_id)
        results = self.engine.step([step_item(item) for item in items]) if items else []
        outcomes = []
        for item, result in zip(items, results, strict=True):
            outcome = work_result(result)
            if item.work.end % 3 == 0 and outcome.token_id is not None:
                outcome = self.swapped(table, item.key, item.sequence_id, item.work.end, outcome)
            outcomes.append(outcome)
        table.end_pass(items, outcomes, 1)

    def swapped(self, table, key, sequence_id, end, outcome):  # type: ignore[no-untyped-def]
        session = table.session(key)
        text = session.text_of(sequence_id)[:end]
        row = ToyRow(
            self.engine.logits(text),
            session.sampling,
            end - len(PROMPT),
            PROMPT,
            text[len(PROMPT) :],
        )
        best, second = best_tokens(row, 2)
        return type(outcome)(
            second, outcome.cached_len, None, (best,) if outcome.runner_ups else ()
        )


def texts_own(sampling: SamplingParams) -> tuple[int, ...]:
    model, text = ToyEngine(INFO), list(PROMPT)
    for index in range(NUM_TOKENS):
        text.append(coupled_token(model.logits(text), sampling, index))
    return tuple(text)


def generate(sampling: SamplingParams, fan_out: int) -> tuple[tuple[int, ...], int, DraftTable]:
    """(text, passes, draft). The next pass begins before the draft hears of the last one."""
    mode = VerificationMode.GREEDY if sampling.is_greedy else VerificationMode.COUPLED
    target = TargetSession(
        7, PROMPT, sampling=sampling, mode=mode, max_tokens=NUM_TOKENS, max_len=200
    )
    target.fan_out, target.max_draft_ahead = fan_out, 9
    engine, draft = ToyEngine(INFO), NearlyRight()
    engine.add(1)
    table = DraftTable(max_sessions=1, max_len=200, session_idle_us=1000, block_size=4)
    table.receive(1, target.reopen(), 0)
    target.receive_opened(Opened(7, 1, OpenStatus.OK))
    num_passes, cached = 0, 0
    while not target.is_finished:
        window = target.begin_verify(4)
        rows = (*target.log.slice(cached, target.committed_len), *window)
        output_index = target.num_output_tokens
        item = StepItem(1, cached, rows, len(window) + 1, sampling, output_index)
        [result] = engine.step([item])
        for _ in range(6):
            draft.run(table)
            for message in table.take_drafts(0).get(1, ()):
                target.receive_draft(message)
        step = target.end_verify(accept_matching(window, result.token_ids))
        cached = target.committed_len - 1
        num_passes += 1
        if step.verdict is not None:
            # the window of the next pass is what is here now
            for answer in table.receive(1, step.verdict, 0):
                raise AssertionError(answer)
    table.lose_link(1)
    draft.run(table)
    draft.engine.check_integrity()
    assert draft.engine.stats().num_sequences == 0
    return target.log.slice(0), num_passes, table


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_the_text_is_the_targets_and_corrections_cost_no_round_trip(
    sampling: SamplingParams,
) -> None:
    expected = texts_own(sampling)
    text, num_passes, table = generate(sampling, 0)
    assert text == expected
    assert table.stats.num_branches == table.stats.num_branch_tokens == 0
    text, num_passes_branching, table = generate(sampling, 1)
    assert text == expected
    assert table.stats.num_promoted > 15
    assert num_passes_branching < 0.7 * num_passes
