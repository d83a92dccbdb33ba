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


def piece_by_piece(begin, end, parts):
    """The line by definition: each in its turn takes what is free of it."""
    free = [(begin, end)] if end > begin else []
    line = []
    for stage, a, b in sorted(part for part in parts if part[0] is not Stage.WINDOW):
        taken = [(max(low, a), min(high, b)) for low, high in free]
        taken = [(low, high) for low, high in taken if low < high]
        line += [(stage, low, high) for low, high in taken]
        for low, high in taken:
            (old,) = [piece for piece in free if piece[0] <= low and high <= piece[1]]
            free.remove(old)
            free += [piece for piece in ((old[0], low), (high, old[1])) if piece[0] < piece[1]]
    line += [(Stage.WINDOW, low, high) for low, high in free]
    return sorted(line, key=lambda piece: piece[1])


@given(moments, moments, intervals)
def test_the_sweep_finds_the_same_pieces(begin, end, parts):
    assert segments(begin, end, parts) == piece_by_piece(begin, end, parts)


class Counted(int):
    """A moment that counts how often it is looked at."""

    looks = 0

    def __lt__(self, other):
        Counted.looks += 1
        return int(self) < int(other)

    def __le__(self, other):
        Counted.looks += 1
        return int(self) <= int(other)

    def __gt__(self, other):
        Counted.looks += 1
        return int(self) > int(other)


def test_twice_as_many_intervals_are_not_four_times_the_work():
    looks = []
    for number in (500, 1_000):
        parts = [
            (stage, Counted(10 * i + stage), Counted(10 * i + 9))
            for i in range(number)
            for stage in (Stage.WIRE_OUT, Stage.DRAFT)
        ]
        Counted.looks = 0
        assert len(segments(0, 10 * number, parts)) > number
        looks.append(Counted.looks)
    assert looks[1] < 2.5 * looks[0]


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
