"""Priors: sums over others only, exact, scaled, bounded, and fading for who has left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.controller import pool as limits
from paceline.controller.pool import LEFT_HALF_LIFE_S, MAX_PRIOR_ROUNDS, PriorPool
from paceline.protocol.lookahead import AcceptanceClass, ClassCounts
from paceline.sampling.params import VerificationMode


def kind(temperature=0.0, draft_model="d"):
    return AcceptanceClass(draft_model, VerificationMode.COUPLED, temperature)


def counts(*pairs):
    """(reached, accepted) by position."""
    return ClassCounts(tuple(r for r, _ in pairs), tuple(a for _, a in pairs))


A, B = kind(0.0), kind(1.0)


def test_the_counts_of_all_others():
    pool = PriorPool()
    pool.report("t1", {A: counts((10, 6), (6, 3))})
    pool.report("t2", {A: counts((20, 10)), B: counts((4, 1))})
    pool.report("t3", {})
    assert pool.priors("t1", 0.0) == {A: counts((20, 10)), B: counts((4, 1))}
    assert pool.priors("t2", 0.0) == {A: counts((10, 6), (6, 3))}
    assert pool.priors("t3", 0.0) == {A: counts((30, 16), (6, 3)), B: counts((4, 1))}
    assert pool.priors("never seen", 0.0) == pool.priors("t3", 0.0)


def test_a_lone_target_hears_nothing_of_itself():
    pool = PriorPool()
    for _ in range(5):
        pool.report("t", {A: counts((10, 6))})
        assert pool.priors("t", 0.0) == {}


def test_a_report_replaces_the_one_before():
    pool = PriorPool()
    pool.report("t1", {A: counts((10, 6)), B: counts((1, 1))})
    pool.report("t1", {A: counts((12, 7))})
    assert pool.priors("t2", 0.0) == {A: counts((12, 7))}


POSITIONS = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)).map(lambda p: (max(p), min(p))), max_size=5
)
REPORTS = st.dictionaries(
    st.sampled_from([kind(t / 4) for t in range(4)]), POSITIONS.map(lambda p: counts(*p))
)
HISTORY = st.lists(st.tuples(st.sampled_from("abcd"), REPORTS), min_size=1, max_size=20)


@given(HISTORY, st.randoms(use_true_random=False))
def test_a_pool_built_again_is_the_same(history, random):
    """Whatever was reported before, in any order now: no rounding is left behind."""
    old, last = PriorPool(), {}
    for name, report in history:
        old.report(name, report)
        last[name] = report
    new, names = PriorPool(), list(last)
    random.shuffle(names)
    for name in names:
        new.report(name, last[name])
    for name in [*last, "another"]:
        assert new.priors(name, 0.0) == old.priors(name, 0.0)
    assert new.totals() == old.totals()


def test_priors_are_scaled_down_as_a_whole():
    pool = PriorPool()
    for number in range(100):
        pool.report(f"t{number}", {A: counts((1000, 800), (800, 400))})
    prior = pool.priors("new", 0.0)[A]
    assert prior.reached[0] == pytest.approx(MAX_PRIOR_ROUNDS)
    assert prior.accepted[0] / prior.reached[0] == pytest.approx(0.8)
    assert prior.reached[1] / prior.reached[0] == pytest.approx(0.8)
    assert prior.accepted[1] / prior.reached[1] == pytest.approx(0.5)


def test_who_left_is_remembered_and_fades():
    pool = PriorPool()
    pool.report("old", {A: counts((64, 32))})
    pool.leave("old", 0.0)
    assert pool.priors("new", 0.0) == {A: counts((64, 32))}
    assert pool.priors("new", LEFT_HALF_LIFE_S) == {A: counts((32, 16))}
    assert pool.priors("new", 3 * LEFT_HALF_LIFE_S) == {A: counts((8, 4))}
    assert pool.priors("new", 6 * LEFT_HALF_LIFE_S) == {}


def test_who_comes_back_counts_once():
    pool = PriorPool()
    pool.report("t", {A: counts((64, 32))})
    pool.leave("t", 0.0)
    pool.priors("new", 1.0)
    pool.report("t", {A: counts((64, 32))})
    assert pool.priors("t", 2.0) == {}
    assert pool.priors("new", 2.0) == {A: counts((64, 32))}


def test_the_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_LEFT", 2)
    pool = PriorPool()
    for number in (1, 2, 3):
        pool.report(f"t{number}", {A: counts((number, 0))})
        pool.leave(f"t{number}", 0.0)
    assert pool.priors("new", 0.0) == {A: counts((2 + 3, 0))}, "the oldest is forgotten"


def test_classes_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_POOLED_CLASSES", 3)
    monkeypatch.setattr(limits, "MAX_PRIOR_CLASSES", 2)
    pool = PriorPool()
    pool.report("t1", {kind(t): counts((10 + t, 1)) for t in range(3)})
    pool.report("t2", {kind(9): counts((99, 1)), kind(0): counts((5, 1))})
    assert set(pool.totals()) == {kind(0), kind(1), kind(2)}
    heard = pool.priors("t3", 0.0)
    assert heard == {kind(0): counts((15, 2)), kind(2): counts((12, 1))}, "the heaviest"
    pool.report("t1", {})
    pool.report("t2", {kind(9): counts((99, 1))})
    assert set(pool.totals()) == {kind(9)}, "there is room again"
