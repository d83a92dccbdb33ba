"""The one configuration tree: declared once, frozen, deaf to nothing (unknown keys fail).

`AppConfig()` alone runs the toy model. It arrives as `applications[].args` of a Serve YAML.
Replica counts, CPUs, GPUs and autoscaling live in that YAML's `deployments:` block, never here.
The top-level `target`, `draft` and `speculation` are the first served model; `models` has more,
each with replicas of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, field_validator, model_validator

from paceline.config.audit import AuditConfig
from paceline.config.gateway import ApiKeyConfig, GatewayConfig
from paceline.config.logging import LoggingConfig
from paceline.config.model import ModelConfig
from paceline.config.names import (
    CONTROLLER,
    DRAFTS,
    GATEWAY,
    TARGETS,
    check_model_name,
    deployment_suffix,
)
from paceline.config.observability import TracingConfig
from paceline.config.offered import Offer
from paceline.config.pool import PoolConfig, check_names, check_pool, pool_path
from paceline.config.rejection_log import RejectionLogConfig
from paceline.config.replicas import ControllerConfig, DraftConfig, TargetConfig
from paceline.config.rpc import RpcConfig
from paceline.config.section import Section
from paceline.config.speculation import SpeculationConfig

__all__ = [
    "ApiKeyConfig",
    "AppConfig",
    "AuditConfig",
    "ControllerConfig",
    "DraftConfig",
    "GatewayConfig",
    "LoggingConfig",
    "ModelConfig",
    "Offer",
    "Pool",
    "PoolConfig",
    "RejectionLogConfig",
    "RpcConfig",
    "SpeculationConfig",
    "TargetConfig",
    "TracingConfig",
]


class AppConfig(Section):
    """Everything; `AppConfig()` runs the toy model on a laptop."""

    gateway: GatewayConfig = Field(default_factory=GatewayConfig, description="HTTP front door")
    target: TargetConfig = Field(default_factory=TargetConfig, description="target replicas")
    draft: DraftConfig = Field(default_factory=DraftConfig, description="draft replicas")
    speculation: SpeculationConfig = Field(
        default_factory=SpeculationConfig, description="proposers and lookahead"
    )
    rpc: RpcConfig = Field(default_factory=RpcConfig, description="draft <-> target streams")
    controller: ControllerConfig = Field(
        default_factory=ControllerConfig, description="registry and assignment"
    )
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="log lines")
    tracing: TracingConfig = Field(
        default_factory=TracingConfig, description="spans of requests and rounds"
    )
    audit: AuditConfig = Field(
        default_factory=AuditConfig, description="re-runs that check losslessness"
    )
    rejection_log: RejectionLogConfig = Field(
        default_factory=RejectionLogConfig, description="rejected proposals, to train drafts with"
    )
    models: dict[str, PoolConfig] = Field(
        default_factory=dict,
        max_length=16,
        description="more served models by name: target, draft, speculation, chat_template, "
        "tool_call_format, reasoning_format",
    )

    @field_validator("models")
    @classmethod
    def _model_names(cls, models: dict[str, PoolConfig]) -> dict[str, PoolConfig]:
        for name in models:
            check_model_name(name)
        return models

    @model_validator(mode="after")
    def _distinct_names(self) -> AppConfig:
        check_names(self.gateway.served_model_name, self.target, self.models)
        return self

    @model_validator(mode="after")
    def _consistent_pools(self) -> AppConfig:
        check_pool("", self, self.gateway, self.rpc)
        for name, pool in self.models.items():
            check_pool(pool_path(name), pool, self.gateway, self.rpc)
        return self

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Every served model with replicas of its own, the top-level one first."""
        first = self.model_copy(update={"models": {}})
        more = [
            Pool(name, deployment_suffix(name), pool_path(name), self._config_of(name, pool))
            for name, pool in self.models.items()
        ]
        return (Pool(self.gateway.served_model_name, "", "", first), *more)

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """What requests may name: of each pool its model, then its adapters."""
        return tuple(
            name for pool in self.pools for name in (pool.name, *pool.config.target.adapters)
        )

    @property
    def deployments(self) -> tuple[str, ...]:
        """Names of the application's Serve deployments."""
        return (GATEWAY, *(name for pool in self.pools for name in pool.deployments))

    def _config_of(self, name: str, pool: PoolConfig) -> AppConfig:
        """The configuration of an application that serves only this further model."""
        gateway = {
            "served_model_name": name,
            "chat_template": pool.chat_template,
            "tool_call_format": pool.tool_call_format,
            "reasoning_format": pool.reasoning_format,
        }
        parts = {
            "gateway": self.gateway.model_copy(update=gateway),
            "target": pool.target,
            "draft": pool.draft,
            "speculation": pool.speculation,
            "models": {},
        }
        return self.model_copy(update=parts)


@dataclass(frozen=True, slots=True)
class Pool:
    """One served model's replicas: the end of their deployments' names, the path of their settings
    (both empty for the first), and `config` as if there were no other."""

    name: str
    suffix: str
    where: str
    config: AppConfig

    @property
    def offer(self) -> Offer:
        """What its requests may ask for."""
        return Offer.of(self.config.target, self.config.draft, self.config.speculation)

    @property
    def deployments(self) -> tuple[str, ...]:
        kinds = (TARGETS, *([DRAFTS] if self.offer.has_drafts else []), CONTROLLER)
        return tuple(f"{kind}{self.suffix}" for kind in kinds)
