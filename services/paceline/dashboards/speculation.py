"""Dashboard: what speculation brings, and what becomes of proposals."""

from __future__ import annotations

from paceline.dashboards import panels as p
from paceline.dashboards.overview import ACCEPTANCE, MODEL, REPLICA, Q
from paceline.dashboards.panels import Dashboard, Line, Panel, Row
from paceline.dashboards.promql import ratio, total
from paceline.metrics import draft_catalog as draft
from paceline.metrics import fleet_catalog as fleet
from paceline.metrics import target_catalog as target
from paceline.metrics.metric import Metric

_REPLICA = "{{replica}}"
_SOURCE = "{{source}}"


def _by_replica(above: Metric, below: Metric) -> str:
    return ratio(Q.per_s(above, "replica"), Q.per_s(below, "replica"))


def _share_of_rounds(metric: Metric) -> str:
    return _by_replica(metric, target.ROUNDS)


REJECTED_TOKENS = f"{Q.per_s(target.NUM_DRAFT_TOKENS)} - {Q.per_s(target.NUM_ACCEPTED_TOKENS)}"

WORTH = Row(
    "What it brings",
    (
        Panel(
            "Acceptance",
            "Accepted share of the proposals that were verified.",
            (Line(_by_replica(target.NUM_ACCEPTED_TOKENS, target.NUM_DRAFT_TOKENS), _REPLICA),
             Line(ACCEPTANCE, "all")),
            p.RATIO, width=6, warn=0.5, bad=0.25, is_low_bad=True, high=1.0,
        ),
        Panel(
            "Tokens per round",
            "Mean tokens that one pass commits of a sequence, the target's own included; 1 is "
            "plain decoding.",
            (Line(_by_replica(target.TARGET_TOKENS, target.ROUNDS), _REPLICA),),
            p.SHORT, width=6,
        ),
        Panel(
            "Gain",
            "Tokens per second with drafting over those without: as the policy predicts of full "
            "windows, and as its control passes measure it.",
            (Line(f"{Q.gauge(target.GAIN, 'replica, kind', 'max')} > 0", "{{kind}} {{replica}}"),),
            p.SHORT, width=6, warn=1.05, bad=1.0, is_low_bad=True,
        ),
        Panel(
            "Predicted and measured tokens/s",
            "Of the passes whose outcome the policy predicted: the lines should be one.",
            (
                Line(
                    ratio(Q.per_s(target.PREDICTED_TOKENS, "replica"),
                          Q.per_s(target.PREDICTED_SECONDS, "replica")),
                    "predicted {{replica}}",
                ),
                Line(
                    ratio(Q.per_s(target.MEASURED_TOKENS, "replica"),
                          Q.per_s(target.MEASURED_SECONDS, "replica")),
                    "measured {{replica}}",
                ),
            ),
            p.TOKENS_S, width=6,
        ),
        Panel(
            "Does it pay",
            "The breaker that compares drafting with control passes: open means that it loses and "
            "everything rests.",
            (Line(f"{Q.select(target.SPECULATION_STATE)} == 1", "{{replica}} {{state}}"),),
            p.BOOL, "state-timeline", 24, high=1.0,
        ),
    ),
)  # fmt: skip

WINDOWS = Row(
    "Windows",
    (
        Panel(
            "K in force",
            "How many rounds had which K.",
            (Line(total(Q.rate(target.K_CHOSEN, "bucket"), "le"), "{{le}}"),),
            p.SHORT, "heatmap", 8,
        ),
        Panel(
            "K, and what was verified",
            "Mean K in force, and mean number of proposals in a round: the rest had not arrived.",
            (
                Line(Q.mean(target.K_CHOSEN, "replica"), "K {{replica}}"),
                Line(_share_of_rounds(target.NUM_DRAFT_TOKENS), "verified {{replica}}"),
            ),
            p.SHORT,
        ),
        Panel(
            "Plain and rejected rounds",
            "Share of the rounds without any proposal, and of those that rejected one.",
            (
                Line(_share_of_rounds(target.PLAIN_ROUNDS), "plain {{replica}}"),
                Line(_share_of_rounds(target.REJECTED_ROUNDS), "rejected {{replica}}"),
            ),
            p.RATIO, high=1.0,
        ),
        Panel(
            "Accepted by place in the block",
            "Accepted tokens per second at each place; how fast it falls says what a longer "
            "window would bring.",
            (Line(Q.per_s(target.ACCEPTED_PER_POS, "position"), "{{position}}"),),
            p.TOKENS_S, "bargauge",
        ),
        Panel(
            "Missing proposals",
            "Share of the accepted tokens that a window would have brought but for proposals that "
            "had not arrived.",
            (
                Line(_by_replica(target.MISSING_TOKENS, target.WANTED_TOKENS), _REPLICA),
                Line(Q.gauge(fleet.STARVATION, "replica", "max"), "controller: {{replica}}"),
            ),
            p.RATIO, high=1.0,
        ),
        Panel(
            "Lone waits",
            "Times per second that a sequence alone held its pass for proposals.",
            (Line(Q.per_s(target.LONE_HOLDS, "replica"), _REPLICA),),
            p.OPS_S,
        ),
    ),
)  # fmt: skip

SOURCES = Row(
    "Where proposals come from",
    (
        Panel(
            "Acceptance by source",
            "Accepted share of the proposals of each source: model is the draft replica's, the "
            "others are made inside the target.",
            (
                Line(
                    ratio(
                        Q.per_s(target.ACCEPTED_PER_SOURCE, "source"),
                        Q.per_s(target.DRAFT_TOKENS_PER_SOURCE, "source"),
                    ),
                    _SOURCE,
                ),
            ),
            p.RATIO, width=6, high=1.0,
        ),
        Panel(
            "Accepted tokens by source",
            "Tokens per second that each source has brought.",
            (Line(Q.per_s(target.ACCEPTED_PER_SOURCE, "source"), _SOURCE),),
            p.TOKENS_S, width=6, is_stacked=True,
        ),
        Panel(
            "Chosen",
            "Passes of sequences per second by their source; what auto only tried is a part.",
            (
                Line(Q.per_s(target.CHOSEN_PER_SOURCE, "source"), _SOURCE),
                Line(Q.per_s(target.EXPLORED_PER_SOURCE, "source"), "tried: {{source}}"),
            ),
            p.OPS_S, width=6,
        ),
        Panel(
            "Proposals per round by source",
            "Mean number of proposals in the rounds that had some; broken proposers beside it.",
            (
                Line(
                    ratio(
                        Q.per_s(target.DRAFT_TOKENS_PER_SOURCE, "source"),
                        Q.per_s(target.DRAFTS_PER_SOURCE, "source"),
                    ),
                    _SOURCE,
                ),
                Line(f"{Q.per_s(target.FAILURES_PER_SOURCE, 'source')} > 0", "broken: {{source}}"),
            ),
            p.SHORT, width=6,
        ),
        Panel(
            "Memory of lookups",
            "What texts and recent outputs take, at most; the limit is max_lookup_memory_mib.",
            (Line(Q.gauge(target.LOOKUP_MEMORY, "replica", "max"), _REPLICA),),
            p.BYTES,
        ),
        Panel(
            "Lookups tried and dropped",
            "Trials of lookups that rest, per second; and what was dropped: outputs that were "
            "never learnt, or, for want of memory, recent outputs and the lookups of sequences.",
            (
                Line(Q.per_s(target.LOOKUP_TRIALS), "tried"),
                Line(f"{Q.per_s(target.LOOKUP_DROPPED, 'what')} > 0", "dropped: {{what}}"),
            ),
            p.OPS_S,
        ),
    ),
)  # fmt: skip

WASTE = Row(
    "What becomes of proposals",
    (
        Panel(
            "Proposals",
            "Accepted, rejected, and those that were never verified as the text took another way "
            "before them.",
            (
                Line(Q.per_s(target.NUM_ACCEPTED_TOKENS), "accepted"),
                Line(REJECTED_TOKENS, "rejected"),
                Line(Q.per_s(target.WASTED_TOKENS), "never verified"),
            ),
            p.TOKENS_S, is_stacked=True,
        ),
        Panel(
            "Messages of drafts",
            "By what became of them: kept is a window that grew.",
            (Line(Q.per_s(target.MESSAGES, "disposition"), "{{disposition}}"),),
            p.OPS_S, is_stacked=True,
        ),
        Panel(
            "Rewinds of drafts",
            "Verdicts that took a draft back, and drafted tokens that were thrown away.",
            (
                Line(Q.per_s(draft.REWINDS), "rewinds"),
                Line(Q.per_s(draft.DROPPED_TOKENS), "dropped tokens"),
            ),
            p.OPS_S,
        ),
    ),
)  # fmt: skip

SPECULATION = Dashboard(
    "paceline-speculation",
    "Paceline / Speculation",
    "What speculation brings, how windows fill, and where proposals go.",
    (MODEL, REPLICA),
    (WORTH, WINDOWS, SOURCES, WASTE),
)
