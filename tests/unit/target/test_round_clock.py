"""The moments of a round: what belongs to it, and which stage each instant of it is in."""

from dataclasses import astuple, replace

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.protocol.messages import DraftTokens
from paceline.target.round_clock import (
    MAX_ROUND_ARRIVALS,
    MAX_ROUND_PASSES,
    Arrival,
    PassRecord,
    PassTimes,
    RoundClock,
)

# By the draft's clock.
DRAFT = DraftTokens(
    1, 1, 3, 0, (5,), 7, draft_us=30, sent_us=1_000_100, began_us=1_000_060, received_us=1_000_050
)
AHEAD_US = 1_000_000


def clock_at(now_us=0):
    clock = RoundClock()
    clock.start(now_us)
    return clock


def test_a_drafts_moments_on_our_clock():
    assert Arrival.of(DRAFT, 120, AHEAD_US, 40) == Arrival(120, 100, 60, 90, 50, 40)
    early = replace(DRAFT, began_us=0, received_us=0)
    assert Arrival.of(early, 120, AHEAD_US) == Arrival(120, 100)
    later = replace(DRAFT, received_us=0)
    assert Arrival.of(later, 120, AHEAD_US) == Arrival(120, 100, 60, 90)


def test_without_a_known_clock_or_moment_there_is_only_the_arrival():
    assert Arrival.of(DRAFT, 120, None, 40) == Arrival(120)
    assert Arrival.of(replace(DRAFT, sent_us=0), 120, AHEAD_US, 40) == Arrival(120)


@example(0, 1, 1, 0, 2)
@given(*[st.integers(0, 2**53 - 1)] * 4, st.integers(-(2**53), 2**53))
def test_no_lie_about_times_runs_backwards(draft_us, sent_us, began_us, received_us, offset_us):
    said = replace(
        DRAFT, draft_us=draft_us, sent_us=sent_us, began_us=began_us, received_us=received_us
    )
    arrival = Arrival.of(said, 120, offset_us, 40)
    assert arrival.received_us <= arrival.began_us <= arrival.ended_us or not arrival.began_us
    assert arrival.ended_us <= arrival.sent_us <= arrival.arrived_us or not arrival.sent_us
    assert min(astuple(arrival)) >= 0


def test_stages_of_a_round_with_one_message():
    clock = clock_at(20)
    clock.told(7, 40)
    clock.arrive(DRAFT, 120, AHEAD_US)
    clock.ready_us = 125
    clock.passed(PassRecord(PassTimes(130, 200, 190)))
    times = clock.close(200).times()
    assert times._asdict() == {
        "wall": 180, "sample": 10, "verify": 60, "queue": 5, "wire_out": 20, "draft": 30,
        "rewind": 10, "wire_back": 10, "window": 20 + 10 + 5,
    }  # fmt: skip
    assert (clock.begin_us, clock.ready_us) == (200, 200)


def test_only_the_verdict_that_the_draft_had_heard_came_back():
    clock = clock_at(20)
    clock.told(8, 40)
    clock.arrive(DRAFT, 120, AHEAD_US)
    assert clock.close(200).times().wire_back == 0


def test_a_round_of_several_passes_is_verified_in_all_of_them():
    """A long prompt is computed in pieces."""
    clock = clock_at(0)
    clock.passed(PassRecord(PassTimes(10, 50, 48)))
    clock.passed(PassRecord(PassTimes(55, 90, 85)))
    times = clock.close(90).times()
    assert (times.queue, times.verify, times.sample) == (15, 38 + 30, 2 + 5)
    assert times.window == 0


def test_the_usual_round_is_what_the_partition_says():
    """There is a short way for a round of one pass that was never held."""
    clock = clock_at(0)
    clock.arrive(DRAFT, 120, AHEAD_US)
    clock.passed(PassRecord(PassTimes(10, 130, 100)))
    short = clock.close(130)
    assert short.times() == replace(short, passes=[*short.passes, short.passes[0]]).times()
    assert short.times()[:4] == (130, 30, 90, 10)


def test_an_engine_that_does_not_know_when_it_began_to_sample():
    clock = clock_at(0)
    clock.passed(PassRecord(PassTimes(10, 130)))
    assert clock.close(130).times()[:4] == (130, 0, 120, 10)


def test_what_arrives_after_the_end_is_of_the_next_round():
    clock = clock_at(0)
    clock.arrive(DRAFT, 120, AHEAD_US)
    clock.arrive(DRAFT, 121, AHEAD_US)
    clock.passed(PassRecord(PassTimes(10, 120)))
    assert [arrival.arrived_us for arrival in clock.close(120).arrivals] == [120]
    assert [arrival.arrived_us for arrival in clock.close(150).arrivals] == [121]


def test_a_flood_of_messages_or_passes_is_bounded():
    clock = clock_at(0)
    for number in range(MAX_ROUND_ARRIVALS + 9):
        clock.arrive(DRAFT, number, AHEAD_US)
    for number in range(1, MAX_ROUND_PASSES + 9):
        clock.passed(PassRecord(PassTimes(10 * number, 10 * number + 5)))
    record = clock.close(5_000)
    assert (len(record.arrivals), len(record.passes)) == (MAX_ROUND_ARRIVALS, MAX_ROUND_PASSES)
    assert record.passes[-1][1].times.started_us == 10 * (MAX_ROUND_PASSES + 8)
    assert record.arrivals[-1].arrived_us == MAX_ROUND_ARRIVALS + 8


def test_of_too_many_messages_the_oldest_are_in_the_window():
    clock = clock_at(0)
    for number in range(1, MAX_ROUND_ARRIVALS + 2):
        clock.arrive(replace(DRAFT, sent_us=100 * number, began_us=0), 100 * number + 10, 0)
    clock.ready_us = 5_000
    clock.passed(PassRecord(PassTimes(5_000, 6_000, 5_500)))
    times = clock.close(6_000).times()
    assert times.wire_out == 10 * MAX_ROUND_ARRIVALS
    assert sum(times[1:]) == times.wall
