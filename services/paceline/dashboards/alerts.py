"""Prometheus rules: recorded ratios, and alerts that say what to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.dashboards.objectives import FAST, OBJECTIVES, SLOW, WINDOWS
from paceline.dashboards.promql import Query, ratio, total
from paceline.metrics import audit_catalog as audit
from paceline.metrics import fleet_catalog as fleet
from paceline.metrics import gateway_catalog as gateway
from paceline.metrics import target_catalog as target
from paceline.metrics.metric import Metric, Role
from paceline.metrics.process import SPANS_DROPPED

Json = dict[str, Any]
CRITICAL, WARNING, INFO = "critical", "warning", "info"

QUEUE_TIME_S = 1.0
MAX_ERROR_SHARE = 0.05
MIN_ACCEPTANCE = 0.2
MAX_KV_USAGE = 0.95
MAX_STARVATION = 0.5
MAX_UTILIZATION = 0.9

Q = Query("5m", has_variables=False)
LONG = Query("10m", has_variables=False)
MODEL, REPLICA = "model_name", "model_name, replica"
# A breaker is looked at when there is something to do: at an idle target it stays as it is.
WHILE_IT_WORKS = f" and on ({REPLICA}) {Q.per_s(target.PASSES, REPLICA)} > 0"


@dataclass(frozen=True, slots=True)
class Alert:
    """`hold`: how long the expression must hold. `summary` and `what` may use `{{ $labels.x }}`
    and `{{ $value }}`."""

    name: str
    query: str
    hold: str
    severity: str
    summary: str
    what: str

    def json(self) -> Json:
        return {
            "alert": f"Paceline{self.name}",
            "expr": self.query,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.what},
        }


def _increase(metric: Metric, window: str, by: str, **labels: str) -> str:
    selected = Q.select(metric, **labels)
    return f"sum by ({by}) (increase({selected}[{window}]))"


FLEET = (
    Alert(
        "NoTarget",
        f"{Q.gauge(fleet.TARGETS, MODEL)} == 0",
        "30s",
        CRITICAL,
        "{{ $labels.model_name }} has no target",
        "No target replica reports to the controller: requests are answered 503. See `serve "
        "status` and the logs of TargetReplica.",
    ),
    Alert(
        "TargetLost",
        f"{_increase(fleet.TARGETS_LOST, '5m', MODEL)} > 0",
        "0s",
        WARNING,
        "{{ $labels.model_name }} lost a target",
        "A target replica fell silent without a goodbye. Its requests were tried again elsewhere; "
        "Serve starts another.",
    ),
    Alert(
        "ControllerDown",
        f"{Q.gauge(gateway.CONTROLLER_UP, MODEL, 'max')} == 0",
        "1m",
        WARNING,
        "The controller of {{ $labels.model_name }} does not answer",
        "Requests do not need it, and assignments stay as they are; but figures of targets and "
        "drafts are missing, and so are alerts on them.",
    ),
    Alert(
        "DraftPoolEmpty",
        f"{Q.gauge(fleet.DRAFTS, MODEL)} == 0 and on ({MODEL}) "
        f"{Q.gauge(target.MAX_K, MODEL, 'max')} > 0",
        "2m",
        WARNING,
        "{{ $labels.model_name }} has no draft",
        "Speculation is on and no draft replica reports: texts are the same, but slower.",
    ),
    Alert(
        "DraftBreakerOpen",
        total(
            f"{Q.gauge(target.BREAKER_STATE, f'{REPLICA}, draft', 'max', state='dark')} == 1"
            + WHILE_IT_WORKS,
            "model_name, draft",
            "max",
        ),
        "2m",
        WARNING,
        "The draft {{ $labels.draft }} is given nothing",
        "It failed a target several times in a row (stalls, lost streams, broken rules): see "
        "`paceline_draft_session_events_total` and that replica's log.",
    ),
    Alert(
        "DraftsScarce",
        f"{Q.gauge(fleet.STARVATION, REPLICA, 'max')} > {MAX_STARVATION:g} and on ({REPLICA}) "
        f"{Q.gauge(fleet.UTILIZATION, REPLICA, 'max')} > {MAX_UTILIZATION:g}",
        "10m",
        INFO,
        "The drafts of {{ $labels.replica }} cannot keep up",
        "They compute nearly all the time, and most of what windows would have brought had not "
        "arrived when passes began: more drafts would help.",
    ),
)

REQUESTS = (
    Alert(
        "QueueTimeHigh",
        f"{Q.quantile(0.95, target.QUEUE_TIME, MODEL)} > {QUEUE_TIME_S:g}",
        "5m",
        WARNING,
        "Requests of {{ $labels.model_name }} wait for a place",
        "95 % of choices wait up to {{ $value | humanizeDuration }}: more targets, or a lower "
        "gateway.max_concurrent_requests.",
    ),
    Alert(
        "ErrorRateHigh",
        ratio(Q.per_s(gateway.SUCCESS, MODEL, finished_reason="error"),
              Q.per_s(gateway.SUCCESS, MODEL)) + f" > {MAX_ERROR_SHARE:g}",
        "5m",
        CRITICAL,
        "{{ $value | humanizePercentage }} of the choices of {{ $labels.model_name }} fail",
        "See `paceline_refused_total` by code, and the gateway's log.",
    ),
    Alert(
        "KVCacheNearFull",
        f"{Q.gauge(target.KV_USAGE, REPLICA, 'max')} > {MAX_KV_USAGE:g}",
        "5m",
        WARNING,
        "The KV cache of {{ $labels.replica }} is nearly full",
        "{{ $value | humanizePercentage }} of its blocks are taken; texts will give their KV back "
        "and compute it again. More blocks, more targets or shorter texts help.",
    ),
    Alert(
        "FailedPasses",
        f"{_increase(target.FAILED_PASSES, '10m', REPLICA)} > 0",
        "0s",
        WARNING,
        "Passes of {{ $labels.replica }} failed",
        "The engine raised; its log has the traceback. One request alone that fails ends in "
        "engine_error.",
    ),
)  # fmt: skip

SPECULATION = (
    Alert(
        "AcceptanceCollapsed",
        ratio(
            LONG.per_s(target.NUM_ACCEPTED_TOKENS, MODEL),
            LONG.per_s(target.NUM_DRAFT_TOKENS, MODEL),
        )
        + f" < {MIN_ACCEPTANCE:g}",
        "10m",
        WARNING,
        "Drafts of {{ $labels.model_name }} are nearly always wrong",
        "Only {{ $value | humanizePercentage }} of their proposals are accepted: another draft "
        "model, or text that this one does not know. Texts are right all the same.",
    ),
    Alert(
        "SpeculationRests",
        f"{Q.gauge(target.SPECULATION_STATE, REPLICA, 'max', state='open')} == 1" + WHILE_IT_WORKS,
        "15m",
        INFO,
        "Drafting does not pay at {{ $labels.replica }}",
        "Control passes without drafts were faster, so that everything rests and is tried again "
        "later (`paceline explain` says more).",
    ),
)

LOSSLESSNESS = (
    Alert(
        "AuditMismatch",
        f"{_increase(audit.MISMATCHES, '15m', MODEL)} > 0",
        "0s",
        CRITICAL,
        "A text of {{ $labels.model_name }} is not the plain target's",
        "The audit ran a request again without its draft and got another text, beyond a tie of "
        "logits: speculation is not lossless here. The gateway's log has the position. Turn it "
        "off (speculation.method: off) until the cause is known.",
    ),
    Alert(
        "AuditLawAlarm",
        f"{Q.gauge(audit.ALARMS, MODEL, 'max')} > 0",
        "0s",
        CRITICAL,
        "Sampled texts of {{ $labels.model_name }} do not follow the target's law",
        "The audit's sequential test has rejected that rejection modes sample from the target's "
        "distribution: see the gateway's log.",
    ),
)

TRACING = (
    Alert(
        "SpansDropped",
        f"{_increase(SPANS_DROPPED[Role.GATEWAY], '10m', 'replica')} > 0",
        "10m",
        INFO,
        "{{ $labels.replica }} drops spans",
        "The collector is away or too slow, or tracing.sample_ratio is too high. Requests do not "
        "wait for it.",
    ),
)


def _burn_alerts() -> tuple[Alert, ...]:
    return tuple(
        Alert(
            f"{objective.name.title().replace('_', '')}Burn{name}",
            objective.burns(burn),
            "2m",
            burn.severity,
            f'The promise "{objective.title}" of {{{{ $labels.model_name }}}} is being broken',
            f"Things go wrong more than {burn.rate:g} times faster than {objective.good:.1%} over "
            f"30 days allows, over {burn.long} and {burn.short}: see the dashboard SLO.",
        )
        for objective in OBJECTIVES
        for name, burn in (("Fast", FAST), ("Slow", SLOW))
    )


ALERTS: tuple[Alert, ...] = (
    *FLEET,
    *REQUESTS,
    *SPECULATION,
    *LOSSLESSNESS,
    *TRACING,
    *_burn_alerts(),
)

RECORDED: dict[str, str] = {
    objective.recorded(window): objective.bad_share(window)
    for objective in OBJECTIVES
    for window in WINDOWS
}


def rules() -> Json:
    """A file of rules as Prometheus reads it."""
    recorded = [{"record": name, "expr": query} for name, query in RECORDED.items()]
    return {
        "groups": [
            {"name": "paceline-objectives", "interval": "15s", "rules": recorded},
            {"name": "paceline-alerts", "rules": [alert.json() for alert in ALERTS]},
        ]
    }
