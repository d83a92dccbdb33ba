"""Texts that are hard on an index, and how much work a call is."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

LENGTH = 30_000


def de_bruijn(num_ids: int, order: int) -> list[int]:
    """Every run of `order` ids once (greedily: always the largest id that makes a new run)."""
    text, seen = [0] * order, {(0,) * order}
    while True:
        for token in reversed(range(num_ids)):
            run = (*text[len(text) - order + 1 :], token)
            if run not in seen:
                seen.add(run)
                text.append(token)
                break
        else:
            return text


def _random(num_ids: int) -> list[int]:
    draw = random.Random(7)
    return [draw.randrange(num_ids) for _ in range(LENGTH)]


def _phrases() -> list[int]:
    """Pieces of few phrases: many runs that begin alike and end differently."""
    draw = random.Random(8)
    phrases = [[draw.randrange(50_000) for _ in range(30)] for _ in range(40)]
    text: list[int] = []
    while len(text) < LENGTH:
        text += draw.choice(phrases)[draw.randrange(25) : draw.randrange(5, 30)]
    return text[:LENGTH]


HARD = [
    pytest.param(lambda: [5] * LENGTH, id="one token"),
    pytest.param(lambda: [5, 6] * (LENGTH // 2), id="period 2"),
    pytest.param(lambda: de_bruijn(2, 14), id="de Bruijn, 2 ids"),
    pytest.param(lambda: de_bruijn(30, 3), id="de Bruijn, 30 ids"),
    pytest.param(lambda: _random(2), id="random bits"),
    pytest.param(lambda: _random(50_000), id="random ids"),
    pytest.param(lambda: _random(50_000)[: LENGTH // 2] * 2, id="a copy"),
    pytest.param(_phrases, id="phrases"),
]


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that a call executes: work without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def bytes_kept(make: Callable[[], object]) -> int:
    """What `make`'s result holds on to."""
    return _bytes_used(make)[0]


def bytes_at_most(make: Callable[[], object]) -> int:
    """What it takes while it works."""
    return _bytes_used(make)[1]


def _bytes_used(make: Callable[[], object]) -> tuple[int, int]:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = make()
        used, peak = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return used - before, peak - before
