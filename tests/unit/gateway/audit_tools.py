"""What tests of the audit share. For tests only."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from paceline.gateway.audit import Auditor
from paceline.gateway.audit_samples import AuditCounts

TEXT = "/v1/completions"
ON = {"sample_ratio": 1.0}
TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"


async def until_idle(audit: Auditor) -> None:
    async with asyncio.timeout(10):
        while not audit.is_idle:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0)


async def done(harness: Any) -> AuditCounts:
    """After every audit."""
    await until_idle(harness.service.audit)
    counts: AuditCounts = harness.service.audit.counts["toy"]
    return counts


def reruns(harness: Any) -> list[Any]:
    return [r for r in harness.targets.requests if "~audit" in r.request_id]


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
