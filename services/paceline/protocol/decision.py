"""How many proposals a pass should verify: the argmax of predicted tokens per second. Pure.

For a fixed number of rows the best choice is the proposals that survive most probably, whichever
sequence they belong to (survivals only fall along a window, so that is a prefix of each). The
number of rows is then the best of all: the cost of a pass is a staircase, so looking one row
ahead is not enough. Survivals come as negatives, sorted ascending: the best first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub, truediv

from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.profit import DealState


@dataclass(frozen=True, slots=True)
class Choice:
    """One candidate of a decision: so many proposals per sequence (mean), and what is predicted."""

    num_speculative_tokens: float
    rows: int
    tokens_per_pass: float
    pass_us: float

    @property
    def tokens_per_s(self) -> float:
        return 1e6 * self.tokens_per_pass / self.pass_us if self.pass_us else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The last decision: what it was made from (names to figures, units in the names), the
    candidates in order of K, the chosen one, and why in a sentence."""

    inputs: Mapping[str, float]
    choices: tuple[Choice, ...]
    chosen: int
    reason: str


def best_rows(
    negatives: Sequence[float], num_sequences: int, cost_us: Sequence[float], idle_us: float
) -> tuple[int, float]:
    """The best number of proposals and its tokens per microsecond.

    `cost_us[q]` is the time of a pass with q proposals; each of `num_sequences` gets one token
    whatever becomes of them. The fewest win a tie.
    """
    tokens = accumulate(negatives, sub, initial=float(num_sequences))
    times = cost_us if not idle_us else [us + idle_us for us in cost_us[: len(negatives) + 1]]
    rates = list(map(truediv, tokens, times))
    best = max(rates)
    return rates.index(best), best


def share_rows(
    windows: Sequence[tuple[Survivals, int]], negatives: Sequence[float], num_rows: int
) -> list[int]:
    """Proposals per window (survivals, proposals that may be verified) when the `num_rows` first
    of `negatives` are taken. Equal ones go to the first windows."""
    if not num_rows:
        return [0] * len(windows)
    level = negatives[num_rows - 1]
    counts = [bisect_left(survivals.negatives, level, 0, have) for survivals, have in windows]
    left = num_rows - sum(counts)
    for index, (survivals, have) in enumerate(windows):
        if left < 1:
            break
        count = counts[index]
        if count < have and survivals.negatives[count] == level:
            equal = bisect_right(survivals.negatives, level, count, have) - count
            counts[index] += min(left, equal)
            left -= min(left, equal)
    return counts


def share_evenly(wanted: Sequence[int], max_rows: int) -> list[int]:
    """At most `max_rows` in all; while they are scarce nobody has more than a fair share."""
    counts, left = [], max(0, max_rows)
    for index, count in enumerate(wanted):
        share = -(-left // (len(wanted) - index))
        counts.append(max(0, min(count, share)))
        left -= counts[-1]
    return counts


def best_level(
    groups: Mapping[tuple[Survivals, int], int],
    max_rows: int,
    num_sequences: int,
    cost_us: Sequence[float],
    idle_us: float,
) -> tuple[float, float, Sequence[float]]:
    """Like `best_rows` with every window full: the survival that a proposal must have to be worth
    its row (> 1: none has), tokens per microsecond, and all negatives, sorted.

    `groups`: how many sequences have these survivals and may have so many proposals.
    """
    negatives: list[float] = []
    for (survivals, ceiling), count in groups.items():
        negatives += survivals.negatives[:ceiling] * count
    negatives.sort()
    del negatives[max_rows:]
    num_rows, rate = best_rows(negatives, num_sequences, cost_us, idle_us)
    return (-negatives[num_rows - 1] if num_rows else 2.0), rate, negatives


def rate_at(
    level: float,
    negatives: Sequence[float],
    num_sequences: int,
    cost_us: Sequence[float],
    idle_us: float,
) -> float:
    """Tokens per microsecond when all proposals with a survival of `level` or more are taken."""
    num_rows = bisect_right(negatives, -level)
    return (num_sequences - sum(negatives[:num_rows])) / (cost_us[num_rows] + idle_us)


def choices(
    mean: Survivals,
    num_sequences: int,
    cost_us: Sequence[float],
    idle_us: float,
    ceiling: int,
) -> tuple[Choice, ...]:
    """For K = 0 .. `ceiling` in every sequence, were they all like `mean`: to be looked at."""
    return tuple(
        Choice(
            num_speculative_tokens=float(count),
            rows=num_sequences * (1 + count),
            tokens_per_pass=num_sequences * (1.0 + mean.sums[count]),
            pass_us=cost_us[num_sequences * count] + idle_us,
        )
        for count in range(ceiling + 1)
    )


def reason(options: Sequence[Choice], chosen: int, state: DealState) -> str:
    """Why K is what it is, in a sentence."""
    match state:
        case DealState.OPEN:
            return "drafting was measured to be slower than none: it rests"
        case DealState.CONTROL:
            return "some passes without proposals, to measure what drafting gains"
    without = options[0].tokens_per_s
    if not chosen:
        return f"no proposal is worth its row: {without:.1f} tokens/s without"
    return (
        f"K = {chosen} is predicted to make {options[chosen].tokens_per_s:.1f} tokens/s,"
        f" none {without:.1f}"
    )
