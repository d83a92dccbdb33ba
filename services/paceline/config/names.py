"""Names of served models, and of the deployments that serve them. Pure."""

from __future__ import annotations

import re

# Hub ids and fine-tuned models' names fit; what logs, metrics and URLs would garble does not.
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
# Serve puts the names of deployments into the names of log files, and parts ids at '#'.
NOT_IN_DEPLOYMENTS = re.compile(r"[^A-Za-z0-9._-]")

GATEWAY = "Gateway"
TARGETS, DRAFTS, CONTROLLER = "TargetReplica", "DraftReplica", "Controller"


def check_model_name(name: str) -> None:
    """Raises ValueError for what no model should be called."""
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(
            f"{name[:130]!r} is no model name: a letter or digit, then at most 127 letters, "
            "digits and . _ : / @ + -"
        )


def deployment_suffix(model: str) -> str:
    """What the deployments of a further pool have at the end of their names."""
    return "-" + NOT_IN_DEPLOYMENTS.sub("_", model)


def deployment_kind(deployment: str) -> tuple[str, str]:
    """(`TargetReplica` and so on, suffix; empty for the first pool)."""
    kind, dash, rest = deployment.partition("-")
    return kind, dash + rest
