"""The losslessness audit: `audit`. Off unless `sample_ratio` is above 0."""

from __future__ import annotations

from pydantic import Field

from paceline.config.section import Section


class AuditConfig(Section):
    """How many finished requests are run again without a draft, and what counts as a difference."""

    sample_ratio: float = Field(
        0.0, ge=0.0, le=1.0, description="share of requests that are run again undrafted; 0 = off"
    )
    max_tokens: int = Field(
        128, ge=1, le=4096, description="tokens of each choice that are compared, from its first on"
    )
    max_prompt_tokens: int = Field(
        4096, ge=1, le=1 << 20, description="requests with a longer prompt are not audited"
    )
    max_pending: int = Field(
        16,
        ge=1,
        le=1024,
        description="requests under way or waiting for their audit; more are not audited",
    )
    max_load: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="audits pause above this share of gateway.max_concurrent_requests",
    )
    tie_tolerance: float = Field(
        0.25,
        ge=0.0,
        le=10.0,
        description="logits closer than this may swap by rounding (bfloat16: 0.25, float32: 0.001)",
    )
    law_tolerance: float = Field(
        0.01,
        ge=0.0,
        le=0.1,
        description="bias of a statistic in [-1, 1] that is put down to rounding (rejection modes)",
    )
    false_alarm_rate: float = Field(
        0.001,
        gt=0.0,
        le=0.1,
        description="chance that a right service ever raises the law alarm (rejection modes)",
    )
