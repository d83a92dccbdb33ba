"""Settings in which the adaptive lookahead policy must keep its promises, and their best fixed K.

`python -m tests.properties.policy_lab` prints the tables (virtual time: some minutes of one core).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

from paceline.protocol.lookahead import LookaheadLimits
from tests.properties.policy_world import OFF, Setting, fixed, run

ADAPTIVE = LookaheadLimits()


def _constant(num_sequences: int) -> tuple[tuple[int, int], ...]:
    return ((0, num_sequences),)


def stationary() -> dict[str, tuple[Setting, float]]:
    """Settings and virtual seconds. Rows cost .2 % .. 12 % of a pass, round trips .5 .. 20 ms."""
    base = Setting()
    eight, many = _constant(8), _constant(32)
    return {
        "B 1, a .75, row .5 %": (replace(base, row_us=125), 40.0),
        "B 1, a .95, rtt 2 ms": (replace(base, acceptance=0.95, row_us=50, rtt_us=2_000), 40.0),
        "B 1, a .5, rtt 20 ms": (replace(base, acceptance=0.5, rtt_us=20_000), 40.0),
        "B 8, a .8, row 1 %": (
            replace(base, num_sequences=eight, acceptance=0.8, stair=8),
            20.0,
        ),
        "B 8, a .3, row 12 %": (
            replace(base, num_sequences=eight, acceptance=0.3, row_us=3_000),
            20.0,
        ),
        "B 32, a .7, row 1 %": (replace(base, num_sequences=many, acceptance=0.7), 15.0),
    }


def _three_texts(index: int, position: int, now_us: float) -> float:
    """Code, prose and names; each rises and falls by a tenth over 150 tokens."""
    phase = (position + 37 * index) % 300 / 150
    return (0.88, 0.6, 0.15)[index % 3] + 0.1 * (abs(phase - 1) * 2 - 1)


def drifting() -> dict[str, tuple[Setting, float]]:
    base = Setting(row_us=500, classes=("code", "prose", "names"), drift=_three_texts)
    return {
        "B 8, drifting": (replace(base, num_sequences=_constant(8)), 40.0),
        "B 16, drifting": (replace(base, num_sequences=_constant(16)), 30.0),
    }


def _jumps(index: int, position: int, now_us: float) -> float:
    """Right for 150 tokens and wrong for 50; wrong and right; and something between."""
    phase = (position + 37 * index) % 200
    return ((0.92, 0.15)[phase >= 150], (0.7, 0.3)[phase >= 100], (0.92, 0.15)[phase < 150])[
        index % 3
    ]


def _one_jumps(index: int, position: int, now_us: float) -> float:
    return 0.92 if (position + 37 * index) % 200 < 150 else 0.15


def _flips(index: int, position: int, now_us: float) -> float:
    return 0.9 if (position // 40 + index) % 2 else 0.2


def _slow_flips(index: int, position: int, now_us: float) -> float:
    return 0.9 if int(now_us / 5e6) % 2 else 0.15


def _late(index: int, position: int, now_us: float) -> float:
    return 0.05 if now_us < 15e6 else 0.85


HARSH_SEEDS = (21, 22, 23)


def harsh_mixes() -> dict[str, tuple[Setting, float]]:
    base = Setting(row_us=750, classes=("code", "prose", "names"), drift=_jumps)
    return {
        "B 8, mix that jumps": (replace(base, num_sequences=_constant(8)), 20.0),
        "B 32, mix that jumps": (replace(base, num_sequences=_constant(32)), 12.0),
    }


def harsh() -> dict[str, tuple[Setting, float]]:
    """One class whose acceptance changes at a stroke."""
    drifts = {
        "jumps 150 / 50": _one_jumps,
        "flips each 40 positions": _flips,
        "flips each 5 s": _slow_flips,
        "bad for 15 s": _late,
    }
    return {
        f"B {count}, {name}": (
            Setting(row_us=750, num_sequences=_constant(count), drift=drift),
            40.0 if count < 32 else 30.0,
        )
        for count in (1, 8, 32)
        for name, drift in drifts.items()
    }


def useless(num_sequences: int) -> tuple[Setting, float]:
    base = Setting(acceptance=0.0, row_us=100)
    return replace(base, num_sequences=_constant(num_sequences)), 12.0


def far(acceptance: float) -> tuple[Setting, float]:
    return Setting(acceptance=acceptance, base_us=10_000, row_us=100, rtt_us=50_000), 20.0


def contended(until_s: float) -> tuple[Setting, float]:
    base = Setting(acceptance=0.1, row_us=0, contention=0.3)
    if until_s < float("inf"):
        base = replace(base, acceptance=0.6, contention=1.5)
    return replace(base, num_sequences=_constant(8), calm_us=1e6 * until_s), 60.0


def steps(name: str) -> tuple[Setting, float]:
    sizes = (1, 4, 16, 64, 16, 4, 1)
    each_s = 4.0
    changes = tuple((int(1e6 * each_s * i), size) for i, size in enumerate(sizes))
    good = Setting(acceptance=0.6, row_us=300, num_sequences=changes)
    bad = replace(good, acceptance=0.1, contention=0.2)
    return {"good draft": good, "bad draft": bad}[name], each_s * len(sizes)


# The best fixed K of each setting and its neighbors, from the table below.
BEST_K = {
    "B 1, a .75, row .5 %": (7, 8),
    "B 1, a .95, rtt 2 ms": (8, 9),
    "B 1, a .5, rtt 20 ms": (3, 4),
    "B 8, a .8, row 1 %": (6, 8),
    "B 8, a .3, row 12 %": (1, 2),
    "B 32, a .7, row 1 %": (2, 3),
    "B 8, drifting": (3, 4, 5),
    "B 16, drifting": (2, 3, 4),
    "B 8, mix that jumps": (2, 3, 4),
    "B 32, mix that jumps": (1, 2),
    "B 8, jumps 150 / 50": (4, 5, 6),
    "B 8, flips each 40 positions": (2, 3, 4),
    "B 8, flips each 5 s": (5, 6, 7),
    "B 8, bad for 15 s": (4, 5, 6),
}


def _table() -> Iterator[str]:
    yield "| setting | no draft | adaptive | best fixed K | adaptive / best |"
    yield "| --- | --- | --- | --- | --- |"
    for name, (setting, seconds) in {**stationary(), **drifting()}.items():
        off = run(setting, OFF, seconds).rate
        ours = run(setting, ADAPTIVE, seconds).rate
        rates = {k: run(setting, fixed(k), seconds).rate for k in range(1, 13)}
        best = max(rates, key=lambda k: rates[k])
        yield (
            f"| {name} | {off:.1f} | {ours:.1f} ({ours / off:.2f}x) | "
            f"{best}: {rates[best]:.1f} | {ours / rates[best]:.3f} |"
        )
    yield ""
    yield "| setting | adaptive / best fixed K, the worst of three seeds |"
    yield "| --- | --- |"
    for name, (setting, seconds) in {**harsh_mixes(), **harsh()}.items():
        ratios = []
        for seed in HARSH_SEEDS:
            one = replace(setting, seed=seed)
            best_rate = max(run(one, fixed(k), seconds).rate for k in range(1, 11))
            ratios.append(run(one, ADAPTIVE, seconds).rate / best_rate)
        yield f"| {name} | {min(ratios):.3f} |"
    yield ""
    yield "| setting | no draft | adaptive | ratio |"
    yield "| --- | --- | --- | --- |"
    others = {f"acceptance 0, B {count}": useless(count) for count in (1, 8, 32, 64)}
    others |= {f"pass 10 ms, rtt 50 ms, a {a}": far(a) for a in (0.3, 0.6, 0.9)}
    others["contention 30 %, a .1"] = contended(float("inf"))
    for name, (setting, seconds) in others.items():
        off, ours = run(setting, OFF, seconds).rate, run(setting, ADAPTIVE, seconds).rate
        yield f"| {name} | {off:.1f} | {ours:.1f} | {ours / off:.3f} |"


if __name__ == "__main__":
    for line in _table():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
