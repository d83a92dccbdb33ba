"""What Serve does not check of a YAML's `autoscaling_policy`: its keys, and what ours needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.autoscaling import knob_problems
from paceline.config.names import DRAFTS, TARGETS, deployment_kind

if TYPE_CHECKING:
    from ray.serve.schema import ServeApplicationSchema

POLICY = "paceline.autoscaling:FleetPolicy"
KEYS = ("policy_function", "policy_kwargs")


def autoscaling_problems(application: ServeApplicationSchema, where: str) -> list[str]:
    """One short phrase per problem; `where` is the dotted path of the application."""
    policy = application.autoscaling_policy
    if policy is None:
        return []
    where = f"{where}.autoscaling_policy"
    problems = [f"unknown key {where}.{key}" for key in policy if key not in KEYS]
    if policy.get("policy_function") != POLICY:
        return problems
    kwargs = policy.get("policy_kwargs", {})
    if not isinstance(kwargs, dict):
        problems.append(f"{where}.policy_kwargs: must be a mapping")
    else:
        problems += [f"{where}.policy_kwargs: {problem}" for problem in knob_problems(kwargs)]
    scaled = {d.name for d in application.deployments if "autoscaling_config" in d.model_fields_set}
    for name in _silent_targets(scaled):
        problems.append(
            f"{where}: {name} must have an autoscaling_config (min_replicas may equal "
            "max_replicas): without one Serve does not ask targets what they need"
        )
    return problems


def _silent_targets(scaled: set[str]) -> list[str]:
    """Those of every model whose drafts are scaled; the first one's where no targets are."""
    parted = [deployment_kind(name) for name in sorted(scaled)]
    asked = {suffix for kind, suffix in parted if kind == TARGETS}
    needed = [suffix for kind, suffix in parted if kind == DRAFTS]
    if not asked and not needed:
        needed = [""]
    return [f"{TARGETS}{suffix}" for suffix in needed if suffix not in asked]
