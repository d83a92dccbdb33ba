"""What `paceline simulate` reads: hardware, fleet, network, traffic, policies, what to vary.

Strict like the rest of the configuration: unknown keys fail, everything has bounds and a unit in
its name. `simulate.load` reads it from YAML. It does not know how anything is simulated.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config import ControllerConfig, SpeculationConfig
from paceline.config.section import Section
from paceline.simulate.traffic_config import TrafficConfig

MAX_PLACES = 1 << 20  # places for sequences in all targets together
MAX_RUNS = 512  # rows of one sweep
MAX_STAIRS = 4096
MAX_ZONES = 64
MAX_KINDS = 64


class Stair(Section):
    """One measured point of a target's pass cost."""

    rows: int = Field(ge=1, description="token rows in the pass")
    ms: float = Field(gt=0, description="what such a pass takes, in milliseconds")


class TargetKind(Section):
    """A kind of machine that holds the large model."""

    base_ms: float = Field(25.0, ge=0, le=1e5, description="cost of a pass")
    row_ms: float = Field(0.05, ge=0, le=1e3, description="added cost of each token row")
    seq_ms: float = Field(0.0, ge=0, le=1e3, description="added cost of each decoding sequence")
    overhead_ms: float = Field(
        0.3, ge=0, le=1e3, description="added to each pass, engine idle: what scheduling takes"
    )
    staircase: tuple[Stair, ...] = Field(
        (), description="measured passes, in place of base_ms and row_ms; the next step up holds"
    )
    price_per_hour: float = Field(0.0, ge=0, description="of one target, in any currency")
    kv_tokens: int = Field(1 << 20, ge=256, description="tokens that its KV cache holds")
    max_num_seqs: int = Field(32, ge=1, le=4096, description="sequences in one pass")
    max_rows_per_pass: int = Field(512, ge=16, description="token rows in one pass")
    max_queued_seqs: int = Field(128, ge=0, le=1 << 20, description="waiting for a place; then 429")

    @field_validator("staircase")
    @classmethod
    def _rising(cls, stairs: tuple[Stair, ...]) -> tuple[Stair, ...]:
        if len(stairs) > MAX_STAIRS:
            raise ValueError(f"at most {MAX_STAIRS} steps")
        for low, high in pairwise(stairs):
            if high.rows <= low.rows or high.ms < low.ms:
                raise ValueError("rows must rise from step to step, and ms must not fall")
        return stairs

    @model_validator(mode="after")
    def _costs(self) -> TargetKind:
        if not (self.base_ms or self.row_ms or self.seq_ms or self.staircase):
            raise ValueError("a pass must cost some time")
        if self.max_rows_per_pass < self.max_num_seqs:
            raise ValueError("max_rows_per_pass must be >= max_num_seqs")
        return self


class DraftKind(Section):
    """A kind of machine that holds the small model."""

    base_ms: float = Field(3.0, ge=0, le=1e5, description="cost of a step")
    row_ms: float = Field(0.01, ge=0, le=1e3, description="added cost of each token row")
    overhead_ms: float = Field(0.2, ge=0, le=1e3, description="added to each step, engine idle")
    price_per_hour: float = Field(0.0, ge=0, description="of one draft, in any currency")
    max_sessions: int = Field(128, ge=1, le=1 << 16, description="sequences over all its targets")
    max_rows_per_pass: int = Field(512, ge=16, description="token rows in one step")

    @model_validator(mode="after")
    def _costs(self) -> DraftKind:
        if not (self.base_ms or self.row_ms or self.overhead_ms):
            raise ValueError("a step must cost some time")
        return self


class HardwareConfig(Section):
    """Kinds of machines by name."""

    targets: dict[str, TargetKind] = Field(
        min_length=1, max_length=MAX_KINDS, description="targets"
    )
    drafts: dict[str, DraftKind] = Field(
        default_factory=dict, max_length=MAX_KINDS, description="drafts"
    )


class FleetConfig(Section):
    """How many of what."""

    target: str = Field(description="kind of the targets, a name under hardware.targets")
    draft: str = Field("", description="kind of the drafts, a name under hardware.drafts")
    num_targets: int = Field(1, ge=1, le=2000, description="target replicas")
    num_drafts: int = Field(0, ge=0, le=2000, description="draft replicas")


class ZoneConfig(Section):
    """A place: part of the fleet."""

    name: str = Field(min_length=1, description="what reports call it")
    target_share: float = Field(ge=0, le=1, description="share of the targets that stand here")
    draft_share: float = Field(ge=0, le=1, description="share of the drafts that stand here")


class NetworkConfig(Section):
    """Round trips between drafts and targets."""

    rtt_ms: float = Field(0.5, ge=0, le=1e4, description="round trip where zones say nothing else")
    zones: tuple[ZoneConfig, ...] = Field((), description="places; none: all stand in one")
    zone_rtt_ms: tuple[tuple[float, ...], ...] = Field(
        (), description="round trips between zones: row = the target's zone, column = the draft's"
    )

    @model_validator(mode="after")
    def _matrix(self) -> NetworkConfig:
        size = len(self.zones)
        if size > MAX_ZONES:
            raise ValueError(f"at most {MAX_ZONES} zones")
        rows = self.zone_rtt_ms
        if len(rows) != size or any(len(row) != size for row in rows):
            raise ValueError(
                f"zone_rtt_ms needs {size} rows of {size} round trips, as many as zones"
            )
        if any(not 0 <= rtt <= 1e4 for row in rows for rtt in row):
            raise ValueError("round trips lie between 0 and 10000 ms")
        for what in ("target_share", "draft_share"):
            if size and abs(sum(getattr(zone, what) for zone in self.zones) - 1) > 1e-6:
                raise ValueError(f"the {what}s of the zones must add up to 1")
        return self


class SloConfig(Section):
    """What a request must keep to count as goodput."""

    ttft_ms: float = Field(1000.0, gt=0, description="longest time to the first token")
    tpot_ms: float = Field(50.0, gt=0, description="longest mean time per output token after it")


class FindConfig(Section):
    """The search for the best number of drafts."""

    what: Literal["draft_target_ratio"] = Field("draft_target_ratio", description="what to find")
    goal: Literal["cost", "throughput"] = Field(
        "cost", description="least cost per million tokens, or most tokens/s (fewest drafts for it)"
    )
    max_drafts_per_target: float = Field(
        2.0, gt=0, le=16, description="the largest ratio that is tried"
    )
    min_goodput: float = Field(
        0.0, ge=0, le=1, description="share of requests that must keep the SLO"
    )


class SimulateConfig(Section):
    """One file of `paceline simulate`."""

    hardware: HardwareConfig = Field(description="kinds of machines")
    fleet: FleetConfig = Field(description="how many of which kind")
    controller: ControllerConfig = Field(
        default_factory=ControllerConfig, description="as in a deployment: assignment, utilization"
    )
    network: NetworkConfig = Field(default_factory=NetworkConfig, description="round trips")
    traffic: TrafficConfig = Field(
        description="requests: when, how long, how well they are guessed"
    )
    speculation: SpeculationConfig = Field(
        default_factory=SpeculationConfig, description="as in a deployment: K and its limits"
    )
    slo: SloConfig = Field(default_factory=SloConfig, description="what counts as goodput")
    duration_s: float = Field(20.0, gt=0, le=3600, description="simulated time that is measured")
    warmup_s: float = Field(5.0, ge=0, le=3600, description="simulated time before it")
    seed: int = Field(1, ge=0, description="same seed, same result")
    policy_sampling: int = Field(
        0, ge=0, le=2000, description="one target in so many asks the policy; 0: at most 16 do"
    )
    has_controller: bool = Field(True, description="ceilings while drafts are scarce")
    has_baseline: bool = Field(True, description="also run the same targets without drafts")
    sweep: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict,
        description="dotted keys of this file and lists of values: one run for each combination",
    )
    find: FindConfig | None = Field(None, description="look for the best draft:target ratio")

    @model_validator(mode="after")
    def _names(self) -> SimulateConfig:
        fleet, hardware = self.fleet, self.hardware
        if fleet.target not in hardware.targets:
            raise ValueError(f"fleet.target: hardware.targets has no {fleet.target!r}")
        needs_draft = fleet.num_drafts or self.find or fleet.draft
        if needs_draft and fleet.draft not in hardware.drafts:
            raise ValueError(f"fleet.draft: hardware.drafts has no {fleet.draft!r}")
        places = fleet.num_targets * self.target_kind.max_num_seqs
        if places > MAX_PLACES:
            raise ValueError(f"num_targets x max_num_seqs is {places}; at most {MAX_PLACES}")
        return self

    @field_validator("speculation")
    @classmethod
    def _matching_mode(cls, speculation: SpeculationConfig) -> SpeculationConfig:
        if speculation.mode != "coupled":
            raise ValueError("only greedy and coupled verification are simulated")
        if speculation.method not in ("model", "off"):
            raise ValueError(
                f"method {speculation.method} is not simulated: only model and off are"
            )
        return speculation

    @model_validator(mode="after")
    def _texts_fit(self) -> SimulateConfig:
        kind = self.target_kind
        for name, prompt, output in self.traffic.longest():
            if prompt + output > kind.kv_tokens // 2:
                raise ValueError(
                    f"traffic class {name}: texts of up to {prompt + output} tokens need"
                    f" hardware.targets.{self.fleet.target}.kv_tokens of twice that"
                )
        return self

    @property
    def target_kind(self) -> TargetKind:
        return self.hardware.targets[self.fleet.target]

    @property
    def draft_kind(self) -> DraftKind | None:
        return self.hardware.drafts.get(self.fleet.draft)

    @property
    def cost_per_hour(self) -> float:
        """Of the whole fleet."""
        fleet, draft = self.fleet, self.draft_kind
        drafts = fleet.num_drafts * draft.price_per_hour if draft else 0.0
        return fleet.num_targets * self.target_kind.price_per_hour + drafts
