"""What a draft counts: its passes, its sequences, and how often it was wrong."""

from __future__ import annotations

from paceline.metrics.metric import Declare, Metric, Role
from paceline.metrics.target_catalog import PASS_S_BUCKETS

OPEN_STATUSES = ("ok", "busy", "unsupported")
LOSSES = ("expired", "evicted", "poisoned")
LIMITS = ("draft.max_sessions", "draft.session_idle_s")

_DRAFT = Declare(Role.DRAFT, "draft: table.stats")
_TABLE = "draft: table"

PASSES = _DRAFT.counter("draft_passes", "Forward passes of the draft.", "passes")
BUSY_SECONDS = _DRAFT.counter("draft_busy_seconds", "Time that its passes took.", "seconds")
PASS_SECONDS = _DRAFT.histogram(
    "draft_pass_seconds", "Time of one pass of the draft.", "seconds", PASS_S_BUCKETS
)
TOKENS = _DRAFT.counter("draft_tokens", "Tokens drafted, without those of branches.", "tokens")
BRANCHES = _DRAFT.counter("draft_branches", "Branches of which something was drafted.", "branches")
BRANCH_TOKENS = _DRAFT.counter("draft_branch_tokens", "Tokens drafted in branches.", "tokens")
PROMOTIONS = _DRAFT.counter(
    "draft_promotions", "Rewinds that went on with a branch: the draft lost no time.", "branches"
)
REWINDS = _DRAFT.counter(
    "draft_rewinds", "Verdicts that took the draft back: it dropped a wrong tail.", "rewinds"
)
DROPPED_TOKENS = _DRAFT.counter(
    "draft_dropped_tokens", "Drafted tokens that rewinds threw away.", "tokens"
)
NACKS = _DRAFT.counter("draft_nacks", "Verdicts that did not fit and were asked again.", "messages")
OPENS = _DRAFT.counter(
    "draft_opens",
    "Sequences that targets wanted to hand over, by the answer.",
    "sequences",
    labels=("status",),
    values=OPEN_STATUSES,
)
LOST = _DRAFT.counter(
    "draft_sessions_lost",
    "Sequences that the draft gave up, by why.",
    "sequences",
    labels=("reason",),
    values=LOSSES,
)
LIMITS_HIT = _DRAFT.counter(
    "draft_limits_hit",
    "Times that a named limit of a draft was reached.",
    "events",
    labels=("limit",),
    values=LIMITS,
)
SESSIONS = _DRAFT.gauge("draft_sessions", "Sequences that it serves.", "sequences", _TABLE)
MAX_SESSIONS = _DRAFT.gauge(
    "draft_max_sessions", "Sequences that it may serve (draft.max_sessions).", "sequences", _TABLE
)
CONNECTED = _DRAFT.gauge(
    "draft_connected_targets", "Targets with a live stream.", "links", "draft: driver"
)

DRAFT_METRICS: tuple[Metric, ...] = (
    PASSES, BUSY_SECONDS, PASS_SECONDS, TOKENS, BRANCHES, BRANCH_TOKENS, PROMOTIONS, REWINDS,
    DROPPED_TOKENS, NACKS, OPENS, LOST, LIMITS_HIT, SESSIONS, MAX_SESSIONS, CONNECTED,
)  # fmt: skip
