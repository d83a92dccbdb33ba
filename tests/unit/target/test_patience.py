"""The clock of a stalled draft: when it runs, when it is over."""

import pytest

from paceline.target.patience import Patience

LIMIT = 100


def started(has_credit=True):
    patience = Patience()
    patience.start(0, has_credit)
    return patience


def is_over(patience, now):
    """At the second look, both at `now`."""
    first = patience.is_over(LIMIT, now)
    assert not first
    return patience.is_over(LIMIT, now)


def test_nothing_is_due_before_a_draft_is_there():
    assert not is_over(Patience(), 10**9)


@pytest.mark.parametrize(("now", "expected"), [(99, False), (100, True)])
def test_the_limit(now, expected):
    assert is_over(started(), now) is expected


def test_only_the_second_look_in_a_row_counts():
    patience = started()
    assert not patience.is_over(LIMIT, 500)
    patience.reward(500, has_credit=True)
    assert not patience.is_over(LIMIT, 600), "the first look since"
    assert patience.is_over(LIMIT, 601)


def test_without_credit_it_stands_still():
    patience = started()
    patience.reward(50, has_credit=False)
    assert not is_over(patience, 10**9)
    patience.grant(1000, has_credit=True)
    assert not is_over(patience, 1099)
    assert is_over(patience, 1100)


def test_a_verdict_is_no_excuse():
    patience = started()
    for now in range(0, 100, 10):
        patience.grant(now, has_credit=True)
    assert is_over(patience, 100)


def test_a_verdict_that_leaves_nothing_to_draft():
    patience = started()
    patience.grant(50, has_credit=False)
    assert not is_over(patience, 10**9)


@pytest.mark.parametrize(("num_stalls", "factor"), [(0, 1), (1, 2), (3, 8), (5, 32), (60, 32)])
def test_each_stall_doubles_it(num_stalls, factor):
    patience = started()
    patience.num_stalls = num_stalls
    assert not is_over(patience, factor * LIMIT - 1)
    assert is_over(patience, factor * LIMIT)


def test_proven_by_something_of_use_from_the_present_draft():
    patience = started()
    assert not patience.is_proven
    patience.num_stalls = 2
    patience.reward(5, has_credit=True)
    assert (patience.is_proven, patience.num_stalls) == (True, 0)
    patience.start(9, has_credit=True)
    assert not patience.is_proven
