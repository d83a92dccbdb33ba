"""GET /metrics: every counter after known runs, exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.errors import OverloadedError, RequestError
from paceline.gateway.assembler import RoundText, Usage
from paceline.gateway.metrics import MAX_CODES, MAX_POSITION, GatewayMetrics, RequestMetrics
from paceline.gateway.service import ServedModel
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import RoundDelta

RoundOf = Callable[..., RoundDelta]
TEXT = "/v1/completions"
BODY = {"model": "toy", "prompt": "hi", "max_tokens": 20}
# A sample's name and its labels but for model_name, as in "success{stop}".
Samples = dict[str, float]


def samples_of(text: str, model: str = "toy") -> Samples:
    """What is not zero, without buckets and the times at which counters were made."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            ours = labels.pop("model_name", model) == model
            labels.pop("replica", None)
            if ours and sample.value and not sample.name.endswith(("_bucket", "_created")):
                shown = f"{{{','.join(labels.values())}}}" if labels else ""
                found[sample.name + shown] = sample.value
    return found


async def scrape(harness: Any, model: str = "toy") -> Samples:
    answer = await harness.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples_of(answer.text, model)


def of_model(samples: Samples) -> Samples:
    """Those of vLLM's that are counts: seconds depend on the machine."""
    return {
        name.removeprefix("vllm:"): value
        for name, value in samples.items()
        if name.startswith("vllm:") and not name.endswith("_sum")
    }


async def test_an_answer(harness: Any, round_of: RoundOf) -> None:
    assert of_model(await scrape(harness)) == {}
    harness.targets.script = [
        round_of("a", num_draft_tokens=2, num_accepted_tokens=0),
        round_of("bcd", number=1, num_draft_tokens=3, num_accepted_tokens=2),
        round_of("e", number=2),
        round_of("fg", "length", number=3, num_draft_tokens=1, num_accepted_tokens=1),
    ]
    for stream in (False, True):
        assert (await harness.complete(stream=stream)).status_code == 200
    samples = await scrape(harness)
    twice = {
        "request_success_total{length}": 1,
        "prompt_tokens_total": 2,
        "generation_tokens_total": 7,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 6,
        "e2e_request_latency_seconds_count": 1,
        "spec_decode_num_drafts_total": 3,
        "spec_decode_num_draft_tokens_total": 6,
        "spec_decode_num_accepted_tokens_total": 3,
        "spec_decode_num_accepted_tokens_per_pos_total{0}": 2,
        "spec_decode_num_accepted_tokens_per_pos_total{1}": 1,
    }
    assert of_model(samples) == {name: 2 * value for name, value in twice.items()}
    assert samples["paceline:http_requests_total{/v1/completions,200}"] == 2
    # A scrape counts itself only once it is answered.
    assert samples["paceline:http_requests_total{/metrics,200}"] == 1


async def test_a_stop_string_and_choices(harness: Any, round_of: RoundOf) -> None:
    """Tokens are those of usage: none behind the stop string; every choice ends once."""
    harness.targets.script = [
        round_of("ab"), round_of("cXyz", number=0, choice=1), round_of("de", "length", 1)
    ]  # fmt: skip
    answer = await harness.complete(n=2, stop="X")
    samples = of_model(await scrape(harness))
    assert answer.json()["usage"]["completion_tokens"] == 6
    assert samples == {
        "request_success_total{length}": 1,
        "request_success_total{stop}": 1,
        "prompt_tokens_total": 2,
        "generation_tokens_total": 6,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
    }


async def test_a_client_that_leaves(harness: Any, round_of: RoundOf) -> None:
    wait = asyncio.Event()
    harness.targets.script = [round_of("ab"), wait]
    exchange = harness.begin(TEXT, BODY | {"stream": True, "n": 2})
    stream = await harness.targets.begun.get()
    await stream.is_waiting.wait()
    samples = await scrape(harness)
    assert samples["vllm:num_requests_running"] == 2
    exchange.leave.set()
    await exchange.task
    samples = await scrape(harness)
    assert of_model(samples) == {
        "request_success_total{abort}": 2,
        "prompt_tokens_total": 2,
        "generation_tokens_total": 2,
        "time_to_first_token_seconds_count": 1,
    }
    assert samples["paceline:http_requests_total{/v1/completions,200}"] == 1
    assert not any(name.startswith("paceline:refused") for name in samples)

    # Before anything was sent there is no status.
    harness.targets.script = [wait]
    exchange = harness.begin(TEXT, BODY)
    stream = await harness.targets.begun.get()
    await stream.is_waiting.wait()
    exchange.leave.set()
    await exchange.task
    samples = await scrape(harness)
    assert samples["paceline:http_requests_total{/v1/completions,none}"] == 1
    assert samples["vllm:request_success_total{abort}"] == 3
    assert samples["vllm:prompt_tokens_total"] == 2


async def test_errors(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(max_retries=0, request_timeout_s=1.0)
    full = OverloadedError("full", None, "queue_full")
    for script in ([full], [round_of("ab"), full], [round_of("ab"), ValueError("x")]):
        harness.targets.script = script
        for stream in (False, True):
            await harness.complete(stream=stream)
    harness.targets.script = [asyncio.Event()]
    assert (await harness.complete()).status_code == 504
    samples = await scrape(harness)
    assert samples["vllm:request_success_total{error}"] == 6
    assert samples["vllm:request_success_total{abort}"] == 1
    assert samples["vllm:generation_tokens_total"] == 8
    assert "vllm:num_requests_running" not in samples
    assert "vllm:e2e_request_latency_seconds_count" not in samples
    assert {name: value for name, value in samples.items() if name.startswith("paceline:")} == {
        "paceline:refused_total{queue_full}": 4,
        "paceline:refused_total{internal_error}": 2,
        "paceline:refused_total{request_timeout}": 1,
        "paceline:http_requests_total{/v1/completions,429}": 3,
        "paceline:http_requests_total{/v1/completions,500}": 1,
        "paceline:http_requests_total{/v1/completions,504}": 1,
        # Streams that had begun.
        "paceline:http_requests_total{/v1/completions,200}": 2,
    }


async def test_a_lost_target_counts_once(harness: Any, round_of: RoundOf) -> None:
    lost = RequestError("lost", None, "target_lost", 503, 1)
    harness.targets.first_scripts = [[lost], [round_of("ab"), lost], [round_of("c", "length")]]
    assert (await harness.complete()).json()["usage"]["completion_tokens"] == 3
    assert of_model(await scrape(harness)) == {
        "request_success_total{length}": 1,
        "prompt_tokens_total": 2,
        "generation_tokens_total": 3,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
    }


async def test_labels_are_bounded(harness: Any) -> None:
    """However clients spell paths and models."""
    async with harness.client() as client:
        for number in range(50):
            await client.get(f"/nowhere/{number}")
            await client.get(f"/v1/models/m{number}")
            await client.request(f"M{number}", "/health")
        await client.post(TEXT, json={"model": "other", "prompt": "x"})
        await client.get("/v1/models/")
    samples = await scrape(harness)
    ours = {name: value for name, value in samples.items() if name.startswith("paceline_")}
    assert sum(name.startswith("paceline_http_requests_total") for name in ours) == 4
    assert ours.pop("paceline_audit_e_value") == 1
    assert {name: value for name, value in samples.items() if not name.startswith("paceline_")} == {
        "paceline:http_requests_total{other,404}": 50,
        "paceline:http_requests_total{/v1/models/{model_id},404}": 51,
        "paceline:http_requests_total{/health,405}": 50,
        "paceline:http_requests_total{/v1/completions,404}": 1,
        "paceline:refused_total{model_not_found}": 52,
    }


async def test_each_model_has_its_own(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness()
    more = [ServedModel("second", ToyTokenizer(), harness.targets, 64)]
    harness = make_harness(more_models=more)
    harness.targets.script = more[0].targets.script = [round_of("ab", "length")]  # type: ignore
    await harness.complete()
    await harness.complete(model="second")
    await harness.complete(model="second")
    counted = [of_model(await scrape(harness, name)) for name in ("toy", "second")]
    assert [samples["generation_tokens_total"] for samples in counted] == [2, 4]
    # Two gateways in one process are strangers.
    assert of_model(await scrape(make_harness())) == {}


def rounds_of(*deltas: RoundDelta) -> Iterator[RoundText]:
    for delta in deltas:
        yield RoundText(delta, (), delta.finish_reason)


def test_times(round_of: RoundOf) -> None:
    """A round's tokens share the time since the round before."""
    metrics, usage = GatewayMetrics(["toy"]), Usage(5)
    record = RequestMetrics(metrics.of("toy"), 1, usage, 100.0)
    times = (102.0, 105.0, 106.0)
    rounds = rounds_of(round_of("ab"), round_of("xyz"), round_of("c", "stop"))
    for item, now_s in zip(rounds, times, strict=True):
        usage.num_completion_tokens += len(item.delta.token_ids)
        record.receive(item, now_s)
    record.end("abort")
    text = metrics.render().decode()
    samples = samples_of(text)
    assert samples["vllm:time_to_first_token_seconds_sum"] == 2
    assert samples["vllm:inter_token_latency_seconds_sum"] == 4
    assert samples["vllm:inter_token_latency_seconds_count"] == 4
    assert samples["vllm:e2e_request_latency_seconds_sum"] == 6
    assert 'vllm:inter_token_latency_seconds_bucket{le="1.0",model_name="toy"} 4.0' in text
    assert samples["vllm:request_success_total{stop}"] == 1
    assert "vllm:request_success_total{abort}" not in samples


def test_positions_are_bounded() -> None:
    metrics = GatewayMetrics(["toy"])
    metrics.of("toy").draft(MAX_POSITION + 5, MAX_POSITION + 3)
    metrics.of("toy").draft(2, 1)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    per_pos = {
        key: value
        for key, value in samples_of(metrics.render().decode()).items()
        if key.startswith(name)
    }
    expected = {f"{name}{{{position}}}": 1 for position in range(MAX_POSITION)}
    expected |= {f"{name}{{0}}": 2, f"{name}{{{MAX_POSITION}}}": 3}
    assert per_pos == expected


def test_codes_are_bounded() -> None:
    metrics = GatewayMetrics(["toy"])
    for number in range(MAX_CODES + 7):
        metrics.refusal(f"code_{number}")
    metrics.refusal("code_0")
    for code in (None, "", "A code", "x" * 65, "ü"):
        metrics.refusal(code)
    samples = samples_of(metrics.render().decode())
    assert len(samples) == MAX_CODES + 1
    assert samples["paceline:refused_total{other}"] == 7 + 5
    assert samples["paceline:refused_total{code_0}"] == 2


@pytest.mark.parametrize("is_public", [False, True])
async def test_keys(is_public: bool, make_harness: Any) -> None:
    key = {"name": "a", "sha256": "0" * 64}
    harness = make_harness(api_keys=[key], public_metrics=is_public)
    assert (await harness.get("/metrics")).status_code == (200 if is_public else 401)
    assert (await harness.post("/metrics", {})).status_code == 401
