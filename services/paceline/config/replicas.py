"""The two kinds of replicas that hold a model, and the Controller: `target`, `draft`,
`controller`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.model import BUILTIN_SOURCES, ModelConfig
from paceline.config.names import check_model_name
from paceline.config.section import Section


class TargetConfig(Section):
    """The replica that owns the truth."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="the large model")
    max_num_seqs: int = Field(32, ge=1, le=4096, description="sequences in one pass")
    max_queued_seqs: int = Field(
        128, ge=0, description="sequences waiting for a place; beyond it 429"
    )
    max_queue_s: float = Field(
        60.0, gt=0, description="longest wait for a place before the first token; then 503"
    )
    max_rows_per_pass: int = Field(
        512, ge=16, description="token rows in one pass: decode + verify + prefill chunks"
    )
    max_pass_s: float = Field(
        60.0, gt=0, le=3600, description="a pass that takes longer hangs: the replica is replaced"
    )
    alive_interval_s: float = Field(
        1.0, gt=0, description="how often a request without news is told that it is not lost"
    )
    kv_watermark: float = Field(
        0.02, ge=0.0, lt=1.0, description="share of KV blocks kept free when a sequence starts"
    )
    host: str = Field("127.0.0.1", description="address the Speculation server binds")
    port_min: int = Field(52000, ge=1024, le=65535, description="first port to try")
    port_max: int = Field(52999, ge=1024, le=65535, description="last port to try")
    adapters: dict[str, str] = Field(
        default_factory=dict,
        max_length=64,
        description="LoRA adapters: served model name -> PEFT folder",
    )
    medusa: str = Field(
        "",
        max_length=1024,
        description="Medusa heads: folder, Hub id or alias; toy for a toy; empty: none",
    )

    @field_validator("adapters")
    @classmethod
    def _adapter_names(cls, adapters: dict[str, str]) -> dict[str, str]:
        for name, folder in adapters.items():
            check_model_name(name)
            if not folder:
                raise ValueError(f"{name} has no folder: name the one that PEFT saved it in")
        return adapters

    @model_validator(mode="after")
    def _tokenizer(self) -> TargetConfig:
        if self.model.target_tokenizer:
            raise ValueError("target.model has no target_tokenizer: set draft.model's")
        return self

    @model_validator(mode="after")
    def _heads(self) -> TargetConfig:
        if self.medusa not in ("", "toy") and self.model.source in BUILTIN_SOURCES:
            raise ValueError(f"target.medusa: the heads of model {self.model.source} are named toy")
        return self

    @model_validator(mode="after")
    def _ports(self) -> TargetConfig:
        if self.port_max < self.port_min:
            raise ValueError("target.port_max must be >= target.port_min")
        if self.max_rows_per_pass < self.max_num_seqs:
            raise ValueError("target.max_rows_per_pass must be >= target.max_num_seqs")
        return self


class DraftConfig(Section):
    """A disposable replica that runs ahead."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="the small model")
    deploy: Literal["auto", "always", "never"] = Field(
        "auto",
        description="auto: drafts where speculation.method is model, hybrid or auto; always: for "
        "requests that ask for them, too; never: no draft model at all",
    )
    max_sessions: int = Field(128, ge=1, description="sequences over all targets; beyond it BUSY")
    max_rows_per_pass: int = Field(512, ge=16, description="token rows in one draft pass")
    session_idle_s: float = Field(
        60.0, gt=0, description="a sequence without any message for so long is dropped"
    )
    drain_timeout_s: float = Field(
        3.0, ge=0, le=600, description="a stopping draft serves on so long while targets move"
    )


class ControllerConfig(Section):
    """Soft state: registry and assignment."""

    heartbeat_interval_s: float = Field(1.0, gt=0, description="how often replicas report")
    heartbeat_timeout_s: float = Field(5.0, gt=0, description="silence that removes a replica")
    targets_per_draft: int = Field(
        8, ge=1, description="most targets that one draft serves at once"
    )
    drafts_per_target: int = Field(
        1, ge=1, le=64, description="drafts that each target should have, when there are enough"
    )
    max_draft_utilization: float = Field(
        0.7,
        gt=0.0,
        le=1.0,
        description="busy share above which scarce drafts draft less far (README, The fleet)",
    )

    @model_validator(mode="after")
    def _silence(self) -> ControllerConfig:
        if self.heartbeat_timeout_s <= self.heartbeat_interval_s:
            raise ValueError(
                "controller.heartbeat_timeout_s must be > controller.heartbeat_interval_s"
            )
        return self
