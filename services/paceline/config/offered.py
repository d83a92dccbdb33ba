"""Which methods of `speculation.method` a served model can offer, and why not the others. Pure.

Asked by the configuration's own checks, by the gateway for each request, and by the doctor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.replicas import DraftConfig, TargetConfig
from paceline.config.speculation import SpeculationConfig
from paceline.methods import METHODS, SpeculationMethod

# Those that draft replicas are deployed for, if nothing else is said.
DRAFTED: tuple[SpeculationMethod, ...] = ("model", "hybrid", "auto")
NEED_DRAFTS: tuple[SpeculationMethod, ...] = ("model", "hybrid")

SWITCHED_OFF = "speculation is off in this deployment"
NO_DRAFTS = "this model has no draft replicas"
NO_HEADS = "this model has no Medusa heads"
# The `code` of the 400 for a request that asks for such a method.
REFUSED_CODE = "unsupported_parameter"


@dataclass(frozen=True, slots=True)
class Offer:
    """What one served model has: the deployment's own `method`, draft replicas, Medusa heads."""

    method: SpeculationMethod = "model"
    has_drafts: bool = True
    has_heads: bool = False

    @classmethod
    def of(cls, target: TargetConfig, draft: DraftConfig, speculation: SpeculationConfig) -> Offer:
        return cls(speculation.method, has_drafts(draft, speculation), bool(target.medusa))

    def why_not(self, method: SpeculationMethod) -> str:
        """Why a request may not have `method`, as the end of a sentence; empty where it may.

        `auto` needs nothing: it chooses among what there is. A target that is switched off while it
        runs lets `model` through all the same (`Intake`).
        """
        if method == "off":
            return ""
        if self.method == "off":
            return SWITCHED_OFF
        if method in NEED_DRAFTS and not self.has_drafts:
            return NO_DRAFTS
        if method == "medusa" and not self.has_heads:
            return NO_HEADS
        return ""

    def refusal(self, method: SpeculationMethod) -> str:
        """The sentence of the 400 for a request that may not have `method`; empty where it may."""
        reason = self.why_not(method)
        return f"'speculation.method' cannot be '{method}': {reason}." if reason else ""

    def reasons(self) -> Mapping[SpeculationMethod, str]:
        """Every method, in order, with `why_not`."""
        return {method: self.why_not(method) for method in METHODS}

    @property
    def methods(self) -> tuple[SpeculationMethod, ...]:
        """Those that a request may have."""
        return tuple(method for method in METHODS if not self.why_not(method))


def has_drafts(draft: DraftConfig, speculation: SpeculationConfig) -> bool:
    """Whether the pool has draft replicas."""
    if speculation.method == "off" or draft.deploy == "never":
        return False
    return draft.deploy == "always" or speculation.method in DRAFTED


def check_method(
    where: str, target: TargetConfig, draft: DraftConfig, speculation: SpeculationConfig
) -> None:
    """Raises ValueError for a deployment's method that its own pool cannot have; `where` is the
    path of the pool's settings."""
    method = speculation.method
    if method == "off" and draft.deploy == "always":
        raise ValueError(
            f"{where}draft.deploy is always, but {where}speculation.method is off: nothing would "
            "use the drafts"
        )
    if method in NEED_DRAFTS and draft.deploy == "never":
        raise ValueError(
            f"{where}speculation.method {method} needs draft replicas, but {where}draft.deploy is "
            "never: choose ngram, suffix or auto, or deploy drafts"
        )
    if method == "medusa" and not target.medusa:
        raise ValueError(
            f"{where}speculation.method is medusa, but {where}target.medusa names no heads"
        )
