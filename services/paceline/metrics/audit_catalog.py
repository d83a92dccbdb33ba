"""What the losslessness audit counts: of each served model, in the gateway process that audits."""

from __future__ import annotations

from paceline.metrics.metric import Declare, Metric, Role

SKIPS = ("plain", "seeded", "long_prompt", "full", "busy", "error", "undecided")

_AUDIT = Declare(Role.GATEWAY, "gateway: audit")
_MODEL = ("model_name",)

REQUESTS = _AUDIT.counter(
    "audit_requests", "Requests that were run again without a draft.", "requests", labels=_MODEL
)
TOKENS = _AUDIT.counter(
    "audit_tokens", "Output tokens that were compared.", "tokens", labels=_MODEL
)
TIES = _AUDIT.counter(
    "audit_ties", "Tokens that differ, with logits too close to tell.", "tokens", labels=_MODEL
)
MISMATCHES = _AUDIT.counter(
    "audit_mismatches",
    "Choices (greedy, coupled) whose text is not the plain target's. Must be 0.",
    "choices",
    labels=_MODEL,
)
ALARMS = _AUDIT.counter(
    "audit_law_alarms",
    "1 once texts (rejection, block) were seen not to follow the target's law. Must be 0.",
    "alarms",
    labels=_MODEL,
)
SKIPPED = _AUDIT.counter(
    "audit_skipped",
    "Sampled requests that were not audited, by why.",
    "requests",
    labels=(*_MODEL, "reason"),
    values=SKIPS,
)
E_VALUE = _AUDIT.gauge(
    "audit_e_value",
    "Evidence against the target's law (rejection, block); the alarm is at models / alpha.",
    "ratio",
    labels=_MODEL,
)

AUDIT_METRICS: tuple[Metric, ...] = (
    REQUESTS, TOKENS, TIES, MISMATCHES, ALARMS, SKIPPED, E_VALUE
)  # fmt: skip
