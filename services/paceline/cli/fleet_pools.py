"""The pools in the answer of GET /fleet: one for each model that a service serves. Pure."""

from __future__ import annotations

from paceline.cli.values import Json, dicts, mapping, word


def pools(fleet: Json) -> list[tuple[str, Json]]:
    """(served model, its targets and drafts); the name is empty where a service does not say.

    An older service has one pool only, and its fields on top.
    """
    named = mapping(fleet.get("models"))
    found = [(word(name), mapping(pool)) for name, pool in named.items()]
    return found or [("", fleet)]


def targets_of(fleet: Json) -> list[Json]:
    """Those of every pool."""
    return [target for _, pool in pools(fleet) for target in dicts(pool.get("targets"))]
