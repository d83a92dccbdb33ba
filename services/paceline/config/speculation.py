"""Proposers and lookahead: `speculation`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section


class SpeculationConfig(Section):
    """How far the draft may run and what a request may ask for."""

    method: Literal["model", "off"] = Field("model", description="proposer of the deployment")
    mode: Literal["coupled", "rejection", "block"] = Field(
        "coupled", description="verification at temperature > 0 (at 0 it is always greedy)"
    )
    lookahead: Literal["adaptive", "fixed"] = Field(
        "adaptive", description="adaptive: K from what is measured; fixed: always the K below"
    )
    num_speculative_tokens: int = Field(
        4,
        ge=1,
        le=64,
        description="draft tokens verified per sequence and pass (K): fixed, or first",
    )
    max_num_speculative_tokens: int = Field(
        16, ge=1, le=64, description="ceiling of K (<= max_draft_ahead); more is cut to it"
    )
    max_draft_ahead: int = Field(
        16,
        ge=1,
        le=256,
        description="tokens a draft may be ahead (2 K + 1 unless round trips are long)",
    )
    max_fan_out: int = Field(
        0, ge=0, le=4, description="likely corrections that a draft prepares for, per position"
    )
    max_lone_wait_ms: float = Field(
        50.0,
        ge=0.0,
        le=1000.0,
        description="cap of a lone sequence's wait for its draft, when that pays; 0 = never",
    )

    @model_validator(mode="after")
    def _ahead(self) -> SpeculationConfig:
        if not (
            self.num_speculative_tokens <= self.max_num_speculative_tokens <= self.max_draft_ahead
        ):
            raise ValueError(
                "speculation needs num_speculative_tokens <= max_num_speculative_tokens"
                " <= max_draft_ahead"
            )
        return self
