"""The registry, which time governs: who lives, who is forgotten, what a new one takes over."""

from random import Random

import pytest

from paceline.controller import registry as limits
from paceline.controller.registry import DraftReport, Registry, TargetReport
from paceline.fleet_reports import ReportError


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
        assert [len(mine) for mine in first] == [2] * 5

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


def settled(num_targets, num_drafts, **limits):
    """A registry of a fleet at rest, and the streams that its drafts have."""
    registry = Registry(timeout_s=5.0, targets_per_draft=3, **limits)
    for number in range(num_targets):
        registry.report_target(target(number), 0.0)
    for number in range(num_drafts):
        registry.report_draft(draft(number), 0.0)
    streams = {n: registry.report_draft(draft(n), 0.5) for n in range(num_drafts)}
    return registry, streams


def reports(num_targets, streams, order):
    """One heartbeat of each replica, in a shuffled order."""
    beats = [(True, n) for n in range(num_targets)] + [(False, n) for n in streams]
    order.shuffle(beats)
    return [target(n) if is_target else draft(n, connected=streams[n]) for is_target, n in beats]


@pytest.mark.parametrize("seed", range(8))
def test_a_new_registry_assigns_as_the_one_before_within_one_round_of_heartbeats(seed):
    """Whatever comes first. Else every restart of the Controller would move half the fleet."""
    old, streams = settled(11, 7)
    old.remove("target-4", 1.0)  # so that the assignment has a history
    streams = {n: old.report_draft(draft(n, connected=mine), 1.0) for n, mine in streams.items()}
    new = Registry(timeout_s=5.0, targets_per_draft=3)
    for report in reports(11, streams, Random(seed)):
        if isinstance(report, DraftReport):
            mine = new.report_draft(report, 2.0)
            assert set(report.connected) <= set(mine), "no stream is taken while it learns"
        elif report.replica_id != "target-4":
            new.report_target(report, 2.0)
    again = {n: new.report_draft(draft(n, connected=mine), 3.0) for n, mine in streams.items()}
    assert again == streams
    assert new.assignment == old.assignment


def test_what_was_inherited_gives_way_when_a_target_stays_silent():
    """A live stream to a target that never reports is kept, but holds nothing else up."""
    registry = Registry(timeout_s=5.0, targets_per_draft=1)
    live = draft(1, connected=("10.0.0.9:52000",))
    registry.report_target(target(1), 0.0)
    assert registry.report_draft(live, 0.0) == ("10.0.0.9:52000",)
    registry.report_target(target(1), 5.0)
    assert registry.report_draft(live, 5.0) == ("10.0.0.1:52000", "10.0.0.9:52000")


def test_a_draft_that_drains_keeps_its_streams_and_counts_for_nobody():
    registry = Registry(timeout_s=5.0, targets_per_draft=1)
    registry.report_target(target(1), 0.0)
    registry.report_target(target(2), 0.0)
    first = registry.report_draft(draft(1), 0.0)
    second = registry.report_draft(draft(2), 0.0)
    assert {*first, *second} == {"10.0.0.1:52000", "10.0.0.2:52000"}
    leaving = draft(1, is_draining=True, connected=first)
    assert registry.report_draft(leaving, 1.0) == first
    assert registry.report_draft(draft(3), 1.0) == first, "the share of who leaves"
    assert registry.report_draft(leaving, 2.0) == first
    registry.remove("draft-1", 2.0)
    assert {draft.replica_id for draft in registry.drafts_of(first[0])} == {"draft-3"}


def test_a_draft_that_begins_to_drain_is_replaced_at_once():
    """Nobody came and nobody left; but its target would be without one in a moment."""
    registry = Registry(timeout_s=5.0, targets_per_draft=1)
    registry.report_target(target(1), 0.0)
    registry.report_target(target(2), 0.0)
    mine = {n: registry.report_draft(draft(n), 0.0) for n in (1, 2, 3)}
    (alone,) = (n for n in mine if list(mine.values()).count(mine[n]) == 1)
    registry.report_draft(draft(alone, is_draining=True, connected=mine[alone]), 1.0)
    others = [registry.report_draft(draft(n, connected=mine[n]), 1.5) for n in mine if n != alone]
    assert sorted(others) == [("10.0.0.1:52000",), ("10.0.0.2:52000",)]


def test_a_target_that_drains_gets_no_draft_that_comes():
    registry = Registry(timeout_s=5.0, targets_per_draft=8)
    registry.report_target(target(1), 0.0)
    registry.report_target(target(2), 0.0)
    mine = registry.report_draft(draft(1), 0.0)
    leaving = TargetReport("target-1", "boot", "10.0.0.1:52000", 1, is_draining=True)
    registry.report_target(leaving, 1.0)
    assert registry.report_draft(draft(1, connected=mine), 1.0) == mine
    assert registry.report_draft(draft(2), 1.0) == ("10.0.0.2:52000",)


def test_limits_that_change_while_it_runs():
    registry, streams = settled(6, 2)
    assert {len(mine) for mine in streams.values()} == {3}
    registry.set_limits(2, 1)
    after = [registry.report_draft(draft(n, connected=streams[n]), 1.0) for n in streams]
    assert [len(mine) for mine in after] == [2, 2]
    assert all(set(mine) <= set(streams[n]) for n, mine in enumerate(after))


def test_work_that_shifts_moves_scarce_drafts_but_rarely():
    """One draft, two targets, a place for one: it goes where the work is, at its next look."""
    registry = Registry(timeout_s=1e9, targets_per_draft=1)

    def beat(busy, now):
        for number in (1, 2):
            report = TargetReport(
                f"target-{number}", "boot", f"10.0.0.{number}:52000", 1,
                num_running=20 if number == busy else 0,
            )  # fmt: skip
            registry.report_target(report, now)
        return registry.report_draft(draft(1), now)

    assert beat(1, 0.0) == ("10.0.0.1:52000",)
    assert beat(2, limits.REBALANCE_S - 1) == ("10.0.0.1:52000",)
    assert beat(2, limits.REBALANCE_S) == ("10.0.0.2:52000",)


def test_a_large_fleet_is_not_assigned_anew_for_each_that_comes():
    registry = Registry(timeout_s=5.0, targets_per_draft=2)
    for number in range(limits.SMALL_FLEET + 1):
        registry.report_target(target(number), 0.0)
    assert registry.report_draft(draft(1), 0.0)
    assert registry.report_draft(draft(2), limits.MIN_ASSIGN_INTERVAL_S / 2) == ()
    assert registry.report_draft(draft(2), limits.MIN_ASSIGN_INTERVAL_S)


def test_replicas_are_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_TARGETS", 3)
    monkeypatch.setattr(limits, "MAX_DRAFTS", 2)
    registry = Registry(timeout_s=5.0, targets_per_draft=2)
    for number in range(3):
        registry.report_target(target(number), 0.0)
        if number < 2:
            registry.report_draft(draft(number), 0.0)
    with pytest.raises(ReportError, match="3 targets"):
        registry.report_target(target(3), 0.0)
    with pytest.raises(ReportError, match="2 drafts"):
        registry.report_draft(draft(2), 0.0)
    registry.report_target(target(0), 1.0)  # who is known is still heard
    registry.remove("target-1", 1.0)
    registry.report_target(target(3), 1.0)
    assert {t.replica_id for t in registry.targets()} == {"target-0", "target-2", "target-3"}


def test_who_is_told_of_a_target_that_is_gone():
    registry = Registry(timeout_s=5.0, targets_per_draft=2)
    gone = []
    registry.on_target_gone = gone.append
    registry.report_target(target(1), 0.0)
    registry.report_target(target(2), 3.0)
    registry.report_target(target(3, address="10.0.0.2:52000"), 4.0)
    assert gone == ["target-2"], "another took its address"
    registry.report_draft(draft(1), 6.0)
    assert gone == ["target-2", "target-1"], "silent"
    registry.remove("target-3", 6.0)
    assert gone == ["target-2", "target-1", "target-3"], "said goodbye"
