"""The audit's rows of the table of limits (tests/unit/test_limits.py)."""

from __future__ import annotations

_HERE = "unit/gateway/test_audit"

AUDIT_LIMITS: dict[str, str] = {
    "audit.max_tokens": f"{_HERE}.py::test_only_so_many_tokens",
    "audit.max_prompt_tokens": f"{_HERE}.py::test_a_prompt_at_the_limit",
    "audit.max_pending": f"{_HERE}_manners.py::test_so_many_wait_and_no_more",
    "audit.max_load": f"{_HERE}_manners.py::test_it_waits_while_the_gateway_is_busy",
}
AUDIT_NO_LIMITS: dict[str, str] = {
    "audit.sample_ratio": "share",
    "audit.tie_tolerance": "tolerance",
    "audit.law_tolerance": "tolerance",
    "audit.false_alarm_rate": "level",
}
AUDIT_CONSTANTS: dict[str, str] = {"gateway.audit:MAX_TIES": f"{_HERE}.py::test_ties_end"}
