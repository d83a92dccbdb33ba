from __future__ import annotations

import pytest

from paceline.rpc.clock import ClockOffset


def test_nothing_is_known_before_the_first_pong() -> None:
    clock = ClockOffset()
    assert clock.rtt_us is None
    assert clock.offset_us is None
    assert clock.to_local_us(5) is None


def test_symmetric_path_gives_the_exact_offset() -> None:
    clock = ClockOffset()
    clock.receive_pong(sent_us=1_000, peer_us=51_100, now_us=1_200)
    assert (clock.rtt_us, clock.offset_us) == (200, 50_000)
    assert clock.to_local_us(51_100) == 1_100


def test_a_peer_behind_us_has_a_negative_offset() -> None:
    clock = ClockOffset()
    clock.receive_pong(sent_us=90_000, peer_us=10, now_us=90_020)
    assert clock.offset_us == -90_000


def test_the_fastest_sample_wins() -> None:
    clock = ClockOffset()
    clock.receive_pong(0, 1_010, 20)
    clock.receive_pong(100, 1_900, 1_100)  # 800 us of queueing on the way there
    assert (clock.rtt_us, clock.offset_us) == (20, 1_000)


def test_an_old_sample_leaves_the_window() -> None:
    clock = ClockOffset(window=2)
    clock.receive_pong(0, 1_005, 10)
    clock.receive_pong(100, 2_150, 200)
    assert clock.rtt_us == 10
    clock.receive_pong(300, 2_340, 380)
    assert (clock.rtt_us, clock.offset_us) == (80, 2_000)


def test_error_is_at_most_half_the_round_trip() -> None:
    for there_us in range(0, 101, 10):
        clock = ClockOffset()
        clock.receive_pong(0, 7_000 + there_us, 100)
        assert clock.offset_us is not None
        assert abs(clock.offset_us - 7_000) <= 50


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="before its ping"):
        ClockOffset().receive_pong(10, 0, 9)
