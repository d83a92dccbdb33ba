"""Dashboard: the promises, and how fast what may go wrong is used up."""

from __future__ import annotations

from paceline.dashboards import panels as p
from paceline.dashboards.objectives import FAST, OBJECTIVES, SLOW, TTFT_S, WINDOWS, Objective
from paceline.dashboards.overview import MODEL, REPLICA, Q, quantiles
from paceline.dashboards.panels import Dashboard, Line, Panel, Row
from paceline.metrics import gateway_catalog as gateway
from paceline.metrics import target_catalog as target

_MODEL = '{model_name=~"$model_name"}'


def _row(objective: Objective) -> Row:
    def line(window: str, over: str = "") -> Line:
        name = objective.recorded(window)
        return Line(f"{name}{_MODEL}{over}", f"{{{{model_name}}}} {window}")

    good = tuple(
        Line(f"1 - {objective.recorded(window)}{_MODEL}", f"{{{{model_name}}}} {window}")
        for window in WINDOWS[:1]
    )
    over = f" / {objective.budget:g}"
    title = objective.title[0].upper() + objective.title[1:]
    return Row(
        f"{title}: {objective.good:.1%}",
        (
            Panel(
                "Good share",
                f"Choices that were {objective.title}, of the last five minutes. Promised: "
                f"{objective.good:.1%} over 30 days.",
                good,
                p.RATIO, "stat", 6, warn=objective.good, bad=1 - 5 * objective.budget,
                is_low_bad=True, low=None, high=1.0,
            ),
            Panel(
                "Burn rate",
                f"How many times faster than the promise allows things go wrong. Alerts: "
                f"{FAST.rate:g} over {FAST.long} and {FAST.short}, {SLOW.rate:g} over "
                f"{SLOW.long} and {SLOW.short}.",
                tuple(line(window, over) for window in WINDOWS),
                p.SHORT, width=18, warn=SLOW.rate, bad=FAST.rate,
            ),
        ),
    )  # fmt: skip


DETAILS = Row(
    "What is behind it",
    (
        Panel(
            "Time to first token",
            f"Promised: {TTFT_S:g} s.",
            quantiles(gateway.FIRST_TOKEN),
            p.SECONDS, width=6, warn=TTFT_S,
        ),
        Panel(
            "Queue time",
            "From the target's door to a place in the batch: part of the first token's time.",
            quantiles(target.QUEUE_TIME),
            p.SECONDS, width=6,
        ),
        Panel(
            "Choices by how they end",
            "Only error counts against the promise.",
            (Line(Q.per_s(gateway.SUCCESS, "finished_reason"), "{{finished_reason}}"),),
            p.REQUESTS_S, width=6, is_stacked=True,
        ),
        Panel(
            "Refused, by limit",
            "Refusals are no errors: they keep the others within the promise.",
            (Line(Q.per_s(gateway.LIMITS_HIT, "limit"), "{{limit}}"),),
            p.REQUESTS_S, width=6,
        ),
    ),
)  # fmt: skip

SLO = Dashboard(
    "paceline-slo",
    "Paceline / SLO",
    "Service level objectives and their error budgets; needs deploy/prometheus/rules.yaml.",
    (MODEL, REPLICA),
    (*map(_row, OBJECTIVES), DETAILS),
)
