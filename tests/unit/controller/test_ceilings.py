"""Ceilings: in which order they fall and rise, when, and what they never do."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.controller.ceilings import (
    GROW_INTERVAL_S,
    SHRINK_INTERVAL_S,
    STARVING,
    CeilingBoard,
    Usage,
    grow,
    shrink,
    utilization,
)
from paceline.fleet_reports import Ceilings, DraftReport, TargetReport
from paceline.protocol.branch_budget import BRANCH_SHARE

NONE = Ceilings()
LIMIT = 0.7
PASS_MS = 25.0
# More steps than any ladder has rungs.
MANY = 500

SIZES = st.integers(1, 64)
USAGES = st.builds(
    lambda k, k_max, ahead, fan_out: Usage(min(k, k_max), k_max, max(ahead, k_max), fan_out),
    SIZES, SIZES, st.integers(1, 256), st.integers(0, 4),
)  # fmt: skip


def down_to_the_bottom(usage):
    ladder = [NONE]
    while (below := shrink(ladder[-1], usage)) != ladder[-1]:
        ladder.append(below)
        assert len(ladder) < MANY
    return ladder


def size(ceiling):
    return float("inf") if ceiling is None else ceiling


def test_draft_ahead_falls_first_then_branches_then_k():
    steps = down_to_the_bottom(Usage(4, 8, 16, 2))
    shown = [(c.max_draft_ahead, c.max_fan_out, c.max_num_speculative_tokens) for c in steps]
    assert shown == [
        (None, None, None),
        (6, None, None),
        (5, None, None),
        (5, 1, None),
        (5, 0, None),
        (4, 0, 3),
        (3, 0, 2),
        (2, 0, 1),
    ]


def test_they_come_back_in_the_opposite_order():
    usage = Usage(4, 6, 16, 2)
    ceilings, shown = down_to_the_bottom(usage)[-1], []
    while ceilings != NONE:
        ceilings = grow(ceilings, usage)
        shown.append(
            (ceilings.max_draft_ahead, ceilings.max_fan_out, ceilings.max_num_speculative_tokens)
        )
    ks = [k for _, _, k in shown]
    assert ks[:5] == [2, 3, 4, 5, None]
    assert [f for _, f, k in shown if k is None] == [0, 1, *[None] * (len(shown) - 6)]
    aheads = [a for a, f, k in shown if f is None and k is None]
    assert aheads == [7, 8, 10, 12, 15, None]


@given(USAGES)
def test_the_way_down_ends_and_never_rises(usage):
    ladder = down_to_the_bottom(usage)
    for before, after in itertools.pairwise(ladder):
        for field in dataclasses.fields(Ceilings):
            assert size(getattr(after, field.name)) <= size(getattr(before, field.name))
    last = ladder[-1]
    assert size(last.max_num_speculative_tokens) >= 1
    if last.max_draft_ahead is not None:
        assert last.max_draft_ahead >= 1
        # Whatever K is in force, the draft may propose that much.
        k = min(size(last.max_num_speculative_tokens), usage.num_speculative_tokens)
        assert last.max_draft_ahead >= min(k, usage.max_draft_ahead)


@given(USAGES, st.integers(0, MANY), USAGES)
def test_the_way_up_ends_whatever_changed(usage, num_down, later):
    """Limits may change in between."""
    ladder = down_to_the_bottom(usage)
    ceilings = ladder[min(num_down, len(ladder) - 1)]
    for _ in range(MANY):
        above = grow(ceilings, later)
        for field in dataclasses.fields(Ceilings):
            assert size(getattr(above, field.name)) >= size(getattr(ceilings, field.name))
        ceilings = above
    assert ceilings == NONE


def draft(busy_share, *, batch=4.0, sessions=4, number=1, step_ms=30.0):
    """One whose step takes longer than a target's pass, if nothing else is said."""
    return DraftReport(
        f"d{number}", "boot", 1, 64, num_sessions=sessions, busy_share=busy_share, batch=batch,
        step_ms=step_ms,
    )  # fmt: skip


class Watch:
    """One target and its drafts, a heartbeat a second; `wanted` proposals are due in each."""

    def __init__(self, limit=LIMIT):
        self.board = CeilingBoard(limit)
        self.now = 0.0
        self.wanted = self.missing = 0.0
        self.ceilings = NONE

    def beats(self, num, drafts, missing_share, *, neighbors=(), name="t", **fields):
        for _ in range(num):
            self.now += 1.0
            self.wanted += 100.0
            self.missing += 100.0 * missing_share
            report = TargetReport(
                name, fields.pop("boot_id", "boot"), "host:1", 1,
                wanted=self.wanted, missing=self.missing, ceilings=self.ceilings,
                **{"num_speculative_tokens": 4.0, "max_num_speculative_tokens": 16,
                   "max_draft_ahead": 16, "pass_ms": PASS_MS, **fields},
            )  # fmt: skip
            self.ceilings = self.board.decide(report, drafts, neighbors, self.now)
        return self.ceilings


def test_busy_drafts_lower_the_ceiling():
    """`controller.max_draft_utilization`: above it, not at it."""
    watch = Watch()
    assert watch.beats(60, [draft(LIMIT)], missing_share=0.5) == NONE
    first = watch.beats(2, [draft(LIMIT + 0.2)], missing_share=0.5)
    assert first.max_draft_ahead is not None
    assert first.max_num_speculative_tokens is None
    last = watch.beats(60, [draft(1.0)], missing_share=0.5)
    assert (last.max_draft_ahead, last.max_num_speculative_tokens) == (4, 2)


def test_another_limit():
    watch = Watch(limit=0.95)
    assert watch.beats(60, [draft(0.94)], missing_share=0.5) == NONE
    assert watch.beats(10, [draft(0.99)], missing_share=0.5) != NONE


@pytest.mark.parametrize(
    ("drafts", "missing_share"),
    [
        ([draft(1.0)], 0.0),  # they run ahead in time that nobody else needs
        ([draft(1.0)], STARVING / 2),
        ([draft(1.0, batch=1.0)], 0.5),  # a lone sequence takes time from nobody
        ([draft(0.4)], 0.5),  # what is missing is late for another reason: the wire
        ([draft(None)], 0.5),  # a draft that does not say
        ([], 0.5),  # none: nothing to share
        ([draft(1.0, sessions=1), draft(0.1, sessions=60, number=2)], 0.5),
        # A window of 4 and the token behind it are made in a pass: late is the round trip.
        ([draft(1.0, step_ms=PASS_MS / 5)], 0.5),
        ([draft(1.0, step_ms=3.0, batch=8.0)], 0.5),
        ([draft(1.0, step_ms=0.0)], 0.5),  # a draft that does not say
        (
            [draft(1.0, step_ms=30.0, sessions=0), draft(1.0, step_ms=3.0, number=2, sessions=60)],
            0.5,
        ),
    ],
)
def test_what_is_not_scarce(drafts, missing_share):
    assert Watch().beats(60, drafts, missing_share) == NONE


@pytest.mark.parametrize(("step_ms", "is_scarce"), [(4.9, False), (5.1, True)])
def test_scarce_is_who_cannot_refill_a_window_during_a_pass(step_ms, is_scarce):
    """5 steps in 25 ms; for K = 8 they must be shorter. Branches go, for a try."""

    def falls(step_ms, **fields):
        busy = [draft(1.0, step_ms=step_ms)]
        return Watch().beats(4, busy, missing_share=0.5, max_fan_out=1, **fields) != NONE

    assert falls(step_ms) == is_scarce
    assert falls(step_ms * 5 / 9, num_speculative_tokens=8.0) == is_scarce
    assert not falls(step_ms, pass_ms=2 * PASS_MS)


def test_a_target_that_does_not_say_how_long_its_passes_take():
    """One of an older release, or without a pass since its last beat."""
    assert Watch().beats(60, [draft(1.0)], missing_share=0.5, pass_ms=0.0) == NONE


def test_one_beat_without_a_pass_changes_nothing():
    watch = Watch()
    watch.beats(1, [draft(1.0)], missing_share=0.5)
    assert watch.beats(9, [draft(1.0, step_ms=0.0)], missing_share=0.5, pass_ms=0.0) != NONE


@pytest.mark.parametrize("step_ms", [5.5, 8.0, 12.0, 24.0])
def test_no_ceiling_below_what_drafts_make_in_a_pass(step_ms):
    """They would stand idle, and their target would get less than now."""
    last = Watch().beats(90, [draft(1.0, step_ms=step_ms)], missing_share=0.5)
    fit = PASS_MS / step_ms
    k = min(size(last.max_num_speculative_tokens), 4)
    assert k >= min(4, fit)
    assert size(last.max_draft_ahead) >= k + fit
    assert (last != NONE) == (fit < 3), "K + 1 more is all that a draft is ever given"


@given(USAGES, st.integers(1, 64))
def test_the_way_down_ends_at_what_is_made_in_a_pass(usage, steps):
    usage = dataclasses.replace(usage, steps_per_pass=steps)
    last = down_to_the_bottom(usage)[-1]
    k = min(size(last.max_num_speculative_tokens), usage.num_speculative_tokens)
    assert k >= min(steps, usage.num_speculative_tokens)
    # A draft is given no more than 2 K + 1 without any ceiling.
    least = min(k + steps, 2 * k + 1, usage.max_draft_ahead)
    assert size(last.max_draft_ahead) >= least


def test_shorter_steps_end_it_and_it_does_not_swing():
    """Drafts whose steps fit at K = 2, not at K = 3, with whatever starvation."""
    watch = Watch()
    low = watch.beats(90, [draft(1.0, step_ms=30.0)], missing_share=0.5)
    assert low.max_num_speculative_tokens == 2
    settled = watch.beats(120, [draft(1.0, step_ms=8.0)], missing_share=0.0)
    assert settled.max_num_speculative_tokens == 2, "3 x 8 fits into 25, 4 x 8 does not"
    assert watch.beats(300, [draft(1.0, step_ms=8.0)], missing_share=0.0) == settled
    assert watch.beats(300, [draft(1.0, step_ms=8.0)], missing_share=0.5) == settled
    grown = watch.beats(900, [draft(1.0, step_ms=3.0)], missing_share=0.5)
    assert grown == NONE, "busy and late, but it fits"


@pytest.mark.parametrize("gain", [0.05, 0.25, 0.4])
def test_branches_go_for_good_only_if_steps_get_shorter(gain):
    watch, seen = Watch(), set()
    for _ in range(40):
        fan_out = watch.ceilings.max_fan_out
        step_ms = 30.0 * (1 - gain) if fan_out == 0 else 30.0
        watch.beats(1, [draft(1.0, step_ms=step_ms)], missing_share=0.5, max_fan_out=2)
        seen.add(watch.ceilings.max_fan_out)
    assert 0 in seen, "it tries"
    is_gain = gain > 1 - 1 / (1 + BRANCH_SHARE)  # more than a draft spends on them by itself
    assert watch.ceilings.max_fan_out == (0 if is_gain else None)
    assert watch.ceilings.max_num_speculative_tokens == (3 if is_gain else 2), "the rest goes on"


def test_one_step_at_a_time():
    watch = Watch()
    steps = []
    for _ in range(12):
        steps.append(watch.beats(1, [draft(1.0)], missing_share=0.5))
    changes = sum(a != b for a, b in itertools.pairwise(steps))
    assert changes <= 12 / SHRINK_INTERVAL_S


def test_slowly_back_when_drafts_are_at_ease():
    watch = Watch()
    low = watch.beats(20, [draft(1.0)], missing_share=0.5)
    seconds = 0
    while watch.ceilings != NONE:
        watch.beats(1, [draft(0.3)], missing_share=0.0)
        seconds += 1
        assert seconds < 1000
    rungs = 0
    while low != NONE:
        low, rungs = grow(low, Usage(4, 16, 16, 0)), rungs + 1
    assert seconds >= (rungs - 1) * GROW_INTERVAL_S


def test_between_the_two_marks_nothing_moves():
    """Still busy, and a little is missing: neither down nor up, so that it does not swing."""
    watch = Watch()
    low = watch.beats(10, [draft(1.0)], missing_share=0.5)
    settled = watch.beats(10, [draft(LIMIT)], missing_share=0.03)
    assert low != NONE
    assert watch.beats(100, [draft(LIMIT * 0.95)], missing_share=0.03) == settled


@pytest.mark.parametrize("share_a_draft", [True, False])
def test_a_neighbor_that_starves_counts(share_a_draft):
    """They share a draft: who has plenty must leave time to the other."""
    plenty, starving = Watch(), Watch()
    starving.board = plenty.board
    names = ("t", "u") if share_a_draft else ("t",)
    for _ in range(20):
        plenty.beats(1, [draft(1.0)], missing_share=0.0, neighbors=names)
        starving.beats(1, [draft(1.0)], missing_share=1.0, name="u")
    assert (plenty.ceilings != NONE) == share_a_draft


def test_a_new_controller_takes_over_what_is_in_force():
    watch = Watch()
    low = watch.beats(20, [draft(1.0)], missing_share=0.5)
    watch.board = CeilingBoard(LIMIT)
    assert watch.beats(1, [draft(1.0)], missing_share=0.5) == low


def test_a_target_that_restarts_begins_without():
    watch = Watch()
    watch.beats(20, [draft(1.0)], missing_share=0.5)
    watch.ceilings = NONE
    watch.wanted = watch.missing = 0.0
    assert watch.beats(1, [draft(1.0)], missing_share=0.0, boot_id="new") == NONE


def test_utilization_is_weighted_by_sequences():
    assert utilization([]) is None
    assert utilization([draft(None)]) is None
    busy, batch = utilization([draft(1.0, sessions=2, batch=3), draft(0.0, sessions=0, batch=7)])
    assert (busy, batch) == (0.75, 4.0)
