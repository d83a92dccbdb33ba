"""The partition of a round: exact whatever overlaps, and who wins where two do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.round_times import STAGE_OF_SPAN, Stage, partition, segments

ORDER = list(Stage)
moments = st.integers(-50, 150)
intervals = st.lists(st.tuples(st.sampled_from(ORDER), moments, moments), max_size=14)


def by_instant(begin, end, parts):
    """The definition, instant by instant: the highest that is there, else the window."""
    counts = dict.fromkeys(ORDER, 0)
    for instant in range(begin, end):
        there = [stage for stage, a, b in parts if a <= instant < b and stage is not Stage.WINDOW]
        counts[min(there, default=Stage.WINDOW)] += 1
    return [counts[stage] for stage in ORDER]


@given(moments, moments, intervals)
def test_eight_parts_add_up_and_follow_the_precedence(begin, end, parts):
    times = partition(begin, end, parts)
    assert min(times) >= 0
    assert sum(times[1:]) == times.wall == max(0, end - begin)
    assert list(times[1:]) == by_instant(begin, end, parts)


@given(moments, moments, intervals, st.randoms(use_true_random=False))
def test_order_does_not_matter(begin, end, parts, random):
    shuffled = parts[:]
    random.shuffle(shuffled)
    assert partition(begin, end, shuffled) == partition(begin, end, parts)


@given(moments, moments, intervals)
def test_segments_tile_the_round_with_the_same_sums(begin, end, parts):
    line = segments(begin, end, parts)
    times = partition(begin, end, parts)
    moment = begin
    for _, a, b in line:
        assert a == moment < b
        moment = b
    assert moment == max(begin, end)
    for stage in ORDER:
        assert sum(b - a for s, a, b in line if s is stage) == times[1 + stage]


def test_a_round_as_it_usually_is():
    parts = [
        (Stage.WIRE_BACK, 0, 10),
        (Stage.REWIND, 10, 15),
        (Stage.DRAFT, 15, 40),
        (Stage.WIRE_OUT, 40, 50),
        (Stage.QUEUE, 55, 60),
        (Stage.VERIFY, 60, 95),
        (Stage.DRAFT, 45, 90),  # ahead, hidden by what is later
        (Stage.SAMPLE, 95, 100),
    ]
    times = partition(0, 100, parts)
    assert times._asdict() == {
        "wall": 100, "sample": 5, "verify": 35, "queue": 5, "wire_out": 10, "draft": 30,
        "rewind": 5, "wire_back": 10, "window": 0,
    }  # fmt: skip


def test_span_names():
    assert sorted(STAGE_OF_SPAN) == sorted(
        ["sample", "verify", "queue", "wire_out", "draft", "rewind", "wire_back", "window"]
    )
