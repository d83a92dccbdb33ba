"""Assignment as a pure function (laws by hypothesis), and the registry that time governs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.controller.registry import DraftReport, Registry, TargetReport, assign

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


def target(number, *, address=None, boot_id="boot"):
    return TargetReport(f"target-{number}", boot_id, address or f"10.0.0.{number}:52000", 1)


def draft(number, *, boot_id="boot", **figures):
    return DraftReport(f"draft-{number}", boot_id, 1, 8, **figures)


@pytest.fixture
def registry():
    return Registry(timeout_s=5.0, targets_per_draft=2)


class TestRegistry:
    def test_nobody(self, registry):
        assert (registry.targets(), registry.drafts()) == ([], [])

    def test_a_draft_without_targets(self, registry):
        assert registry.report_draft(draft(1), 0.0) == ()

    def test_a_draft_hears_its_targets(self, registry):
        registry.report_target(target(1), 0.0)
        assert registry.report_draft(draft(1), 0.0) == ("10.0.0.1:52000",)
        registry.report_target(target(2), 0.5)
        assert registry.report_draft(draft(1), 1.0) == ("10.0.0.1:52000", "10.0.0.2:52000")

    def test_no_more_targets_than_allowed(self, registry):
        for number in (1, 2, 3):
            registry.report_target(target(number), 0.0)
        assert len(registry.report_draft(draft(1), 0.0)) == 2

    def test_heartbeats_move_nothing(self, registry):
        for number in range(7):
            registry.report_target(target(number), 0.0)
        for number in range(5):
            registry.report_draft(draft(number), 0.0)
        first = [registry.report_draft(draft(n), 0.0) for n in range(5)]
        for now in range(1, 20):
            for number in range(7):
                registry.report_target(target(number), float(now))
            assert [registry.report_draft(draft(n), float(now)) for n in range(5)] == first
        check(dict(zip(drafts_of(range(5)), first, strict=True)), targets_of(range(7)),
              drafts_of(range(5)), 2)  # fmt: skip

    def test_the_newest_report_is_kept(self, registry):
        registry.report_draft(draft(1), 0.0)
        registry.report_draft(draft(1, num_sessions=3, connected=("x",)), 1.0)
        assert registry.drafts() == [draft(1, num_sessions=3, connected=("x",))]

    def test_a_silent_target_is_forgotten(self, registry):
        registry.report_target(target(1), 0.0)
        registry.report_target(target(2), 1.0)
        assert len(registry.report_draft(draft(1), 5.0)) == 2
        assert registry.report_draft(draft(1), 5.001) == ("10.0.0.2:52000",)
        assert registry.targets() == [target(2)]

    def test_a_silent_draft_is_forgotten(self, registry):
        registry.report_draft(draft(1), 0.0)
        registry.report_target(target(1), 5.0)
        assert registry.drafts() == [draft(1)]
        registry.report_target(target(1), 5.001)
        assert registry.drafts() == []

    def test_a_draft_that_comes_back_is_assigned_again(self, registry):
        registry.report_target(target(1), 0.0)
        registry.report_draft(draft(1), 0.0)
        registry.report_target(target(1), 10.0)
        assert registry.drafts() == []
        assert registry.report_draft(draft(1, boot_id="new"), 10.0) == ("10.0.0.1:52000",)

    def test_the_share_of_a_lost_draft_goes_to_the_others(self):
        registry = Registry(timeout_s=5.0, targets_per_draft=1)
        for now in (0.0, 4.0, 8.0):
            registry.report_target(target(1), now)
            registry.report_target(target(2), now)
            if now == 0.0:
                registry.report_draft(draft(1), now)
            mine = registry.report_draft(draft(2), now)
        assert mine == ("10.0.0.2:52000",)
        third = registry.report_draft(draft(3), 8.0)
        assert third == ("10.0.0.1:52000",)

    def test_a_restart_on_the_same_address(self, registry):
        registry.report_target(target(1, address="10.0.0.9:52000"), 0.0)
        registry.report_target(target(2, address="10.0.0.9:52000"), 1.0)
        assert registry.targets() == [target(2, address="10.0.0.9:52000")]
        assert registry.report_draft(draft(1), 1.0) == ("10.0.0.9:52000",)

    def test_a_restart_on_another_address(self, registry):
        registry.report_target(target(1), 0.0)
        registry.report_draft(draft(1), 0.0)
        registry.report_target(target(1, address="10.0.0.9:52000", boot_id="new"), 1.0)
        assert registry.report_draft(draft(1), 1.0) == ("10.0.0.9:52000",)

    def test_goodbye(self, registry):
        registry.report_target(target(1), 0.0)
        registry.report_target(target(2), 0.0)
        registry.report_draft(draft(1), 0.0)
        registry.report_draft(draft(2), 0.0)
        registry.remove("target-1", 0.1)
        registry.remove("draft-2", 0.1)
        registry.remove("never seen", 0.1)
        assert registry.targets() == [target(2)]
        assert registry.drafts() == [draft(1)]
        assert registry.report_draft(draft(1), 0.1) == ("10.0.0.2:52000",)

    def test_the_last_target_leaves(self, registry):
        registry.report_target(target(1), 0.0)
        registry.report_draft(draft(1), 0.0)
        registry.remove("target-1", 0.1)
        assert registry.report_draft(draft(1), 0.1) == ()


def test_a_new_controller_takes_no_live_stream_from_a_draft():
    """It hears of the draft first: the target's heartbeat is still to come."""
    registry = Registry(timeout_s=5.0, targets_per_draft=8)
    draft = DraftReport("d", "boot", 1, 8, connected=("127.0.0.1:52000",))
    assert registry.report_draft(draft, 0.0) == ("127.0.0.1:52000",)
    registry.report_target(TargetReport("t", "boot", "127.0.0.1:52000", 2), 0.1)
    assert registry.report_draft(draft, 1.0) == ("127.0.0.1:52000",)


def test_a_target_late_with_its_heartbeat_keeps_its_live_streams():
    registry = Registry(timeout_s=5.0, targets_per_draft=8)
    registry.report_target(TargetReport("t", "boot", "127.0.0.1:52000", 2), 0.0)
    live = DraftReport("d", "boot", 1, 8, connected=("127.0.0.1:52000",))
    assert registry.report_draft(live, 10.0) == ("127.0.0.1:52000",)
    dead = DraftReport("d", "boot", 1, 8, connected=())
    assert registry.report_draft(dead, 11.0) == ()
