"""Proposers and lookahead: `speculation`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.section import Section
from paceline.methods import SpeculationMethod


class SpeculationConfig(Section):
    """How far the draft may run and what a request may ask for."""

    method: SpeculationMethod = Field(
        "model",
        description="where proposals come from unless a request says so; auto: the best of model, "
        "suffix, ngram and medusa; off: nowhere",
    )
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

    prompt_lookup_min: int = Field(
        2, ge=1, le=16, description="ngram: fewest last tokens that must have occurred before"
    )
    prompt_lookup_max: int = Field(
        4, ge=1, le=16, description="ngram: longest run of last tokens that is looked up"
    )
    suffix_decoding_max_tree_depth: int = Field(
        24, ge=2, le=128, description="suffix: longest run of tokens that is remembered"
    )
    suffix_decoding_max_cached_tokens: int = Field(
        20_000,
        ge=0,
        le=1_000_000,
        description="suffix: tokens of recent outputs that a target remembers, for each of at most "
        "16 cache salts (384 bytes a token); 0 = none",
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0, gt=0.0, le=8.0, description="suffix: proposals per token of the match"
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0.0, le=1.0, description="suffix: proposals rarer than this are not made"
    )
    max_lookup_memory_mib: int = Field(
        1024,
        ge=1,
        le=1_048_576,
        description="ngram, suffix: most memory of a target for all lookups; then recent outputs "
        "are forgotten, and after them the largest sequences go without",
    )
    hybrid_lookup: Literal["ngram", "suffix"] = Field(
        "suffix", description="hybrid: what fills in where the draft's window is empty"
    )
    medusa_max_nodes: int = Field(
        8, ge=1, le=64, description="medusa: candidates verified per sequence and pass, as a tree"
    )

    @model_validator(mode="after")
    def _lookup(self) -> SpeculationConfig:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("speculation needs prompt_lookup_min <= prompt_lookup_max")
        return self

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
