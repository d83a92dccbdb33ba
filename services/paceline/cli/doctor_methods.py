"""`paceline doctor`: which methods of speculation a served model offers, and why not the others.
Pure."""

from __future__ import annotations

from paceline.cli.doctor_checks import Finding
from paceline.config import Offer
from paceline.config.offered import NO_DRAFTS, NO_HEADS, SWITCHED_OFF
from paceline.methods import SpeculationMethod

_FIXES = {
    SWITCHED_OFF: "speculation.method: auto, or another one",
    NO_DRAFTS: "draft.deploy: always, and a draft.model",
    NO_HEADS: "target.medusa: the folder of its heads",
}


def check_methods(model: str, offer: Offer) -> Finding:
    """Never a warning: a model without drafts or heads is a choice."""
    refused: dict[str, list[SpeculationMethod]] = {}
    offered = []
    for method, reason in offer.reasons().items():
        if reason:
            refused.setdefault(reason, []).append(method)
        else:
            offered.append(f"{method} (default)" if method == offer.method else method)
    fact = f"requests may ask for {', '.join(offered)}"
    for reason, methods in refused.items():
        fact += f"; not for {', '.join(methods)}: {reason} ({_FIXES[reason]})"
    return Finding(f"{model} methods", "ok", fact)
