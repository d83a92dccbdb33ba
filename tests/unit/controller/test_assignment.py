"""Assignment as a pure function: balance, bounds, few changes, who drains; its cost in steps."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.controller.assignment import Assignment, assign

NAMES = st.lists(st.integers(0, 30), unique=True, max_size=9)
CAPS = st.integers(1, 6)


def targets_of(numbers):
    return [f"10.0.0.{n}:52000" for n in numbers]


def drafts_of(numbers):
    return [f"draft-{n}" for n in numbers]


TARGETS, DRAFTS = NAMES.map(targets_of), NAMES.map(drafts_of)
SOME_TARGETS = TARGETS.filter(bool)
SOME_DRAFTS = DRAFTS.filter(bool)


def coverage(assignment, targets):
    counts = Counter(dict.fromkeys(targets, 0))
    for mine in assignment.values():
        counts.update(mine)
    return counts


def dropped(before, after, targets):
    """Pairs of two living replicas that an assignment gave up."""
    alive = set(targets)
    return sum(len((set(before[d]) & alive) - set(after[d])) for d in after if d in before)


def check(assignment, targets, drafts, cap):
    assert set(assignment) == set(drafts)
    for mine in assignment.values():
        assert len(mine) == len(set(mine)) == min(len(targets), cap)
        assert set(mine) <= set(targets)
        assert list(mine) == sorted(mine)
    counts = coverage(assignment, targets)
    assert set(counts) == set(targets)
    if counts:
        assert max(counts.values()) - min(counts.values()) <= 1


class TestAssign:
    @given(TARGETS, DRAFTS, CAPS)
    def test_from_nothing(self, targets, drafts, cap):
        check(assign(targets, drafts, cap), targets, drafts, cap)

    @given(TARGETS, DRAFTS, CAPS, TARGETS, DRAFTS, CAPS)
    def test_from_anything(self, targets, drafts, cap, old_targets, old_drafts, old_cap):
        """Whatever was before, and whoever came or went: the laws hold."""
        previous = assign(old_targets, old_drafts, old_cap)
        check(assign(targets, drafts, cap, previous), targets, drafts, cap)

    @given(TARGETS, DRAFTS, CAPS, st.randoms(use_true_random=False))
    def test_deterministic_in_any_order(self, targets, drafts, cap, random):
        first = assign(targets, drafts, cap)
        random.shuffle(targets)
        random.shuffle(drafts)
        assert assign(targets, drafts, cap) == first

    @given(TARGETS, DRAFTS, CAPS)
    def test_nothing_changes_when_nothing_changed(self, targets, drafts, cap):
        first = assign(targets, drafts, cap)
        assert assign(targets, drafts, cap, first) == first

    @given(TARGETS, SOME_DRAFTS, CAPS)
    def test_a_draft_that_joins_moves_nobody(self, targets, drafts, cap):
        before = assign(targets, drafts[1:], cap)
        after = assign(targets, drafts, cap, before)
        assert {d: after[d] for d in before} == before

    @given(SOME_TARGETS, DRAFTS, CAPS)
    def test_a_target_that_joins_takes_only_its_share(self, targets, drafts, cap):
        before = assign(targets[1:], drafts, cap)
        after = assign(targets, drafts, cap, before)
        share = coverage(after, targets)[targets[0]]
        assert dropped(before, after, targets) <= share

    @given(SOME_TARGETS, DRAFTS, CAPS)
    def test_a_target_that_leaves_costs_only_its_drafts(self, targets, drafts, cap):
        before = assign(targets, drafts, cap)
        after = assign(targets[1:], drafts, cap, before)
        vacancies = coverage(before, targets)[targets[0]]
        assert dropped(before, after, targets[1:]) <= vacancies

    @given(TARGETS, SOME_DRAFTS, CAPS)
    def test_a_draft_that_leaves_costs_at_most_its_targets(self, targets, drafts, cap):
        before = assign(targets, drafts, cap)
        after = assign(targets, drafts[1:], cap, before)
        assert dropped(before, after, targets) <= len(before[drafts[0]])

    def test_examples(self):
        a, b, c, d = "abcd"
        assert assign([], ["x"], 2) == {"x": ()}
        assert assign([a], [], 2) == {}
        assert assign([b, a], ["y", "x"], 8) == {"x": (a, b), "y": (a, b)}
        assert assign([a, b, c, d], ["x", "y"], 2) == {"x": (a, b), "y": (c, d)}
        assert assign([a, b, c], ["x", "y"], 2) == {"x": (a, b), "y": (a, c)}
        assert assign([a, b, c, d], ["x"], 1) == {"x": (a,)}

    def test_a_new_target_is_covered_by_moving_one_pair(self):
        before = {"x": ("a", "b"), "y": ("a", "b")}
        after = assign(["a", "b", "c"], ["x", "y"], 2, before)
        assert coverage(after, "abc") == {"a": 2, "b": 1, "c": 1}
        assert dropped(before, after, "abc") == 1

    def test_an_uneven_start_is_evened_out(self):
        """x must take both; y's pairs, which are old, are left alone where possible."""
        before = {"y": ("a",)}
        after = assign(["a", "b"], ["x", "y"], 1, before)
        assert after == {"x": ("b",), "y": ("a",)}

    def test_new_pairs_that_came_out_uneven_are_moved(self):
        """w and x first take a and b; z, which keeps d, must then take a: one a moves to d."""
        after = assign(["a", "b", "d"], ["w", "x", "z"], 2, {"z": ("d", "e")})
        assert after == {"w": ("b", "d"), "x": ("a", "b"), "z": ("a", "d")}

    def test_unknown_names_in_the_previous_assignment(self):
        before = {"gone": ("a",), "x": ("gone", "b")}
        assert assign(["a", "b", "c"], ["x"], 1, before) == {"x": ("b",)}

    def test_a_target_that_left_and_twice_the_same_pair(self):
        before = {"x": ("a", "a", "b", "b")}
        assert assign(["b", "c"], ["x"], 2, before) == {"x": ("b", "c")}


WANTED = st.integers(1, 4)


@given(TARGETS, DRAFTS, CAPS, WANTED, TARGETS, DRAFTS, st.data())
def test_each_target_gets_its_drafts(targets, drafts, cap, wanted, old_targets, old_drafts, data):
    """`drafts_per_target`, when there are enough; whatever was before and whoever drains."""
    names = [*targets, *drafts, *old_targets]
    draining = set(data.draw(st.lists(st.sampled_from(names), max_size=4)) if names else ())
    previous = assign(old_targets, old_drafts, cap)
    after = assign(targets, drafts, cap, previous, drafts_per_target=wanted, draining=draining)
    living = [t for t in targets if t not in draining]
    staying = [d for d in drafts if d not in draining]
    counts = coverage({d: after[d] for d in staying}, living)
    counts = [counts[target] for target in living]
    if living:
        assert max(counts) - min(counts) <= 1
        if len(staying) >= wanted and len(staying) * cap >= wanted * len(living):
            assert min(counts) >= wanted
    assert set(after) == set(drafts)
    for draft, mine in after.items():
        assert len(mine) == len(set(mine)) <= cap
        assert set(mine) <= set(targets)
        new = set(mine) - set(previous.get(draft, ()))
        assert not new & draining, "who drains gets nothing new"
        if draft in draining:
            assert not new
            assert set(mine) == set(previous.get(draft, ())) & set(targets), "it keeps what it has"


@given(SOME_TARGETS, DRAFTS, CAPS, WANTED)
def test_a_target_that_drains_keeps_its_drafts_while_nobody_needs_them(
    targets, drafts, cap, wanted
):
    before = assign(targets, drafts, cap, drafts_per_target=wanted)
    after = assign(targets, drafts, cap, before, drafts_per_target=wanted, draining=targets[:1])
    kept = coverage(after, targets)[targets[0]]
    living = targets[1:]
    counts = coverage(after, targets)
    if kept < coverage(before, targets)[targets[0]]:
        # It lost one only for a target that has no more than it must.
        assert min(counts[target] for target in living) <= wanted
    # The living lose no more pairs than were freed for them.
    assert dropped(before, after, living) <= coverage(before, targets)[targets[0]] - kept


def test_who_drains_is_the_first_to_lose():
    before = {"x": ("a", "b")}
    keeps = assign(["a", "b", "c"], ["x"], 3, before, draining=["a"])
    assert keeps == {"x": ("a", "b", "c")}
    loses = assign(["a", "b", "c"], ["x"], 2, before, draining=["a"])
    assert loses == {"x": ("b", "c")}, "c would have no draft at all"


def test_scarce_drafts_go_where_the_work_is():
    work = {"a": 1, "b": 40, "c": 9, "d": 0}
    assert assign("abcd", ["x"], 2, work=work) == {"x": ("b", "c")}
    # Also away from a target with less; but twice as much is needed to move a draft.
    assert assign("abcd", ["x"], 2, {"x": ("a", "d")}, work=work) == {"x": ("b", "c")}
    close = {"a": 32, "b": 40, "c": 36, "d": 0}
    assert assign("abcd", ["x"], 2, {"x": ("a", "c")}, work=close) == {"x": ("a", "c")}
    # With enough drafts work moves nobody.
    enough = {"x": ("a", "d"), "y": ("b", "c")}
    assert assign("abcd", "xy", 2, enough, work=work) == enough
    short = assign("abcd", "xy", 2, enough, work=work, drafts_per_target=2)
    assert short == enough, "balanced: nobody has two"


def test_large_drafts_go_where_the_work_is():
    sizes = {"x": 16, "y": 128}
    after = assign("abcd", "xy", 1, work={"d": 50, "b": 5}, sizes=sizes)
    assert after == {"y": ("d",), "x": ("b",)}


# -- many ---------------------------------------------------------------------------------------

MANY_TARGETS = [f"10.0.{n // 250}.{n % 250}:52000" for n in range(1000)]
MANY_DRAFTS = [f"draft-{n:04}" for n in range(400)]
CAP = 8
# Each of the 3200 pairs is looked at a few times, however the fleet was before.
MAX_STEPS = 20 * CAP * len(MANY_DRAFTS)


def run(targets, drafts, previous, **options):
    plan = Assignment(targets, drafts, CAP, previous, **options)
    return plan.pairs({}, {}), plan.num_steps


@pytest.fixture(scope="module")
def settled():
    return run(MANY_TARGETS, MANY_DRAFTS, {})[0]


@pytest.mark.parametrize(
    "before",
    [
        lambda settled: {},
        lambda settled: settled,
        lambda settled: dict.fromkeys(MANY_DRAFTS, tuple(MANY_TARGETS[:CAP])),
        lambda settled: {d: tuple(Random(d).sample(MANY_TARGETS, CAP)) for d in MANY_DRAFTS},
    ],
    ids=["nothing", "the same", "all on the same targets", "anything"],
)
def test_a_large_fleet_takes_few_steps(settled, before):
    after, num_steps = run(MANY_TARGETS, MANY_DRAFTS, before(settled))
    check(after, MANY_TARGETS, MANY_DRAFTS, CAP)
    assert num_steps <= MAX_STEPS


@pytest.mark.parametrize(
    ("targets", "drafts", "most"),
    [
        (MANY_TARGETS, [*MANY_DRAFTS, "new"], 0),
        (MANY_TARGETS, MANY_DRAFTS[1:], CAP),
        ([*MANY_TARGETS, "new"], MANY_DRAFTS, 4),
        (MANY_TARGETS[1:], MANY_DRAFTS, 4),
    ],
    ids=["a draft joins", "a draft leaves", "a target joins", "a target leaves"],
)
def test_in_a_large_fleet_one_replica_moves_its_own_share(settled, targets, drafts, most):
    """A target's share are 3 or 4 drafts here, a draft's 8 targets."""
    after, num_steps = run(targets, drafts, settled)
    assert dropped(settled, after, targets) <= most
    check(after, targets, drafts, CAP)
    assert num_steps <= MAX_STEPS
