"""How many rows branches get: by what a row was found to cost, whatever the machine."""

import random

import pytest

from paceline.protocol.branch_budget import BRANCH_SHARE, BranchBudget
from paceline.protocol.draft_branches import MAX_BRANCHES
from paceline.protocol.draft_table import MAX_BRANCH_ROWS, DraftTable
from tests.unit.protocol.test_draft_branches import opening, outcome


def learnt(base_us, row_us, *, num_passes=200, noise=0.0, seed=1):
    """What is known after passes over 32 main texts and as many branches as were allowed."""
    rng, budget = random.Random(seed), BranchBudget()
    for _ in range(num_passes):
        num_main = rng.randint(8, 32)
        num_rows = num_main + rng.randint(0, min(MAX_BRANCH_ROWS, budget.max_rows(num_main)))
        us = (base_us + row_us * num_rows) * (1 + rng.uniform(-noise, noise))
        budget.learn(num_rows, int(us))
    return budget


def test_before_the_first_pass_a_row_costs_nothing():
    assert BranchBudget().max_rows(32) >= MAX_BRANCH_ROWS


@pytest.mark.parametrize("base_us", [300, 3000, 30_000])
def test_rows_that_cost_nothing_are_not_bounded(base_us):
    assert learnt(base_us, 0.0).max_rows(32) >= MAX_BRANCH_ROWS


@pytest.mark.parametrize(("base_us", "row_us"), [(3000, 10), (3000, 30), (500, 100), (20_000, 900)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_pass_gets_no_longer_than_the_share(base_us, row_us, noise):
    budget = learnt(base_us, row_us, noise=noise)
    main_us = base_us + row_us * 32
    allowed = budget.max_rows(32)
    assert row_us * allowed == pytest.approx(BRANCH_SHARE * main_us, rel=0.1 + 2 * noise)


def test_another_machine_is_learnt_in_some_dozens_of_passes():
    budget = learnt(3000, 0.0)
    for num_rows in [32, 232, 132] * 70:
        budget.learn(num_rows, 3000 + 50 * num_rows)
    assert budget.max_rows(32) == pytest.approx(BRANCH_SHARE * 4600 / 50, rel=0.15)


def test_one_stall_changes_little():
    budget = learnt(3000, 30)
    before = budget.max_rows(32)
    budget.learn(200, 5_000_000)
    assert budget.max_rows(32) > before / 4


def test_there_is_always_one_row():
    assert learnt(1, 10_000).max_rows(0) >= 1
    budget = BranchBudget()
    for _ in range(300):
        budget.learn(1, 0)  # a clock that stands still tells nothing
    assert budget.max_rows(5) >= MAX_BRANCH_ROWS


@pytest.mark.parametrize("row_us", [0, 100])
def test_the_table_keeps_to_it(row_us):
    """Where rows cost time, passes with branches take at most as much longer."""
    table = DraftTable(max_sessions=8, max_len=1000, session_idle_us=1000)
    for session_id in range(8):
        table.receive(1, opening(session_id, limit=103, fan_out=2), 0)
    num_branch_rows = []
    for _ in range(60):
        items = table.begin_pass(512)
        num_rows = sum(item.work.num_rows for item in items)
        num_main = sum(table.session(i.key).sequence_id == i.sequence_id for i in items)
        num_branch_rows.append(num_rows - num_main)
        results = [outcome(table, item) for item in items]
        table.end_pass(items, results, 1000 + row_us * num_rows)
    if row_us == 0:
        assert max(num_branch_rows) == 8 * MAX_BRANCHES
    else:
        allowed = BRANCH_SHARE * (1000 + 8 * row_us) / row_us
        assert max(num_branch_rows[30:]) == pytest.approx(allowed, rel=0.35)
