"""What Serve would silently ignore in an `autoscaling_policy`."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.schema import ServeApplicationSchema

from paceline.cli.autoscaling_keys import autoscaling_problems

OURS = {"policy_function": "paceline.autoscaling:FleetPolicy"}
TARGETS = {"name": "TargetReplica", "autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}
DRAFTS = {"name": "DraftReplica", "autoscaling_config": {"min_replicas": 0, "max_replicas": 2}}
WHERE = "applications.0.autoscaling_policy"


def problems(policy: dict[str, Any] | None, *deployments: dict[str, Any]) -> list[str]:
    application = ServeApplicationSchema(
        import_path="paceline.app:build_app",
        autoscaling_policy=policy,
        deployments=[*(deployments or (TARGETS, DRAFTS))],
    )
    return autoscaling_problems(application, "applications.0")


@pytest.mark.parametrize(
    "policy",
    [None, OURS, {**OURS, "policy_kwargs": {"headroom": 0.3}}, {"policy_function": "other:own"}],
)
def test_nothing_is_wrong(policy: dict[str, Any] | None) -> None:
    assert problems(policy) == []


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        ({**OURS, "policy_kwarg": {}}, f"unknown key {WHERE}.policy_kwarg"),
        ({**OURS, "policy_kwargs": [1]}, f"{WHERE}.policy_kwargs: must be a mapping"),
        (
            {**OURS, "policy_kwargs": {"head_room": 0.3}},
            f"{WHERE}.policy_kwargs: unknown key head_room",
        ),
        (
            {**OURS, "policy_kwargs": {"headroom": 3}},
            f"{WHERE}.policy_kwargs: headroom: must be a number between 0 and 1, got 3",
        ),
    ],
)
def test_keys(policy: dict[str, Any], problem: str) -> None:
    assert problems(policy) == [problem]


def test_targets_without_an_autoscaling_config_would_say_nothing() -> None:
    (problem,) = problems(OURS, DRAFTS, {"name": "TargetReplica", "num_replicas": 2})
    assert problem.startswith(f"{WHERE}: TargetReplica must have an autoscaling_config")
    assert problems({"policy_function": "other:own"}, DRAFTS) == []


def test_the_targets_of_every_model_whose_drafts_are_scaled() -> None:
    more = [{**DRAFTS, "name": "DraftReplica-a"}, {**DRAFTS, "name": "DraftReplica-b"}]
    asked = {**TARGETS, "name": "TargetReplica-a"}
    (problem,) = problems(OURS, TARGETS, DRAFTS, *more, asked)
    assert problem.startswith(f"{WHERE}: TargetReplica-b must have an autoscaling_config")
    assert problems(OURS, asked, more[0]) == [], "the first model may have a fixed number"
