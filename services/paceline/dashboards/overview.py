"""Dashboard: is the service well, and where does it hurt."""

from __future__ import annotations

from paceline.dashboards import panels as p
from paceline.dashboards.panels import Dashboard, Line, Panel, Row, Variable
from paceline.dashboards.promql import Query, ratio
from paceline.metrics import audit_catalog as audit
from paceline.metrics import draft_catalog as draft
from paceline.metrics import fleet_catalog as fleet
from paceline.metrics import gateway_catalog as gateway
from paceline.metrics import target_catalog as target
from paceline.metrics.metric import Metric, Role
from paceline.metrics.process import SPANS, SPANS_DROPPED

Q = Query()

MODEL = Variable("model_name", "Model", f"label_values({fleet.TARGETS.name}, model_name)")
REPLICA = Variable(
    "replica", "Target", f'label_values({target.PASSES.name}{{model_name=~"$model_name"}}, replica)'
)
DRAFT = Variable(
    "draft", "Draft", f'label_values({draft.PASSES.name}{{model_name=~"$model_name"}}, replica)'
)

ERRORS = ratio(Q.per_s(gateway.SUCCESS, finished_reason="error"), Q.per_s(gateway.SUCCESS))
ACCEPTANCE = ratio(Q.per_s(target.NUM_ACCEPTED_TOKENS), Q.per_s(target.NUM_DRAFT_TOKENS))
BUSY = Q.per_s(target.BUSY_SECONDS, "replica")


def quantiles(metric: Metric) -> tuple[Line, ...]:
    return tuple(Line(Q.quantile(q, metric), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


HEALTH = Row(
    "Health",
    (
        Panel(
            "Requests",
            "Choices that ended per second, in whatever way.",
            (Line(Q.per_s(gateway.SUCCESS), "requests"),),
            p.REQUESTS_S, "stat", 3,
        ),
        Panel(
            "Errors",
            "Share of choices that ended in an error; aborts by clients are not errors.",
            (Line(ERRORS, "errors"),),
            p.RATIO, "stat", 3, warn=0.01, bad=0.05,
        ),
        Panel(
            "TTFT p95",
            "Time from the whole body to the first token, that 95 % of choices stay below.",
            (Line(Q.quantile(0.95, gateway.FIRST_TOKEN), "p95"),),
            p.SECONDS, "stat", 3, warn=1.0, bad=2.5,
        ),
        Panel(
            "Tokens",
            "Generated tokens per second, as clients' usage counts them.",
            (Line(Q.per_s(gateway.GENERATION_TOKENS), "tokens"),),
            p.TOKENS_S, "stat", 3,
        ),
        Panel(
            "Acceptance",
            "Accepted share of the proposals that were verified.",
            (Line(ACCEPTANCE, "acceptance"),),
            p.RATIO, "stat", 3, warn=0.5, bad=0.25, is_low_bad=True, high=1.0,
        ),
        Panel(
            "Targets",
            "Target replicas that report and take requests.",
            (Line(Q.gauge(fleet.TARGETS, state="live"), "targets"),),
            p.SHORT, "stat", 3, warn=2, bad=1, is_low_bad=True,
        ),
        Panel(
            "Drafts",
            "Draft replicas that report.",
            (Line(Q.gauge(fleet.DRAFTS, state="live"), "drafts"),),
            p.SHORT, "stat", 3, bad=1, is_low_bad=True,
        ),
        Panel(
            "Controllers",
            "1 while the controller of every chosen model answers; requests do not need it.",
            (Line(Q.gauge(gateway.CONTROLLER_UP, how="min"), "up"),),
            p.BOOL, "stat", 3, bad=1, is_low_bad=True,
        ),
    ),
)  # fmt: skip

REQUESTS = Row(
    "Requests",
    (
        Panel(
            "Choices by how they end",
            "stop and length are answers; abort is a client that left or a deadline.",
            (Line(Q.per_s(gateway.SUCCESS, "finished_reason"), "{{finished_reason}}"),),
            p.REQUESTS_S, is_stacked=True,
        ),
        Panel(
            "HTTP answers",
            "By status, of the routes that generate.",
            (Line(Q.per_s(gateway.HTTP_REQUESTS, "status", path="~/v1/.*"), "{{status}}"),),
            p.REQUESTS_S, is_stacked=True,
        ),
        Panel(
            "Refused, by error code",
            "Requests that ended in an error, by the code that the client was told.",
            (Line(Q.per_s(gateway.REFUSED, "code"), "{{code}}"),),
            p.REQUESTS_S,
        ),
        Panel(
            "In progress",
            "Choices at the gateways, and those that targets run or let wait.",
            (
                Line(Q.gauge(gateway.RUNNING), "at gateways"),
                Line(Q.gauge(target.RUNNING), "running"),
                Line(Q.gauge(target.WAITING), "waiting"),
                Line(Q.gauge(gateway.IN_PROGRESS), "places taken"),
            ),
            p.SHORT,
        ),
        Panel(
            "Retries",
            "Tries after a target was lost; the client sees none of them.",
            (Line(Q.per_s(gateway.RETRIES, "model_name"), "{{model_name}}"),),
            p.REQUESTS_S, warn=0.1,
        ),
        Panel(
            "Limits hit",
            "Named limits that were reached: fields of the configuration.",
            (
                Line(Q.per_s(gateway.LIMITS_HIT, "limit"), "{{limit}}"),
                Line(Q.per_s(target.TARGET_LIMITS, "limit"), "{{limit}} (target)"),
            ),
            p.OPS_S,
        ),
    ),
)  # fmt: skip

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From the whole body to the first token.",
            quantiles(gateway.FIRST_TOKEN),
            p.SECONDS, warn=1.0, width=6,
        ),
        Panel(
            "Inter-token latency",
            "From round to round, shared out equally among the later one's tokens.",
            quantiles(gateway.INTER_TOKEN),
            p.SECONDS, width=6,
        ),
        Panel(
            "Whole request",
            "From the whole body to the last token; not of errors and aborts.",
            quantiles(gateway.E2E),
            p.SECONDS, width=6,
        ),
        Panel(
            "Queue time",
            "From the target's door to a place in the batch.",
            quantiles(target.QUEUE_TIME),
            p.SECONDS, warn=1.0, width=6,
        ),
    ),
)  # fmt: skip

TARGETS = Row(
    "Targets",
    (
        Panel(
            "Busy",
            "Share of the time that the engine computes.",
            (Line(BUSY, "{{replica}}"),),
            p.RATIO, width=6, high=1.0,
        ),
        Panel(
            "Tokens",
            "Committed tokens per second, and prompt tokens that were read.",
            (
                Line(Q.per_s(target.TARGET_TOKENS, "replica"), "{{replica}}"),
                Line(Q.per_s(gateway.PROMPT_TOKENS), "prompts"),
            ),
            p.TOKENS_S, width=6,
        ),
        Panel(
            "Pass time",
            "Time of one forward pass.",
            quantiles(target.PASS_SECONDS),
            p.SECONDS, width=6,
        ),
        Panel(
            "Pass size",
            "Mean rows of a pass, and mean sequences that got a token from one.",
            (
                Line(Q.mean(target.PASS_ROWS, "replica"), "rows {{replica}}"),
                Line(
                    ratio(Q.per_s(target.ROUNDS, "replica"), Q.per_s(target.PASSES, "replica")),
                    "batch {{replica}}",
                ),
            ),
            p.SHORT, width=6,
        ),
        Panel(
            "KV cache",
            "Share of the KV blocks that running texts take.",
            (Line(Q.gauge(target.KV_USAGE, "replica", "max"), "{{replica}}"),),
            p.RATIO, width=6, warn=0.9, bad=0.97, high=1.0,
        ),
        Panel(
            "Prefix cache",
            "Share of the prompt tokens whose KV was found.",
            (
                Line(
                    ratio(
                        Q.per_s(target.PREFIX_HITS, "replica"),
                        Q.per_s(target.PREFIX_QUERIES, "replica"),
                    ),
                    "{{replica}}",
                ),
            ),
            p.RATIO, width=6, high=1.0,
        ),
        Panel(
            "Waiting",
            "Choices without a place.",
            (Line(Q.gauge(target.WAITING, "replica"), "{{replica}}"),),
            p.SHORT, width=6, warn=1,
        ),
        Panel(
            "Trouble",
            "Texts that gave their KV back, failed passes, replicas that fell silent.",
            (
                Line(Q.per_s(target.PREEMPTIONS), "preemptions"),
                Line(Q.per_s(target.FAILED_PASSES), "failed passes"),
                Line(Q.per_s(fleet.TARGETS_LOST), "targets lost"),
            ),
            p.OPS_S, width=6, warn=0.01,
        ),
        Panel(
            "Tracing",
            "Spans handed to exporters, and those that were dropped; none while tracing is off.",
            (
                Line(Q.per_s(SPANS[Role.GATEWAY]), "spans"),
                Line(Q.per_s(SPANS_DROPPED[Role.GATEWAY]), "dropped"),
            ),
            p.OPS_S, width=12,
        ),
        Panel(
            "Losslessness audit",
            "Choices that were run again without a draft and differ, and alarms about laws: both "
            "must stay 0.",
            (
                Line(Q.gauge(audit.MISMATCHES, "model_name"), "mismatches {{model_name}}"),
                Line(Q.gauge(audit.ALARMS, "model_name"), "alarms {{model_name}}"),
            ),
            p.SHORT, width=6, bad=1,
        ),
        Panel(
            "Audited requests",
            "Requests that were run again without a draft, and those sampled that were not, by "
            "why; none while audit.sample_ratio is 0.",
            (
                Line(Q.per_s(audit.REQUESTS), "audited"),
                Line(Q.per_s(audit.SKIPPED, "reason"), "skipped: {{reason}}"),
            ),
            p.REQUESTS_S, width=6,
        ),
    ),
)  # fmt: skip

OVERVIEW = Dashboard(
    "paceline-overview",
    "Paceline / Overview",
    "Requests, latency, throughput and health of one Paceline service.",
    (MODEL, REPLICA),
    (HEALTH, REQUESTS, LATENCY, TARGETS),
)
