"""What a setting allows: closed formulas for every scheme, in tokens per second. Pure.

Passes cost what `Costs` says and nothing else; each proposal is accepted independently with the
same probability. So no engine, clock or schedule is known here, and what a run measures can be
held against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The ceiling's search: beyond it no acceptance below 0.99 gains a percent.
MAX_CEILING_K = 64
MAX_LOCKSTEP_K = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """A pass over so many rows takes its base and a share per row, milliseconds."""

    draft_ms: float = 3.0
    verify_ms: float = 25.0
    draft_row_ms: float = 0.01
    verify_row_ms: float = 0.05

    def draft(self, num_rows: float) -> float:
        return self.draft_ms + self.draft_row_ms * num_rows

    def verify(self, num_rows: float) -> float:
        return self.verify_ms + self.verify_row_ms * num_rows


def tokens_per_round(acceptance: float, k: int) -> float:
    """Expected tokens of a round over `k` proposals, the target's own included."""
    if acceptance >= 1.0:
        return k + 1.0
    return (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)


def no_draft(costs: Costs, batch: int) -> float:
    return 1e3 * batch / costs.verify(batch)


def ceiling(costs: Costs, acceptance: float, batch: int) -> float:
    """Every window full at the best K and the target never idle: nobody can do better without
    verifying more than one proposal per position."""
    return max(
        1e3 * batch * tokens_per_round(acceptance, k) / costs.verify(batch * (k + 1))
        for k in range(MAX_CEILING_K + 1)
    )


def lockstep(costs: Costs, acceptance: float, batch: int, k: int, rtt_ms: float = 0.0) -> float:
    """Draft K tokens, verify them, and again; `rtt_ms` per round where the draft is elsewhere."""
    round_ms = k * costs.draft(batch) + costs.verify(batch * (k + 1)) + rtt_ms
    return 1e3 * batch * tokens_per_round(acceptance, k) / round_ms


def best_lockstep_k(costs: Costs, acceptance: float, batch: int, rtt_ms: float = 0.0) -> int:
    return max(
        range(1, MAX_LOCKSTEP_K + 1),
        key=lambda k: lockstep(costs, acceptance, batch, k, rtt_ms),
    )


def draft_ahead(
    costs: Costs,
    acceptance: float,
    batch: int,
    k: int,
    rtt_ms: float = 0.0,
    correction: float = 0.0,
) -> float:
    """The draft runs ahead while the target verifies, and nobody waits.

    A window is full again at once if everything was accepted and the bonus was guessed too, or if
    the correction was prepared for (probability `correction`). Else the next pass finds nothing,
    and the one after it a full window if the plain token was guessed or prepared for meanwhile.
    """
    miss = (1.0 - acceptance ** (k + 1)) * (1.0 - correction)
    # Passes until what was drafted after hearing a correction is back, text going on meanwhile.
    num_empty = math.ceil((rtt_ms + 2 * costs.draft(batch)) / costs.verify(batch))
    resume = (acceptance + (1.0 - acceptance) * correction) ** num_empty
    full = 1.0 if miss == 0.0 else resume / (resume + miss * num_empty)
    tokens = full * tokens_per_round(acceptance, k) + (1.0 - full)
    return 1e3 * batch * tokens / costs.verify(batch * (1 + full * k))


def draft_ahead_alone(
    costs: Costs, acceptance: float, k: int, rtt_ms: float = 0.0, correction: float = 0.0
) -> float:
    """As `draft_ahead` for a lone sequence, which may wait for its window (math.md 2g.2)."""
    hit = acceptance ** (k + 1)
    hit += (1.0 - hit) * correction
    verify_ms, draft_ms = costs.verify(k + 1), costs.draft(1)
    round_ms = (
        verify_ms
        + (1.0 - hit) * (rtt_ms + k * draft_ms)
        + hit * max(0.0, (k + 1) * draft_ms - verify_ms)
    )
    return 1e3 * tokens_per_round(acceptance, k) / round_ms


def best_draft_ahead(
    costs: Costs, acceptance: float, batch: int, rtt_ms: float = 0.0, correction: float = 0.0
) -> float:
    """At the best K that the draft can fill during a pass, 0 included."""
    best = no_draft(costs, batch)
    for k in range(1, MAX_CEILING_K + 1):
        if batch == 1:
            best = max(best, draft_ahead_alone(costs, acceptance, k, rtt_ms, correction))
        if (k + 1) * costs.draft(batch) > costs.verify(batch * (k + 1)):
            continue
        best = max(best, draft_ahead(costs, acceptance, batch, k, rtt_ms, correction))
    return best
