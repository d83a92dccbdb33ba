"""The policy inside Serve's own delays and rules, over minutes of virtual time."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from ray.serve._private.common import TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from paceline.autoscaling import FleetPolicy
from paceline.autoscaling.policy import DRAFTS, TARGETS
from tests.unit.autoscaling.contexts import DRAFT_METRICS, TARGET_METRICS


class World:
    """Targets and drafts with ideal physics, scaled by the policy inside Serve's own wrapper.

    A draft makes `speed` tokens a second for all its sessions; each running sequence wants
    `rate` of them verified. `late`: a share of them is late, however many drafts there are.
    Replicas take `start_s` to start.
    """

    def __init__(self, config: dict[str, Any], *, noise: float = 0.0, start_s: float = 3.0) -> None:
        self.policy = _apply_app_level_autoscaling_config(FleetPolicy())
        self.configs = {
            TARGETS: AutoscalingConfig(min_replicas=1, max_replicas=4, **config),
            DRAFTS: AutoscalingConfig(min_replicas=0, max_replicas=5, **config),
        }
        self.now, self.noise, self.start_s = 1000.0, noise, start_s
        self.random = Random(7)
        self.target = {TARGETS: 1, DRAFTS: 0}
        self.ready_at: dict[str, list[float]] = {TARGETS: [0.0], DRAFTS: []}
        self.states: dict[str, Any] = {}
        self.sums: dict[str, float] = {}
        self.history: dict[str, list[tuple[float, dict[str, float]]]] = {TARGETS: [], DRAFTS: []}
        self.changes: list[tuple[float, str, int]] = []
        self.speed, self.rate, self.late = 1000.0, 120.0, 0.0

    def running(self, name: str) -> int:
        return sum(ready <= self.now for ready in self.ready_at[name])

    def point(self, load: float) -> None:
        """What each replica would report now: all of a kind report the same."""
        load *= 1 + self.noise * self.random.uniform(-1, 1)
        targets, drafts = self.running(TARGETS), self.running(DRAFTS)
        wanted = load * self.rate
        made = min(wanted, drafts * self.speed) * (1 - self.late)
        for key, amount in {
            "wanted_tokens": wanted / targets,
            "missing_tokens": (wanted - made) / targets,
            "num_verified_tokens": made / targets,
            "drafted": made / drafts if drafts else 0.0,
            "busy_us": 1e6 * self.busy(load, made / (drafts * self.speed)) if drafts else 0.0,
        }.items():
            self.sums[key] = self.sums.get(key, 0.0) + amount * 0.5
        counts = {k: self.sums[k] for k in ("wanted_tokens", "missing_tokens")}
        counts["num_verified_tokens"] = self.sums["num_verified_tokens"]
        gauges = {"num_running": load / targets, "num_wanting_draft": load / targets}
        gauges["num_without_draft"] = 0.0 if drafts else load / targets
        of_target = {**TARGET_METRICS, **gauges, **counts}
        of_draft = {**DRAFT_METRICS, "busy_us": self.sums["busy_us"]}
        of_draft["num_drafted_tokens"] = self.sums["drafted"]
        for name, metrics in ((TARGETS, of_target), (DRAFTS, of_draft)):
            self.history[name].append((self.now, metrics))

    def busy(self, load: float, needed: float) -> float:
        """With `late`, steps take so long that drafts with a sequence never rest."""
        return min(1.0, load / self.running(DRAFTS)) if self.late else needed

    def context(self, name: str) -> AutoscalingContext:
        config = self.configs[name]
        since = self.now - config.look_back_period_s
        seen = [(t, m) for t, m in self.history[name][-40:] if t >= since]
        raw: dict[str, dict[int, list[TimeStampedValue]]] = {}
        ready = [at for at in self.ready_at[name] if at <= self.now]
        for index, at in enumerate(ready):
            for time_s, metrics in seen:
                for key, value in metrics.items():
                    if time_s >= at:
                        points = raw.setdefault(key, {}).setdefault(index, [])
                        points.append(TimeStampedValue(time_s, value))
        return AutoscalingContext(
            deployment_id=name,
            deployment_name=name,
            app_name="app",
            current_num_replicas=len(ready),
            target_num_replicas=self.target[name],
            running_replicas=list(range(len(ready))),
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics=raw,
            capacity_adjusted_min_replicas=config.min_replicas,
            capacity_adjusted_max_replicas=config.max_replicas,
            policy_state=self.states.get(name, {}),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now,
            config=config,
        )

    def run(self, load: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ray.serve.autoscaling_policy.time.time", lambda: self.now)
        for tick in range(int(seconds * 5)):
            self.now += 0.2
            if tick % 3 == 0:  # every 0.6 s; the sums count 0.5 s: no figure depends on it
                self.point(load)
            numbers, self.states = self.policy({n: self.context(n) for n in self.configs})
            for name, number in numbers.items():
                config = self.configs[name]
                number = max(config.min_replicas, min(config.max_replicas, number))
                if number != self.target[name]:
                    self.changes.append((self.now, name, number))
                ready = self.ready_at[name]
                ready += [self.now + self.start_s] * (number - self.target[name])
                self.target[name] = number
                del ready[number:]


QUICK = {
    **{"look_back_period_s": 2.0, "metrics_interval_s": 0.5, "target_ongoing_requests": 16},
    **{"upscale_delay_s": 2.0, "downscale_delay_s": 10.0, "downscale_to_zero_delay_s": 20.0},
}


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
class TestInsideServe:
    def test_up_with_the_load_and_down_to_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """1000 tokens/s a draft, full at 600: 5 sequences of 120 fill one, 15 need three."""
        world = World(QUICK)
        world.run(0, 10, monkeypatch)
        assert world.changes == []
        world.run(4, 30, monkeypatch)
        assert [change[1:] for change in world.changes] == [(DRAFTS, 1)]
        world.run(15, 60, monkeypatch)
        assert (world.target[TARGETS], world.target[DRAFTS]) == (1, 3)
        world.run(40, 60, monkeypatch)
        assert (world.target[TARGETS], world.target[DRAFTS]) == (3, 5)
        before = len(world.changes)
        world.run(4, 60, monkeypatch)
        assert (world.target[TARGETS], world.target[DRAFTS]) == (1, 1)
        fell = world.changes[before:]
        assert min(at for at, _, _ in fell) >= 1160 + QUICK["downscale_delay_s"]
        ended_at = world.now
        world.run(0, 60, monkeypatch)
        assert world.changes[-1][1:] == (DRAFTS, 0)
        assert world.changes[-1][0] >= ended_at + QUICK["downscale_to_zero_delay_s"]

    def test_it_does_not_overshoot_while_replicas_start(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = World(QUICK, start_s=30.0)
        world.run(4, 60, monkeypatch)
        world.run(9, 120, monkeypatch)
        assert [n for _, name, n in world.changes if name == DRAFTS] == [1, 2]

    @pytest.mark.parametrize("load", [4.6, 5.4, 9.5, 10.8, 14.4])
    def test_noise_does_not_make_it_flap(
        self, load: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also around the loads at which one more draft is needed."""
        world = World(QUICK, noise=0.25)
        world.run(load, 400, monkeypatch)
        numbers = [number for _, name, number in world.changes if name == DRAFTS]
        assert numbers == sorted(numbers), "never up and down under a steady load"
        assert len(world.changes) <= 4

    @pytest.mark.parametrize(("load", "most"), [(1, 1), (3, 2), (8, 5), (40, 5)])
    def test_a_draft_that_is_always_late_does_not_make_it_flap(
        self, load: float, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No number of drafts cures that. It costs some, up to where each has one sequence."""
        world = World(QUICK, noise=0.05)
        world.late = 0.4
        world.run(load, 400, monkeypatch)
        numbers = [number for _, name, number in world.changes if name == DRAFTS]
        assert numbers == sorted(numbers)
        assert numbers[-1] <= most
