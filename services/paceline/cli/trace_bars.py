"""A round as columns of text: which stage each stands for. Pure; knows neither colors nor signs."""

from __future__ import annotations

from collections.abc import Collection

from paceline.cli.trace_model import NS_PER_MS, Round
from paceline.round_times import Stage, segments

AXIS_COLUMNS = 10  # a label at most this often
_STEPS = (1, 2, 5)


def bar(
    item: Round, stages: Collection[Stage], scale_ns: int, num_columns: int
) -> list[Stage | None]:
    """For each of `num_columns`, which stand for `scale_ns` from the round's begin, the one of
    `stages` that takes most of its time. None: not one of them, or behind the round's end."""
    chosen = [interval for interval in item.intervals if interval[0] in stages]
    shares: list[dict[Stage, float]] = [{} for _ in range(num_columns)]
    for stage, begins, ends in segments(item.began_ns, item.ended_ns, chosen):
        if stage not in stages:
            continue
        low = (begins - item.began_ns) * num_columns / scale_ns
        high = min(num_columns, (ends - item.began_ns) * num_columns / scale_ns)
        for column in range(int(low), min(num_columns, int(high) + 1)):
            share = min(high, column + 1) - max(low, column)
            if share > 0:
                shares[column][stage] = shares[column].get(stage, 0.0) + share
    return [max(share, key=share.__getitem__) if share else None for share in shares]


def axis(scale_ns: int, num_columns: int) -> str:
    """Milliseconds at their columns: |0   |10   |20"""
    scale_ms = scale_ns / NS_PER_MS
    each = step(scale_ms * AXIS_COLUMNS / num_columns)
    line, tick = "", 0
    while (column := round(tick * each * num_columns / scale_ms)) < num_columns:
        label = f"|{tick * each:g}"
        if column + len(label) <= num_columns:
            line = line.ljust(column) + label
        tick += 1
    return line


def step(least: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is no smaller."""
    unit = 1.0
    while unit * 10 <= least:
        unit *= 10
    while unit > least:
        unit /= 10
    return next((unit * digit for digit in _STEPS if unit * digit >= least), unit * 10)
