"""`paceline doctor`: which methods of speculation a served model offers, and why not the others.
Downloads nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paceline.cli.doctor_checks import Finding
from paceline.config import Offer, Pool
from paceline.config.offered import NO_DRAFTS, NO_HEADS, SWITCHED_OFF
from paceline.errors import ConfigError
from paceline.methods import SpeculationMethod
from paceline.models import BUILTIN_SOURCES, HUB_ID

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


def check_heads(pool: Pool) -> Iterator[Finding]:
    """Whether the files of the Medusa heads are on this disk; what they hold is for the engine to
    say, and a Hub id for the Hub."""
    target = pool.config.target
    if not target.medusa or target.model.source in BUILTIN_SOURCES:
        return
    from paceline.engine.medusa_source import MEDUSA_ALIASES, resolve_medusa

    name = f"{pool.where}target.medusa"
    is_here = target.medusa in MEDUSA_ALIASES or os.path.exists(os.path.expanduser(target.medusa))
    if HUB_ID.fullmatch(target.medusa) and not is_here:
        yield Finding(
            name, "ok", f"{target.medusa} is no folder here: `paceline serve` asks the Hub"
        )
        return
    try:
        yield Finding(name, "ok", f"heads in {resolve_medusa(target.medusa)}")
    except ConfigError as error:
        yield Finding(name, "fail", str(error), f"{name}: a folder of heads, or leave it out")
