"""What the service promises, and the recorded ratios that dashboards and alerts compare with it.

A promise is a share of good events over 30 days. Burn rate 1 uses up what may go wrong in exactly
that time. An alert needs a high rate over a long window, and over a short one, so that it ends
soon after the trouble does.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.dashboards.promql import Query, ratio
from paceline.metrics import gateway_catalog as gateway

# One of the histogram's bounds.
TTFT_S = 1.0
WINDOWS = ("5m", "30m", "1h", "6h")


@dataclass(frozen=True, slots=True)
class Burn:
    """`rate`: 14.4 over 1 h is 2 % of 30 days' budget, 6 over 6 h is 5 %."""

    rate: float
    long: str
    short: str
    severity: str


FAST = Burn(14.4, "1h", "5m", "critical")
SLOW = Burn(6.0, "6h", "30m", "warning")


@dataclass(frozen=True, slots=True)
class Objective:
    """`good`: the promised share."""

    name: str
    title: str
    good: float

    @property
    def budget(self) -> float:
        return round(1.0 - self.good, 6)

    def recorded(self, window: str) -> str:
        """Name of the recorded bad share, by model."""
        return f"paceline:{self.name}:ratio_rate{window}"

    def bad_share(self, window: str) -> str:
        """The expression that is recorded."""
        query = Query(window, has_variables=False)
        by = "model_name"
        if self is TTFT:
            return f"1 - ({query.share_up_to(TTFT_S, gateway.FIRST_TOKEN, by)})"
        # A model without a single error has no such series only before its first answer.
        bad = query.per_s(gateway.SUCCESS, by, finished_reason="error")
        return ratio(bad, query.per_s(gateway.SUCCESS, by))

    def burns(self, burn: Burn) -> str:
        limit = f"{burn.rate:g} * {self.budget:g}"
        long, short = self.recorded(burn.long), self.recorded(burn.short)
        return f"{long} > {limit} and {short} > {limit}"


TTFT = Objective("slow_first_tokens", f"first token within {TTFT_S:g} s", 0.99)
AVAILABILITY = Objective("failed_choices", "answered without an error", 0.995)
OBJECTIVES = (TTFT, AVAILABILITY)
