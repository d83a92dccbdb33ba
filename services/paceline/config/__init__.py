"""The one configuration tree: declared once, frozen, deaf to nothing (unknown keys fail).

`AppConfig()` alone runs the toy model. It arrives as `applications[].args` of a Serve YAML.
Replica counts, CPUs, GPUs and autoscaling live in that YAML's `deployments:` block, never here.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from paceline.config.gateway import ApiKeyConfig, GatewayConfig
from paceline.config.model import ModelConfig
from paceline.config.replicas import ControllerConfig, DraftConfig, TargetConfig
from paceline.config.rpc import RpcConfig
from paceline.config.section import Section
from paceline.config.speculation import SpeculationConfig

__all__ = [
    "ApiKeyConfig",
    "AppConfig",
    "ControllerConfig",
    "DraftConfig",
    "GatewayConfig",
    "ModelConfig",
    "RpcConfig",
    "SpeculationConfig",
    "TargetConfig",
]

# An OpenSession carries a sequence's whole text: no token id needs more bytes than this on the
# wire, and the rest of the message (1024 logit biases are most of it) fits into the slack.
TOKEN_ID_BYTES = 5
MESSAGE_SLACK_BYTES = 16 << 10


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

    @model_validator(mode="after")
    def _silence(self) -> AppConfig:
        if self.gateway.target_silence_s <= 2 * self.target.alive_interval_s:
            raise ValueError("gateway.target_silence_s must be > 2 * target.alive_interval_s")
        return self

    @model_validator(mode="after")
    def _outbox(self) -> AppConfig:
        # One pass queues at most a verdict and an open or close per sequence.
        if self.rpc.max_outbox_messages < 2 * self.target.max_num_seqs:
            raise ValueError("rpc.max_outbox_messages must be >= 2 * target.max_num_seqs")
        return self

    @model_validator(mode="after")
    def _whole_texts_travel(self) -> AppConfig:
        lengths = {
            "target.model.max_model_len": self.target.model.max_model_len,
            "draft.model.max_model_len": self.draft.model.max_model_len,
        }
        name, longest = max(lengths.items(), key=lambda item: item[1])
        if self.rpc.max_tokens_per_item < longest:
            raise ValueError(
                f"rpc.max_tokens_per_item must be >= {name} ({longest}): the longest text "
                "goes to a draft in one message"
            )
        num_bytes = TOKEN_ID_BYTES * longest + MESSAGE_SLACK_BYTES
        if self.rpc.max_message_bytes < num_bytes:
            raise ValueError(
                f"rpc.max_message_bytes must be >= {num_bytes} for {name} ({longest}): the "
                "longest text goes to a draft in one message"
            )
        return self
