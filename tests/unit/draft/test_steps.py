"""Between the draft table and an engine: nothing is lost, nothing is made up."""

import pytest

from paceline.draft.steps import step_item, work_result
from paceline.engine.base import Propose, StepItem, StepResult
from paceline.protocol.draft_session import WorkResult
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.messages import OpenSession
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.sampling.sparse_probs import SparseProbs

SAMPLING = SamplingParams(seed=5)
LAW = SparseProbs((4, 9), (65535, 1))


def table_with(mode):
    table = DraftTable(max_sessions=1, max_len=1000, session_idle_us=1000)
    table.receive(1, OpenSession(7, 2, 3, (1, 2, 3, 8), SAMPLING, mode, 100, 77), 0)
    return table


@pytest.mark.parametrize("mode", VerificationMode)
def test_a_prefill_then_a_decode(mode):
    table = table_with(mode)
    is_proposing = mode in (VerificationMode.REJECTION, VerificationMode.BLOCK)
    (item,) = table.begin_pass(3)
    assert step_item(item) == StepItem(
        sequence_id=1,
        start=0,
        token_ids=(1, 2, 3, 8),
        num_samples=1,
        sampling=SAMPLING,
        output_index=1,
        rule=Propose(2 << 20) if is_proposing else None,
        max_rows=3,
        cache_salt=77,
    )
    table.end_pass([item], [work_result(StepResult(1, (), cached_len=3))], 0)
    (item,) = table.begin_pass(3)
    assert step_item(item) == StepItem(
        sequence_id=1,
        start=3,
        token_ids=(8,),
        num_samples=1,
        sampling=SAMPLING,
        output_index=1,
        rule=Propose(2 << 20 | 1) if is_proposing else None,
        cache_salt=77,
    )


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (StepResult(1, ()), WorkResult(None)),
        (StepResult(1, (), cached_len=6), WorkResult(None, 6)),
        (StepResult(1, (9,)), WorkResult(9)),
        (StepResult(1, (9,), cached_len=8, draft_probs=(LAW,)), WorkResult(9, 8, LAW)),
    ],
)
def test_results(result, outcome):
    assert work_result(result) == outcome


def test_a_branch_is_a_fork():
    table = DraftTable(max_sessions=1, max_len=1000, session_idle_us=1000)
    greedy = SamplingParams(temperature=0.0)
    opened = OpenSession(7, 2, 3, (1, 2, 3, 8), greedy, VerificationMode.GREEDY, 100, 77, fan_out=2)
    table.receive(1, opened, 0)
    [main] = table.begin_pass(9)
    table.end_pass([main], [work_result(StepResult(1, (5,), runner_ups=((6, 4),)))], 0)
    items = [step_item(item) for item in table.begin_pass(9)]
    assert items[1:] == [
        StepItem(n, 4, (token_id,), 1, greedy, 2, cache_salt=77, num_runner_ups=2, fork_of=1)
        for n, token_id in ((2, 6), (3, 4))
    ]
