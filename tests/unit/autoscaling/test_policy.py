"""The policy as Serve calls it: garbage, failures, knobs, and how it comes into the controller."""

from __future__ import annotations

import math
import pickle
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import cloudpickle
from ray.serve.config import AutoscalingConfig

import paceline.autoscaling
from paceline.autoscaling import FleetPolicy, knob_problems
from paceline.autoscaling.demand import Knobs
from paceline.autoscaling.policy import DRAFTS, TARGETS, Memory
from paceline.config import names
from tests.unit.autoscaling.contexts import DRAFT_METRICS, TARGET_METRICS, Ctx, series

DEPLOY = Path(__file__).parents[3] / "deploy"
KNOBS = Knobs()
SETTLED = Memory(target=1, num_running=1, changed_at=100.0)
TARGETS_UP = {"deployment_name": TARGETS, "target_num_replicas": 1, "current_num_replicas": 1}


def fleet(**drafts: Any) -> dict[str, Any]:
    return {
        "t": Ctx(**TARGETS_UP, raw_metrics=series(TARGET_METRICS)),
        "d": Ctx(**{"target_num_replicas": 0, "current_num_replicas": 0, **drafts}),
    }


class TestPolicy:
    def test_the_targets_call_for_the_first_draft(self) -> None:
        numbers, states = FleetPolicy()(fleet())
        assert numbers == {"t": 1, "d": 1}
        assert states["d"]["num_replicas"] == 1

    def test_drafts_follow_the_targets_of_their_own_model(self) -> None:
        """Those of the first are idle; those of another call for a draft."""
        idle = {**TARGET_METRICS, "num_running": 0, "num_wanting_draft": 0, "num_without_draft": 0}
        contexts = fleet()
        contexts["t"].raw_metrics = series(idle)
        for key, context in fleet().items():
            context.deployment_name += "-other"
            contexts[f"{key}2"] = context
        assert FleetPolicy()(contexts)[0] == {"t": 1, "d": 0, "t2": 1, "d2": 1}
        del contexts["t2"]
        contexts["d2"].target_num_replicas = 3
        assert FleetPolicy()(contexts)[0]["d2"] == 3, "without targets that say it nothing changes"

    def test_its_names_are_those_of_the_deployments(self) -> None:
        assert (TARGETS, DRAFTS) == (names.TARGETS, names.DRAFTS)

    GARBAGE = (None, {}, {"num_running": None}, {"num_running": {0: [None]}}, 7, "x")

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_garbage_of_the_targets_changes_nothing(self, garbage: Any) -> None:
        contexts = {**fleet(target_num_replicas=3, current_num_replicas=3)}
        contexts["d"].raw_metrics = series(DRAFT_METRICS, 3)
        contexts["t"].raw_metrics, contexts["t"].target_num_replicas = garbage, 2
        assert FleetPolicy()(contexts)[0] == {"t": 2, "d": 3}

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_garbage_of_the_drafts_takes_none_away(self, garbage: Any) -> None:
        contexts = fleet(target_num_replicas=3, current_num_replicas=3, raw_metrics=garbage)
        assert FleetPolicy()(contexts)[0] == {"t": 1, "d": 3}

    @pytest.mark.parametrize("value", [math.nan, math.inf, None, "x", True])
    @pytest.mark.parametrize("name", sorted(TARGET_METRICS))
    def test_a_value_that_is_no_number(self, name: str, value: Any) -> None:
        contexts = fleet(target_num_replicas=3, current_num_replicas=3)
        contexts["t"].raw_metrics = series({**TARGET_METRICS, name: value})
        assert FleetPolicy()(contexts)[0] == {"t": 1, "d": 3}

    def test_one_that_has_said_a_thing_only_once_is_waited_for(self) -> None:
        contexts = fleet()
        for points in contexts["t"].raw_metrics.values():
            points[0] = points[0][:1]
        assert FleetPolicy()(contexts)[0] == {"t": 1, "d": 0}

    def test_no_targets_at_all(self) -> None:
        contexts = {"d": Ctx(raw_metrics=series(DRAFT_METRICS, 2))}
        assert FleetPolicy()(contexts)[0] == {"d": 2}
        assert FleetPolicy()({}) == ({}, {})

    def test_a_failure_is_logged_once_a_minute(self, caplog: pytest.LogCaptureFixture) -> None:
        policy, contexts = FleetPolicy(), fleet()
        contexts["d"].policy_state = None  # type: ignore[assignment]
        for seconds in range(130):
            contexts["d"].current_time = 1000.0 + seconds
            assert policy(contexts)[0]["d"] == 0
        assert len([r for r in caplog.records if "no autoscaling decision" in r.message]) == 3

    def test_metrics_are_not_read_at_every_call(self) -> None:
        class Counting(Ctx):
            num_reads = 0

            def __getattribute__(self, name: str) -> Any:
                Counting.num_reads += name == "raw_metrics"
                return super().__getattribute__(name)

        policy, states = FleetPolicy(), {}
        for tick in range(100):
            targets = Counting(**TARGETS_UP, raw_metrics=series(TARGET_METRICS))
            targets.current_time = 1000 + tick / 10
            targets.policy_state = states.get("t", {})
            _, states = policy({"t": targets})
        assert 10 < Counting.num_reads <= 40

    def test_another_deployment_gets_what_serves_own_policy_would_give(self) -> None:
        gateway = Ctx(deployment_name="Gateway", total_num_requests=33, target_num_replicas=1)
        assert FleetPolicy()({"g": gateway})[0] == {"g": 4}


class TestKnobs:
    def test_change_what_is_full(self) -> None:
        contexts = fleet()
        contexts["t"].raw_metrics = series({**TARGET_METRICS, "kv_share": 0.7})
        contexts["t"].policy_state = SETTLED.state()
        assert FleetPolicy(target_kv_share=0.5)(contexts)[0]["t"] == 2
        assert FleetPolicy()(contexts)[0]["t"] == 1

    def test_the_table_in_the_readme(self) -> None:
        rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", (DEPLOY / "README.md").read_text(), re.M)
        assert {name: float(value) for name, value in rows} == asdict(KNOBS)

    def test_wrong_ones_are_named_and_do_not_raise(self, caplog: pytest.LogCaptureFixture) -> None:
        wrong = {"target_kv_share": 1.5, "headroom": "x", "kv": 0.5, "tolerance": 0.05}
        assert knob_problems(wrong) == [
            "target_kv_share: must be a number between 0 and 1, got 1.5",
            "headroom: must be a number between 0 and 1, got 'x'",
            "unknown key kv",
        ]
        assert FleetPolicy(**wrong).knobs == replace(KNOBS, tolerance=0.05)
        assert len(caplog.records) == 3

    def test_the_controller_needs_no_paceline_to_load_it(self, tmp_path: Path) -> None:
        """Serve pickles the policy's module by value; so do we, and load it where there is none."""
        cloudpickle.register_pickle_by_value(paceline.autoscaling)
        try:
            pickled = cloudpickle.dumps(FleetPolicy)
        finally:
            cloudpickle.unregister_pickle_by_value(paceline.autoscaling)
        path = tmp_path / "policy"
        path.write_bytes(pickled)
        code = (
            "import pickle, sys\n"
            "sys.modules['paceline'] = None\n"
            f"policy = pickle.load(open({str(path)!r}, 'rb'))\n"
            "print(policy(tolerance=0.3).knobs.tolerance, policy()({}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout == "0.3 ({}, {})\n"
        assert pickle.loads(pickled).__name__ == "FleetPolicy"  # noqa: S301


def test_the_file_for_trying_names_the_deployments_and_the_policy() -> None:
    (application,) = yaml.safe_load((DEPLOY / "serve" / "autoscale.yaml").read_text())[
        "applications"
    ]
    policy = application["autoscaling_policy"]
    assert policy["policy_function"] == "paceline.autoscaling:FleetPolicy"
    assert knob_problems(policy.get("policy_kwargs", {})) == []
    scaled = {d["name"]: d for d in application["deployments"] if "autoscaling_config" in d}
    assert {TARGETS, DRAFTS} <= scaled.keys()
    assert not any("num_replicas" in deployment for deployment in scaled.values())
    for deployment in scaled.values():
        assert set(deployment["autoscaling_config"]) <= AutoscalingConfig.model_fields.keys()
