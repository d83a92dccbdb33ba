"""Several served models behind one gateway: who gets a request, and what is said of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import GatewayConfig, TargetConfig
from paceline.errors import ConfigError
from paceline.gateway.failover import target_lost
from paceline.gateway.service import ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import RoundDelta
from tests.unit.gateway.conftest import FakeTargets
from tests.unit.gateway.test_target_client import FakeHandle

with warnings.catch_warnings():
    # Ray Serve's own models use deprecated pydantic; not ours to fix.
    warnings.simplefilter("ignore")
    from paceline.gateway.deployment import PoolHandles, served_models

RoundOf = Callable[..., RoundDelta]


class Served:
    """`toy`, a pool of 64 tokens; `second`, one of 32, and its adapters `french` and `dutch`."""

    def __init__(self, make_harness: Any, round_of: RoundOf) -> None:
        self.second = FakeTargets([round_of("second", "length")])
        tokenizer = ToyTokenizer()
        more = [ServedModel("second", tokenizer, self.second, 32)]
        more += [
            ServedModel(name, tokenizer, self.second, 32, name, "second")
            for name in ("french", "dutch")
        ]
        self.harness = make_harness(more_models=more, ready_timeout_s=0.01)
        self.first: FakeTargets = self.harness.targets
        self.first.script = [round_of("first", "length")]

    async def text(self, model: str) -> str:
        body = (await self.harness.complete(model=model)).json()
        assert body["model"] == model
        text: str = body["choices"][0]["text"]
        return text

    def adapters(self) -> list[str]:
        """Of the requests that the second pool has had."""
        return [request.adapter for request in self.second.requests]


@pytest.fixture
def served(make_harness: Any, round_of: RoundOf) -> Served:
    return Served(make_harness, round_of)


async def test_each_request_goes_to_the_pool_of_its_model(served: Served) -> None:
    assert [await served.text(name) for name in ("toy", "second", "toy")] == [
        "first", "second", "first",
    ]  # fmt: skip
    assert (len(served.first.requests), len(served.second.requests)) == (2, 1)
    assert await served.harness.is_idle()


async def test_adapters_share_the_targets_of_their_model(served: Served) -> None:
    for name in ("french", "second", "dutch"):
        assert await served.text(name) == "second"
    assert served.adapters() == ["french", "", "dutch"]
    chat = await served.harness.chat(model="dutch")
    assert chat.json()["model"] == "dutch"
    assert served.adapters()[-1] == "dutch"
    assert served.first.requests == []


async def test_a_model_that_nobody_serves(served: Served) -> None:
    answer = await served.harness.complete(model="german")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    assert served.first.requests == served.second.requests == []


async def test_limits_are_those_of_the_model(served: Served) -> None:
    assert (await served.harness.complete("x" * 40, model="toy")).status_code == 200
    answer = await served.harness.complete("x" * 40, model="french")
    assert answer.status_code == 400
    assert "32" in answer.json()["error"]["message"]


async def test_a_lost_target_is_replaced_within_its_pool(served: Served, round_of: RoundOf) -> None:
    served.second.first_scripts = [[target_lost()]]
    assert await served.text("french") == "second"
    assert served.adapters() == ["french", "french"]
    assert (len(served.second.aborts), served.first.aborts) == (1, [])


async def test_a_stop_string_frees_the_pool_that_was_asked(
    served: Served, round_of: RoundOf
) -> None:
    served.second.script = [round_of("one two"), round_of("three", "length", 1)]
    await served.harness.complete(model="second", stop="two")
    assert await served.harness.is_idle()
    assert (len(served.second.aborts), served.first.aborts) == (1, [])


async def test_ready_asks_each_pool_once_and_needs_all(served: Served) -> None:
    assert (await served.harness.get("/ready")).status_code == 200
    assert (served.first.num_probes, served.second.num_probes) == (1, 1)
    for lost in (served.first, served.second):
        lost.readiness = False
        answer = await served.harness.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        lost.readiness = True


async def test_models_are_listed_with_what_they_adapt(served: Served) -> None:
    listed = (await served.harness.get("/v1/models")).json()["data"]
    assert [(m["id"], m["root"], m["parent"], m["max_model_len"]) for m in listed] == [
        ("toy", "toy", None, 64),
        ("second", "second", None, 32),
        ("french", "second", "second", 32),
        ("dutch", "second", "second", 32),
    ]
    assert (await served.harness.get("/v1/models/french")).json() == listed[2]


class TestDeployment:
    """What the deployment makes of a pool."""

    def pool(self, template: str | None = None, **target: Any) -> PoolHandles:
        config = TargetConfig.model_validate(target)
        gateway = GatewayConfig(served_model_name="base", chat_template=template)
        return PoolHandles(gateway, config, FakeHandle(), FakeHandle())

    def test_the_model_first_then_its_adapters(self) -> None:
        folders = {"french": "/f", "dutch": "/d"}
        pool = self.pool(model={"source": "toy", "max_model_len": 99}, adapters=folders)
        base, *adapters = served_models(pool)
        assert (base.name, base.adapter, base.parent) == ("base", "", "")
        assert base.max_model_len == 99
        assert [(m.name, m.adapter, m.parent) for m in adapters] == [
            ("french", "french", "base"),
            ("dutch", "dutch", "base"),
        ]
        for model in adapters:
            assert model.targets is base.targets
            assert model.tokenizer is base.tokenizer

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="none"):
            served_models(self.pool(model={"source": str(tmp_path / "none")}))
