"""What a shaped link does to chunks: when each leaves, and what is damaged."""

from __future__ import annotations

import random

import pytest

from chaos.shape import RETRANSMIT_S, Direction, Shape


def direction(seed: int = 1) -> Direction:
    return Direction(random.Random(seed))


def test_a_plain_wire_delays_and_changes_nothing() -> None:
    wire = direction()
    assert [wire.due_s(t, 100, Shape()) for t in (1.0, 2.0)] == [1.0, 2.0]
    assert wire.damage(b"abc", Shape()) == b"abc"


def test_delay_and_rate_add_up() -> None:
    wire = direction()
    shape = Shape(delay_s=0.5, rate_bytes_s=100)
    # The second chunk waits until the line has sent the first one.
    assert [wire.due_s(0.0, 50, shape), wire.due_s(0.0, 100, shape)] == [1.0, 2.0]


def test_jitter_never_changes_the_order() -> None:
    wire = direction()
    due = [wire.due_s(i / 1000, 10, Shape(delay_s=0.1, jitter_s=0.1)) for i in range(200)]
    assert due == sorted(due)
    assert len(set(due)) > 1


def test_a_lost_chunk_comes_after_a_retransmission_and_holds_up_the_next() -> None:
    wire = direction()
    due = [wire.due_s(0.0, 10, Shape(loss=0.5)) for _ in range(50)]
    times = [due_s / RETRANSMIT_S for due_s in due]
    assert times == pytest.approx([round(time) for time in times])
    assert due == sorted(due)
    assert due[-1] >= RETRANSMIT_S


def test_a_flip_changes_exactly_one_bit() -> None:
    wire = direction()
    data = bytes(range(64))
    damaged = wire.damage(data, Shape(flip=1.0))
    bits = sum((a ^ b).bit_count() for a, b in zip(data, damaged, strict=True))
    assert bits == 1


def test_the_seed_decides() -> None:
    shape = Shape(flip=0.5, jitter_s=0.1, delay_s=0.1)
    first, second = direction(3), direction(3)
    assert [first.damage(b"xyz", shape) for _ in range(20)] == [
        second.damage(b"xyz", shape) for _ in range(20)
    ]
