"""GET /metrics with the fleet's part: asked of the controllers, who may be slow, gone or of another
release."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.config import ApiKeyConfig
from paceline.errors import ContextLengthError, OverloadedError, RequestError
from paceline.gateway.api import build_api
from paceline.gateway.metrics_page import METRICS_TIMEOUT_S, MetricsPage
from paceline.metrics import fleet_catalog, gateway_catalog, target_catalog
from paceline.metrics.metric import Role
from paceline.metrics.snapshot import Snapshot


def told(rounds: float = 7) -> dict[str, Any]:
    """A controller's answer about one target."""
    own, target = Snapshot(Role.CONTROLLER), Snapshot(Role.TARGET)
    own.put_each(fleet_catalog.TARGETS, {"live": 1})
    target.put(target_catalog.ROUNDS, rounds)
    return {"controller": own.plain(), "targets": {"t": target.plain()}, "drafts": {}}


class FakeController:
    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.num_questions = 0
        self.was_asked = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def metrics(self) -> Any:
        self.num_questions += 1
        self.was_asked.set()
        await self.gate.wait()
        return self.answer


@pytest.fixture
def serve(make_harness: Any) -> Callable[..., Any]:
    def make(timeout_s: float = 5.0, **controllers: FakeController) -> Any:
        harness = make_harness()
        page = MetricsPage(harness.service.metrics, "g", controllers, timeout_s)
        harness.app = build_api(harness.service, metrics_page=page)
        return harness

    return make


async def samples(harness: Any) -> dict[str, float]:
    answer = await harness.get("/metrics")
    assert answer.status_code == 200
    families = text_string_to_metric_families(answer.text)
    return {
        f"{s.name}{sorted(s.labels.items())}": s.value
        for family in families
        for s in family.samples
    }


def value(found: dict[str, float], name: str, **labels: str) -> float | None:
    return found.get(f"{name}{sorted(labels.items())}")


async def test_each_model_has_its_fleet(serve: Callable[..., Any]) -> None:
    found = await samples(serve(toy=FakeController(told(7)), big=FakeController(told(9))))
    for model, rounds in (("toy", 7), ("big", 9)):
        assert value(found, "paceline_rounds_total", model_name=model, replica="t") == rounds
        assert value(found, "paceline_fleet_targets", model_name=model, state="live") == 1
        assert value(found, "paceline_controller_up", model_name=model, replica="g") == 1


async def test_a_controller_that_hangs_costs_its_part(serve: Callable[..., Any]) -> None:
    assert METRICS_TIMEOUT_S < 10, "Prometheus waits no longer"
    slow = FakeController(told())
    slow.gate.clear()
    async with asyncio.timeout(20):
        found = await samples(serve(0.01, toy=FakeController(told()), big=slow))
    assert value(found, "paceline_rounds_total", model_name="toy", replica="t") == 7
    assert value(found, "paceline_rounds_total", model_name="big", replica="t") is None
    assert value(found, "paceline_controller_up", model_name="big", replica="g") == 0


@pytest.mark.parametrize(
    "answer", [{}, [], "x", {"targets": 3, "drafts": {"d": 4}}, {"targets": {7: {"x": 1}}}]
)
async def test_an_answer_that_is_none_harms_nobody(serve: Callable[..., Any], answer: Any) -> None:
    found = await samples(serve(toy=FakeController(answer)))
    assert value(found, "paceline_gateway_requests_in_progress", replica="g") == 0


async def test_all_who_ask_at_a_time_share_one_question(serve: Callable[..., Any]) -> None:
    controller = FakeController(told())
    controller.gate.clear()
    harness = serve(toy=controller)
    asking = [asyncio.ensure_future(samples(harness)) for _ in range(5)]
    await controller.was_asked.wait()
    controller.gate.set()
    pages = await asyncio.gather(*asking)
    assert controller.num_questions == 1
    assert all(value(p, "paceline_rounds_total", model_name="toy", replica="t") for p in pages)


async def test_retries_and_limits(serve: Callable[..., Any], round_of: Any) -> None:
    harness = serve()
    lost = RequestError("lost", None, "target_lost", 503, 1)
    harness.targets.first_scripts = [[lost], [round_of("abc", "length")]]
    assert (await harness.complete()).status_code == 200
    harness.targets.script = [OverloadedError("full", None, "overloaded")]
    assert (await harness.complete()).status_code == 429
    found = await samples(harness)
    assert value(found, "paceline_request_retries_total", model_name="toy", replica="g") == 1
    limit = "paceline_gateway_limits_hit_total"
    assert value(found, limit, limit="max_ongoing_requests", replica="g") == 1
    assert value(found, limit, limit="gateway.max_body_bytes", replica="g") == 0


async def test_each_limit_counts_under_its_own_name(make_harness: Any, round_of: Any) -> None:
    """Of one error code for several limits, too."""
    key = ApiKeyConfig(name="a", sha256=sha256(b"secret").hexdigest(), max_concurrent_requests=2)
    harness = make_harness(api_keys=(key,), max_concurrent_requests=3)
    bearer = {"authorization": "Bearer secret"}
    body = {"model": "toy", "prompt": "hi", "max_tokens": 20}

    async def refusal(status: int) -> tuple[str, dict[str, float]]:
        answer = await harness.post("/v1/completions", body, headers=bearer)
        assert answer.status_code == status
        snapshot = harness.service.metrics.snapshot()
        counts = {
            labels[0]: value
            for metric, labels, value in snapshot
            if metric is gateway_catalog.LIMITS_HIT and value
        }
        return answer.json()["error"]["code"], counts

    gate = asyncio.Event()
    harness.targets.script = [gate, round_of("x", "length")]
    running = [harness.begin("/v1/completions", body, headers=bearer) for _ in range(2)]
    for _ in running:
        await harness.targets.begun.get()
    of_key = {"gateway.api_keys.max_concurrent_requests": 1}
    assert await refusal(429) == ("too_many_requests", of_key)
    gate.set()
    await asyncio.gather(*(exchange.task for exchange in running))
    with harness.service.room.take(3):
        of_both = of_key | {"gateway.max_concurrent_requests": 1}
        assert await refusal(429) == ("too_many_requests", of_both)
    code = "context_length_exceeded"
    harness.targets.script = [
        ContextLengthError("too long", "max_tokens", code, limit="model.num_kv_blocks")
    ]
    assert await refusal(400) == (code, of_both | {"model.num_kv_blocks": 1})


async def test_what_only_asking_tells_is_only_where_somebody_asks(
    serve: Callable[..., Any],
) -> None:
    """Ray's endpoint gets the snapshot of a process by itself: no answer there can grow old."""
    harness = serve()
    page = MetricsPage(harness.service.metrics, "g", {"toy": FakeController(told())})
    assert gateway_catalog.CONTROLLER_UP not in page.snapshot()
    await page.render()
    assert gateway_catalog.CONTROLLER_UP not in page.snapshot()
    assert gateway_catalog.IN_PROGRESS in page.snapshot()
