"""Where ranks may run, without Ray: what a deployment must have, and what its bundles become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from paceline.config import ModelConfig
from paceline.engine.base import EngineBroken, StepItem
from paceline.errors import ConfigError
from paceline.rank_actors import actor_options, load_replica_engine, own_placement_group
from paceline.sampling.params import SamplingParams

SHARED = ModelConfig(source="/models/m", tensor_parallel_size=3)


def place_in(monkeypatch: pytest.MonkeyPatch, bundles: list[dict[str, float]] | None) -> Any:
    group = None if bundles is None else SimpleNamespace(bundle_specs=bundles)
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: group)
    return group


@pytest.mark.parametrize("bundles", [None, [], [{"CPU": 1.0}] * 2])
async def test_too_few_bundles_are_refused_with_what_to_write(
    monkeypatch: pytest.MonkeyPatch, bundles: list[dict[str, float]] | None
) -> None:
    place_in(monkeypatch, bundles)
    with pytest.raises(ConfigError) as refused:
        await load_replica_engine(SHARED)
    assert f"this deployment has {len(bundles or [])}" in str(refused.value)
    assert "placement_group_bundles: [{CPU: 1}, {CPU: 1}, {CPU: 1}]" in str(refused.value)


@pytest.mark.parametrize("num_bundles", [3, 4])
def test_enough_bundles(monkeypatch: pytest.MonkeyPatch, num_bundles: int) -> None:
    group = place_in(monkeypatch, [{"CPU": 1.0}] * num_bundles)
    assert own_placement_group(SHARED) is group


@pytest.mark.parametrize("source", ["toy", "timed"])
async def test_a_built_in_model_has_nothing_to_share(source: str) -> None:
    model = ModelConfig(source=source, tensor_parallel_size=2)
    for medusa in ("", "toy"):
        with pytest.raises(ConfigError, match="has no weights to share"):
            await load_replica_engine(model, medusa=medusa)


@pytest.mark.parametrize(
    ("bundle", "options"),
    [
        ({"CPU": 0.5}, {"num_cpus": 0.5}),
        ({"GPU": 1.0}, {"num_cpus": 0, "num_gpus": 1.0}),
        (
            {"CPU": 2.0, "GPU": 1.0, "memory": 1e9, "large": 0.1},
            {"num_cpus": 2.0, "num_gpus": 1.0, "resources": {"large": 0.1}},
        ),
    ],
)
def test_an_actor_takes_its_bundle(bundle: dict[str, float], options: dict[str, Any]) -> None:
    assert actor_options(bundle) == options


async def test_one_process_has_no_ranks() -> None:
    engine = await load_replica_engine(ModelConfig(source="toy"))
    assert engine.rank_pids == ()
    engine.check_health()
    engine.worker.close()
    await engine.stop()


async def test_a_pass_beyond_its_limit_ends_the_replica() -> None:
    """Serve replaces a replica at once for a RayActorError."""
    model = ModelConfig(source="timed", toy_step_ms=1500.0)
    engine = await load_replica_engine(model, max_pass_s=0.05)
    engine.check_health()
    row = StepItem(1, 0, (5,), 1, SamplingParams(temperature=0.0))
    with pytest.raises(EngineBroken, match=r"a pass did not end within 0\.05 s"):
        await engine.worker.run([], [row])
    with pytest.raises(RayActorError, match="the engine is broken"):
        engine.check_health()
    engine.worker.close()
    await engine.stop()
