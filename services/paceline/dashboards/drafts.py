"""Dashboard: the drafts and their links to targets."""

from __future__ import annotations

from paceline.dashboards import panels as p
from paceline.dashboards.overview import DRAFT, MODEL, REPLICA
from paceline.dashboards.panels import Dashboard, Line, Panel, Row
from paceline.dashboards.promql import Query, ratio
from paceline.metrics import draft_catalog as draft
from paceline.metrics import fleet_catalog as fleet
from paceline.metrics import target_catalog as target

Q = Query(has_draft=True)
_DRAFT = "{{replica}}"
_LINK = "{{replica}} - {{draft}}"

POOL = Row(
    "The pool",
    (
        Panel(
            "Drafts",
            "Draft replicas that report.",
            (Line(Q.gauge(fleet.DRAFTS, state="live"), "drafts"),),
            p.SHORT, "stat", 4, bad=1, is_low_bad=True,
        ),
        Panel(
            "Sequences",
            "Of all that the drafts may serve.",
            (Line(ratio(Q.gauge(draft.SESSIONS), Q.gauge(draft.MAX_SESSIONS)), "places"),),
            p.RATIO, "gauge", 4, warn=0.8, bad=0.95, high=1.0,
        ),
        Panel(
            "Refused as full",
            "BUSY answers per second: more drafts are what helps.",
            (Line(Q.per_s(draft.OPENS, status="busy"), "busy"),),
            p.OPS_S, "stat", 4, warn=0.1, bad=1.0,
        ),
        Panel(
            "Dark breakers",
            "Drafts that some target gives nothing to, as they failed it.",
            (Line(Q.gauge(target.BREAKER_STATE, state="dark"), "dark"),),
            p.SHORT, "stat", 4, warn=1, bad=2,
        ),
        Panel(
            "Assigned links",
            "Pairs of draft and target, as the controller wants them, and streams that live.",
            (
                Line(Q.gauge(fleet.ASSIGNMENT), "assigned"),
                Line(Q.gauge(target.DRAFT_LINKS), "live"),
            ),
            p.SHORT, "stat", 4,
        ),
        Panel(
            "Drafts lost",
            "Drafts per second that fell silent without a goodbye.",
            (Line(Q.per_s(fleet.DRAFTS_LOST), "lost"),),
            p.OPS_S, "stat", 4, warn=0.001, bad=0.01,
        ),
        Panel(
            "Who serves whom",
            "The controller's assignment: 1 for each target that a draft should have a stream to.",
            (Line(Q.select(fleet.ASSIGNMENT), "{{draft}} - {{target}}"),),
            p.BOOL, "state-timeline", 12, high=1.0,
        ),
        Panel(
            "Sequences per draft",
            "Sequences that a draft serves, and the targets that it has a stream to.",
            (
                Line(Q.gauge(draft.SESSIONS, "replica"), "sequences {{replica}}"),
                Line(Q.gauge(draft.CONNECTED, "replica"), "targets {{replica}}"),
            ),
            p.SHORT, width=12,
        ),
    ),
)  # fmt: skip

ENGINE = Row(
    "Their work",
    (
        Panel(
            "Busy",
            "Share of the time that a draft computes; dashed, what the controller sees of the "
            "drafts of a target.",
            (
                Line(Q.per_s(draft.BUSY_SECONDS, "replica"), _DRAFT),
                Line(Q.gauge(fleet.UTILIZATION, "replica", "max"), "target {{replica}}"),
            ),
            p.RATIO, warn=0.9, high=1.0,
        ),
        Panel(
            "Tokens",
            "Drafted tokens per second, and those in branches.",
            (
                Line(Q.per_s(draft.TOKENS, "replica"), _DRAFT),
                Line(Q.per_s(draft.BRANCH_TOKENS), "branches"),
            ),
            p.TOKENS_S,
        ),
        Panel(
            "Pass time",
            "Time of one pass of the draft: p50 and p95 over all drafts.",
            tuple(Line(Q.quantile(q, draft.PASS_SECONDS), f"p{q * 100:g}") for q in (0.5, 0.95)),
            p.SECONDS,
        ),
        Panel(
            "Batch",
            "Mean tokens of one pass: sequences that share it.",
            (
                Line(
                    ratio(Q.per_s(draft.TOKENS, "replica"), Q.per_s(draft.PASSES, "replica")),
                    _DRAFT,
                ),
            ),
            p.SHORT,
        ),
        Panel(
            "Rewinds",
            "Rewinds per second, and those that went on with a branch at once.",
            (
                Line(Q.per_s(draft.REWINDS, "replica"), "rewinds {{replica}}"),
                Line(Q.per_s(draft.PROMOTIONS), "promoted branches"),
                Line(Q.per_s(draft.BRANCHES), "branches begun"),
            ),
            p.OPS_S,
        ),
        Panel(
            "Thrown away",
            "Share of the drafted tokens that a rewind threw away.",
            (
                Line(
                    ratio(
                        Q.per_s(draft.DROPPED_TOKENS, "replica"), Q.per_s(draft.TOKENS, "replica")
                    ),
                    _DRAFT,
                ),
            ),
            p.RATIO, high=1.0,
        ),
    ),
)  # fmt: skip

LINKS = Row(
    "Links",
    (
        Panel(
            "Round trip",
            "Least recent round trip between a target and its drafts.",
            (Line(Q.select(target.RTT), _LINK),),
            p.SECONDS,
        ),
        Panel(
            "Sequences per link",
            "Sequences of a target that a draft serves.",
            (Line(Q.select(target.LINK_SESSIONS), _LINK),),
            p.SHORT,
        ),
        Panel(
            "Breakers",
            "State of each draft's circuit breaker at each target: dark gets nothing.",
            (Line(f"{Q.select(target.BREAKER_STATE)} == 1", "{{replica}} - {{draft}} {{state}}"),),
            p.BOOL, "state-timeline", high=1.0,
        ),
        Panel(
            "What befalls links",
            "Attached, drained, gone dark, probed, restored, outlawed.",
            (Line(Q.per_s(target.LINK_EVENT, "event"), "{{event}}"),),
            p.OPS_S,
        ),
        Panel(
            "What befalls sequences",
            "At their drafts: opened, reopened elsewhere, stalled, given up, refused.",
            (
                Line(Q.per_s(target.SESSION_EVENT, "event"), "{{event}}"),
                Line(Q.per_s(target.REOPENS), "handed over again"),
            ),
            p.OPS_S,
        ),
        Panel(
            "Answers and losses of drafts",
            "Opens by answer, sequences that drafts gave up, verdicts asked again, limits.",
            (
                Line(Q.per_s(draft.OPENS, "status"), "open {{status}}"),
                Line(Q.per_s(draft.LOST, "reason"), "lost {{reason}}"),
                Line(Q.per_s(draft.NACKS), "nacks"),
                Line(Q.per_s(draft.LIMITS_HIT, "limit"), "{{limit}}"),
            ),
            p.OPS_S,
        ),
    ),
)  # fmt: skip

DRAFTS = Dashboard(
    "paceline-drafts",
    "Paceline / Drafts",
    "The drafts: who serves whom, how busy they are, and how their links do.",
    (MODEL, REPLICA, DRAFT),
    (POOL, ENGINE, LINKS),
)
