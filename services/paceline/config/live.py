"""What may change while a deployment runs: `user_config` of TargetReplica and Controller (of any
pool: TargetReplica-NAME) in a Serve YAML (`serve deploy` again; no replica restarts).

A field that is not given keeps the value of `args`. Unknown keys fail, as everywhere.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from paceline.config import AppConfig
from paceline.config.names import CONTROLLER, TARGETS, deployment_kind
from paceline.config.offered import SWITCHED_OFF, Offer
from paceline.config.replicas import ControllerConfig
from paceline.config.section import Section
from paceline.config.speculation import SpeculationConfig
from paceline.methods import SpeculationMethod


class LiveTargetConfig(Section):
    """`user_config` of TargetReplica. What it says of K holds for requests in progress too."""

    method: SpeculationMethod | None = Field(None, description="speculation.method")
    lookahead: Literal["adaptive", "fixed"] | None = Field(
        None, description="speculation.lookahead"
    )
    num_speculative_tokens: int | None = Field(
        None, ge=1, le=64, description="speculation.num_speculative_tokens"
    )
    max_num_speculative_tokens: int | None = Field(
        None, ge=1, le=64, description="speculation.max_num_speculative_tokens"
    )
    max_draft_ahead: int | None = Field(
        None, ge=1, le=256, description="speculation.max_draft_ahead"
    )
    max_fan_out: int | None = Field(None, ge=0, le=4, description="speculation.max_fan_out")
    max_lone_wait_ms: float | None = Field(
        None, ge=0.0, le=1000.0, description="speculation.max_lone_wait_ms"
    )

    @staticmethod
    def of(user_config: Any, offer: Offer, where: str = "") -> LiveTargetConfig:
        """For a target that has what `offer` says; `where`: the path of its pool's settings.
        Raises ValidationError."""
        context = {"offer": offer, "where": where}
        return LiveTargetConfig.model_validate(user_config, context=context)

    @field_validator("method")
    @classmethod
    def _offered(
        cls, method: SpeculationMethod | None, info: ValidationInfo
    ) -> SpeculationMethod | None:
        offer, where = (info.context or {}).get("offer"), (info.context or {}).get("where", "")
        if method is None or offer is None or not (reason := offer.why_not(method)):
            return method
        if reason == SWITCHED_OFF:
            reason = f"args.{where}speculation.method is off: choose another one there"
        raise ValueError(reason)

    def apply(self, base: SpeculationConfig) -> SpeculationConfig:
        """`base` with what is given here; raises what a bad combination raises."""
        return SpeculationConfig(**{**base.model_dump(), **_given(self)})


class LiveControllerConfig(Section):
    """`user_config` of Controller."""

    targets_per_draft: int | None = Field(None, ge=1, description="controller.targets_per_draft")
    drafts_per_target: int | None = Field(
        None, ge=1, le=64, description="controller.drafts_per_target"
    )
    max_draft_utilization: float | None = Field(
        None, gt=0.0, le=1.0, description="controller.max_draft_utilization"
    )

    def apply(self, base: ControllerConfig) -> ControllerConfig:
        return ControllerConfig(**{**base.model_dump(), **_given(self)})


def check_user_config(deployment: str, user_config: Any, config: AppConfig) -> None:
    """What a replica would say of its `user_config`, before there is one. Raises ValidationError;
    ValueError for a deployment that has no knobs."""
    kind, suffix = deployment_kind(deployment)
    pool = next((pool for pool in config.pools if pool.suffix == suffix), None)
    if kind == TARGETS and pool is not None:
        live = LiveTargetConfig.of(user_config, pool.offer, pool.where)
        live.apply(pool.config.speculation)
    elif kind == CONTROLLER and pool is not None:
        LiveControllerConfig.model_validate(user_config).apply(config.controller)
    else:
        raise ValueError(f"{deployment} takes no user_config: {TARGETS} and {CONTROLLER} do")


def _given(section: Section) -> dict[str, Any]:
    return {name: value for name, value in section if value is not None}
