"""The live benchmark against real HTTP: the package's own gateway, and services that fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from paceline.bench.live import LiveConfig, run_live
from paceline.bench.prompts import Prompt
from paceline.bench.recorder import Slo
from paceline.errors import ConfigError, OverloadedError, PacelineError
from tests.unit.bench.conftest import (
    DONE,
    NUM_TOKENS,
    SCRIPT,
    Answer,
    Gateway,
    ScriptedService,
    text_event,
)

CHAT = Prompt("chat", "chats", [{"role": "user", "content": "hi"}])
TEXT = Prompt("text", "texts", "Once upon")


async def live(url: str, *prompts: Prompt, **fields: Any) -> dict[str, Any]:
    config = LiveConfig(url, **{"max_tokens": 20, **fields})
    result = await run_live(config, prompts or (CHAT, TEXT))
    json.dumps(result)  # everything in it must be JSON
    return result


async def test_counts_come_from_the_service(gateway: Gateway) -> None:
    result = await live(gateway.url, concurrency=2, num_requests=6)
    summary = result["summary"]
    assert (result["model"], summary["num_ok"], summary["errors"]) == ("toy", 6, {})
    assert (summary["output_tokens"], summary["max_running"]) == (6 * NUM_TOKENS, 2)
    assert summary["speculation"] == {
        **{"rounds": 18, "proposed": 30, "accepted": 24},
        **{"acceptance_rate": 0.8, "mean_acceptance_length": round(42 / 18, 6)},
        # Each request: of five proposed the second was rejected, the three of the next were not.
        "token_acceptance_rate": 0.8,
    }
    # One first token and two gaps a request; 2 + 4 tokens behind them.
    assert (summary["ttft_ms"]["count"], summary["itl_ms"]["count"]) == (6, 12)
    assert summary["itl_token_ms"]["count"] == 6 * 6
    assert {name: found["num_ok"] for name, found in summary["categories"].items()} == {
        "chats": 3,
        "texts": 3,
    }
    rows = result["timeline"]
    assert sum(row["finished"] for row in rows) == 6
    assert summary["tokens_per_s"] == pytest.approx(
        summary["output_tokens"] / summary["duration_s"], rel=1e-3
    )
    assert len(result["quantiles"]["e2e_ms"]) == 101


async def test_the_service_gets_what_was_asked(gateway: Gateway) -> None:
    speculation = {"max_tokens": 3, "lookahead": "fixed"}
    await live(
        gateway.url,
        num_requests=3,
        max_tokens=9,
        temperature=0.5,
        seed=40,
        speculation=speculation,
    )
    found = gateway.targets.requests
    assert [request.sampling.seed for request in found] == [40, 41, 42]
    assert {request.max_tokens for request in found} == {9}
    assert {request.sampling.temperature for request in found} == {0.5}
    assert {(r.speculation.max_tokens, r.speculation.lookahead) for r in found} == {(3, "fixed")}
    assert found[1].prompt_token_ids == tuple(b"Once upon")


async def test_rounds_give_k_over_time(gateway: Gateway) -> None:
    result = await live(gateway.url, num_requests=1)
    row = result["timeline"][0]
    assert row["num_speculative_tokens"] == round(8 / 3, 6)
    assert row["acceptance_rate"] == 0.8


async def test_a_plain_body_has_nothing_of_ours(scripted: ScriptedService) -> None:
    result = await live(scripted.url, TEXT, include_rounds=False, endpoint="completions")
    (body,) = scripted.bodies
    assert body == {
        "path": "/v1/completions",
        "model": "scripted",
        "prompt": "Once upon",
        "max_tokens": 20,
        "temperature": 0.0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert result["summary"]["output_tokens"] == 2
    assert result["summary"]["speculation"]["acceptance_rate"] is None


async def test_the_key_is_sent_and_not_shown(scripted: ScriptedService) -> None:
    result = await run_live(LiveConfig(scripted.url), (TEXT,), " sk-secret ")
    assert all(head[b"authorization"] == b"Bearer sk-secret" for head in scripted.headers)
    assert "sk-secret" not in json.dumps(result)
    with pytest.raises(ConfigError, match="no API key"):
        await run_live(LiveConfig(scripted.url), (TEXT,), "a\nb")


async def test_errors_are_counted_by_code(scripted: ScriptedService) -> None:
    refused = b'{"error": {"message": "queue", "code": "queue_full"}}'
    answers: list[Answer] = [
        (429, [refused]),
        (502, [b"<html>bad gateway</html>"]),
        (200, [text_event("Hel"), b'data: {"error": {"message": "x", "code": "lost"}}\n\n']),
        (200, [text_event("Hel")]),
        (200, [text_event("Hel"), None]),
        (200, [b"data: nonsense\n\n", DONE]),
        (200, [text_event("Hello"), DONE]),
    ]

    async def answer(body: dict[str, Any]) -> Answer:
        return answers.pop(0)

    scripted.handler = answer
    result = await live(scripted.url, TEXT, num_requests=7, keep_records=True)
    assert result["summary"]["errors"] == {
        **{"queue_full": 1, "http_502": 1, "lost": 1},
        **{"incomplete": 1, "connection": 1, "malformed": 1},
    }
    assert (result["summary"]["num_ok"], result["summary"]["output_tokens"]) == (1, 1)
    assert [record["error"] for record in result["records"]][-1] == ""
    assert result["summary"]["example_errors"]["queue_full"] == "429: queue"


async def test_our_own_refusals_keep_their_code(gateway: Gateway) -> None:
    gateway.targets.script = [OverloadedError("Full.", None, "queue_full")]
    result = await live(gateway.url, CHAT, num_requests=2)
    assert result["summary"]["errors"] == {"queue_full": 2}


async def test_a_request_that_never_ends_times_out(scripted: ScriptedService) -> None:
    async def never(body: dict[str, Any]) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    scripted.handler = never
    result = await live(scripted.url, TEXT, timeout_s=0.05)
    assert result["summary"]["errors"] == {"timeout": 1}


async def test_a_closed_loop_has_n_in_flight_at_the_service(scripted: ScriptedService) -> None:
    running, most, all_here = 0, 0, asyncio.Event()

    async def together(body: dict[str, Any]) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            all_here.set()
        await all_here.wait()
        running -= 1
        return 200, [text_event("Hello"), DONE]

    scripted.handler = together
    result = await live(scripted.url, TEXT, concurrency=4, num_requests=12)
    assert (most, result["summary"]["num_ok"], len(scripted.bodies)) == (4, 12, 12)
    assert result["summary"]["full_tokens_per_s"] > 0


async def test_an_open_loop_skips_what_is_too_much(scripted: ScriptedService) -> None:
    all_due, release = asyncio.Event(), asyncio.Event()

    async def hold(body: dict[str, Any]) -> Answer:
        await release.wait()
        return 200, [text_event("Hello"), DONE]

    async def sleep(seconds: float) -> None:
        nonlocal num_due
        num_due += 1
        await asyncio.sleep(0)
        if num_due == 20:
            all_due.set()
            release.set()

    num_due = 0
    scripted.handler = hold
    config = LiveConfig(scripted.url, rate=1e6, max_in_flight=3, num_requests=20)
    result = await run_live(config, (TEXT,), sleep=sleep)
    summary = result["summary"]
    assert all_due.is_set()
    assert (summary["num_ok"], summary["num_skipped"], summary["max_running"]) == (3, 17, 3)
    assert summary["full_tokens_per_s"] is None


async def test_goodput_of_a_run(gateway: Gateway) -> None:
    easy = await live(gateway.url, num_requests=4, slo=Slo(60_000, 60_000))
    assert easy["summary"]["goodput"]["share"] == 1.0
    hard = await live(gateway.url, num_requests=4, slo=Slo(ttft_ms=1e-6))
    assert hard["summary"]["goodput"]["share"] == 0.0


async def test_a_comparison_takes_turns_with_the_same_requests(gateway: Gateway) -> None:
    result = await live(
        gateway.url, num_requests=3, blocks=3, compare_off=True, num_warmup=1, seed=7
    )
    # One warm-up a side, then A B, B A, A B of three requests each.
    methods = [request.speculation.method for request in gateway.targets.requests[2:]]
    assert methods == [None] * 3 + ["off"] * 6 + [None] * 6 + ["off"] * 3
    seeds = [request.sampling.seed for request in gateway.targets.requests[2:]]
    first, second, third = [7, 8, 9], [10, 11, 12], [13, 14, 15]
    assert seeds == [*first, *first, *second, *second, *third, *third]
    compared = result["compare"]
    assert [block["order"][0] for block in compared["blocks"]] == ["with", "off", "with"]
    assert compared["tokens_per_s_ratio"]["count"] == 3
    assert compared["texts"] == {"compared": 9, "equal": 9}
    assert compared["off"]["summary"]["num_ok"] == result["summary"]["num_ok"] == 9
    ratios = [block["tokens_per_s_ratio"] for block in compared["blocks"]]
    assert min(ratios) <= compared["tokens_per_s_ratio"]["median"] <= max(ratios)


async def test_sides_of_unlike_speed_begin_each_block_with_the_same_request(
    scripted: ScriptedService,
) -> None:
    now_s = 0.0

    async def answer(body: dict[str, Any]) -> Answer:
        nonlocal now_s
        now_s += 0.25 if body["speculation"].get("method") == "off" else 1.0
        return 200, [text_event("Hello"), DONE]

    scripted.handler = answer
    config = LiveConfig(scripted.url, duration_s=2.0, blocks=2, compare_off=True)
    result = await run_live(config, (TEXT,), clock=lambda: now_s)
    seeds = [body["seed"] for body in scripted.bodies]
    # Two requests in two seconds and eight; then, off first, both from request 8.
    assert seeds == [0, 1, *range(8), *range(8, 16), 8, 9]
    assert result["compare"]["texts"] == {"compared": 4, "equal": 4}
    assert result["compare"]["tokens_per_s_ratio"]["median"] == 0.25


async def test_a_comparison_notices_another_text(scripted: ScriptedService) -> None:
    async def answer(body: dict[str, Any]) -> Answer:
        is_odd = body["speculation"].get("method") == "off" and body["seed"] == 1
        return 200, [text_event("other" if is_odd else "same"), DONE]

    scripted.handler = answer
    result = await live(scripted.url, TEXT, num_requests=4, blocks=1, compare_off=True)
    assert result["compare"]["texts"] == {"compared": 4, "equal": 3}


async def test_a_duration_ends_the_run(scripted: ScriptedService) -> None:
    result = await live(scripted.url, TEXT, duration_s=0.05, concurrency=2)
    assert result["summary"]["num_ok"] == len(scripted.bodies) > 0


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ((401, [b'{"error": {"message": "A key is needed."}}']), "401: A key is needed."),
        ((200, [b"<html>"]), "no JSON"),
        ((200, [b'{"data": []}']), "names no model"),
        ((200, [b"[]"]), "names no model"),
    ],
)
async def test_what_is_no_service_is_one_sentence(
    scripted: ScriptedService, models: Answer, words: str
) -> None:
    scripted.models = models
    with pytest.raises(PacelineError, match=words):
        await live(scripted.url)


async def test_a_warm_up_without_success_says_why(gateway: Gateway) -> None:
    gateway.targets.script = [OverloadedError("Full.", None, "queue_full")]
    with pytest.raises(PacelineError, match="queue_full"):
        await live(gateway.url, num_warmup=2)
    gateway.targets.script = SCRIPT
    assert (await live(gateway.url, num_warmup=2))["summary"]["num_ok"] == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"concurrency": 0},
        {"concurrency": 5000},
        {"max_in_flight": 5000},
        {"num_requests": 10**7},
        {"duration_s": 1e6},
        {"blocks": 0},
        {"rate": 0.0},
        {"rate": 1.0, "burstiness": 0.0},
        {"compare_off": True, "speculation": {"method": "off"}},
    ],
)
async def test_what_cannot_be_run_is_refused_before_anything_is_sent(
    scripted: ScriptedService, fields: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        await live(scripted.url, **fields)
    assert scripted.headers == []


async def test_a_prompt_that_fits_no_endpoint_is_refused(scripted: ScriptedService) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        await live(scripted.url, Prompt("ids", "", [1, 2]), endpoint="chat")
    assert scripted.bodies == []
