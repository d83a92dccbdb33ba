"""The audit keeps out of the clients' way, and weighs laws where no text is promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.errors import OverloadedError
from paceline.gateway.audit_runs import ReRuns
from paceline.gateway.audit_samples import Skip
from paceline.generation import GenerateRequest, RoundDelta, SpeculationRequest, TokenLogprobs
from paceline.sampling.params import SamplingParams, VerificationMode
from tests.unit.gateway.audit_tools import ON, TEXT, done, errors, reruns
from tests.unit.gateway.conftest import FakeTargets
from tests.unit.gateway.test_metrics import scrape

RoundOf = Callable[..., RoundDelta]


async def test_so_many_wait_and_no_more(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON | {"max_pending": 2})
    gate = asyncio.Event()
    harness.targets.script = [round_of("ab", "length")]
    harness.targets.first_scripts = [[round_of("ab", "length")], [gate, round_of("ab", "length")]]
    await harness.complete()
    await asyncio.sleep(0)  # the first is being audited
    for _ in range(4):
        await harness.complete()
    gate.set()
    counts = await done(harness)
    assert (counts.num_requests, counts.skipped) == (3, {Skip.FULL: 2})


# ----------------------------------------------------------------------------- clients come first


async def test_it_waits_while_the_gateway_is_busy(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON | {"max_load": 0.5}, max_concurrent_requests=3)
    gate = asyncio.Event()
    body = {"model": "toy", "prompt": "hi", "max_tokens": 20, "n": 2}
    both = [round_of("a", "length"), round_of("b", "length", choice=1)]
    harness.targets.first_scripts = [[gate, *both]]
    harness.targets.script = [round_of("ab", "length")]
    exchange = harness.begin(TEXT, body)
    await (await harness.targets.begun.get()).is_waiting.wait()
    await harness.complete()
    for _ in range(20):
        await asyncio.sleep(0)
    assert reruns(harness) == []
    assert 0.25 in harness.pauses
    gate.set()
    exchange.leave.set()
    await exchange.task
    assert (await done(harness)).num_requests >= 1


async def test_it_gives_way_amid_a_run(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON | {"max_load": 0.0})
    gate, client_gate = asyncio.Event(), asyncio.Event()
    harness.targets.first_scripts = [
        [round_of("abcd", "length")],
        [round_of("a"), gate, round_of("b", None, 1), round_of("cd", "length", 2)],
        [client_gate, round_of("xy", "length")],
    ]
    harness.targets.script = [round_of("xy", "length")]
    await harness.complete()
    await harness.targets.begun.get()
    run = await harness.targets.begun.get()
    await run.is_waiting.wait()
    exchange = harness.begin(TEXT, {"model": "toy", "prompt": "hi", "max_tokens": 2})
    client = await harness.targets.begun.get()
    await client.is_waiting.wait()
    gate.set()
    async with asyncio.timeout(5):
        while not run.num_cancels:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0)
    assert harness.targets.aborts == ["cmpl-0~audit1"]
    client_gate.set()
    exchange.leave.set()
    await exchange.task
    counts = await done(harness)
    assert counts.skipped == {Skip.BUSY: 1}


async def test_it_takes_no_place_from_clients(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON | {"max_load": 1.0}, max_concurrent_requests=1)
    gate = asyncio.Event()
    harness.targets.script = [round_of("ab", "length")]
    harness.targets.first_scripts = [[round_of("ab", "length")], [gate, round_of("ab", "length")]]
    await harness.complete()
    await harness.targets.begun.get()
    await (await harness.targets.begun.get()).is_waiting.wait()
    assert harness.service.num_in_progress == 0
    assert (await harness.complete()).status_code == 200
    gate.set()
    assert (await done(harness)).num_requests == 2


async def test_shutdown_ends_it(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON)
    harness.targets.first_scripts = [[round_of("ab", "length")], [asyncio.Event()]]
    harness.targets.script = [round_of("ab", "length")]
    await harness.complete()
    await harness.targets.begun.get()
    run = await harness.targets.begun.get()
    await run.is_waiting.wait()
    await harness.complete()  # its audit waits
    async with asyncio.timeout(5):
        await harness.service.drain()
    assert harness.service.audit.is_idle
    assert run.num_cancels == 1
    assert harness.targets.aborts == ["cmpl-0~audit1"]
    assert len(reruns(harness)) == 1


# -------------------------------------------------------------------------------- rejection modes


def scored(prompt: str, text: str) -> RoundDelta:
    """What scoring a text brings: every id of the toy's that is a letter, the text's the likeliest
    but one."""
    ids = [*prompt.encode(), *text.encode()]
    entries = tuple(
        TokenLogprobs(i, -1.5, 2, ((i + 1, -0.5), (i, -1.5), (i + 2, -1.8))) for i in ids[1:]
    )
    return RoundDelta(0, (7,), (), finish_reason="length", prompt_logprobs=entries)


@pytest.mark.parametrize("mode", ["rejection", "block"])
async def test_a_law_is_weighed(mode: str, make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON | {"tie_tolerance": 0.01}, mode=mode)
    harness.targets.first_scripts = [
        [round_of("abcd", "length")],
        [round_of("abxy", "length")],
        [scored("hi", "abcd")],
        [scored("hi", "abxy")],
    ]
    seeds = iter(range(1, 10))
    harness.service.audit._random_seed = lambda: next(seeds)
    await harness.complete(min_tokens=3)
    counts = await done(harness)
    assert (counts.num_requests, counts.num_tokens) == (1, 4)
    assert counts.e_value != 1.0
    plain, score, again = reruns(harness)
    assert score.prompt_token_ids == tuple(b"hiabcd")
    assert (score.num_prompt_logprobs, score.max_tokens) == (32, 1)
    assert again.prompt_token_ids == tuple(b"hiabxy")
    assert plain.speculation == SpeculationRequest("off", mode=VerificationMode(mode))
    assert plain.max_tokens == 20
    assert plain.sampling.seed != harness.targets.requests[0].sampling.seed, "noise of its own"
    assert plain.sampling.min_tokens == 3
    assert all(request.is_background for request in (score, plain, again))


async def test_texts_of_an_adapter_are_scored_with_it() -> None:
    targets = FakeTargets([scored("hi", "ab")])
    request = GenerateRequest("r", tuple(b"hi"), 2, SamplingParams(), adapter="mine")
    mode = VerificationMode.REJECTION
    runs = ReRuns(request, mode, targets, 5, 1.0, 1.0, lambda: True, lambda: "again")
    assert [token.token_id for token in await runs.score(tuple(b"ab"), 3)] == [97, 98]
    (asked,) = targets.requests
    assert (asked.adapter, asked.cache_salt, asked.request_id) == ("mine", 5, "again")


async def test_an_alarm_is_raised_once(
    make_harness: Any, round_of: RoundOf, caplog: pytest.LogCaptureFixture
) -> None:
    """Every token is the second choice of a law that likes the first one better."""
    harness = make_harness(audit=ON | {"tie_tolerance": 0.01}, mode="rejection")
    text = "abcdefghijklmnop"
    for _ in range(20):
        harness.targets.first_scripts = [
            [round_of(text, "length")], [round_of(text, "length")], [scored("hi", text)],
            [scored("hi", text)],
        ]  # fmt: skip
        await harness.complete()
        await done(harness)
    counts = await done(harness)
    assert counts.num_alarms == 1
    assert counts.e_value >= 1000.0 == harness.service.audit.alarm_at
    (said,) = errors(caplog)
    assert "do not follow the target's law" in said
    samples = await scrape(harness)
    assert samples["paceline_audit_law_alarms_total"] == 1
    assert samples["paceline_audit_e_value"] == counts.e_value
    assert "paceline_audit_mismatches_total" not in samples


FULL = OverloadedError("x", None, "no_place")


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_run_of_a_law_that_clients_end_is_repeated(
    lost: int, make_harness: Any, round_of: RoundOf
) -> None:
    """The same run, and only that one, after a pause."""
    harness = make_harness(audit=ON | {"tie_tolerance": 0.01}, mode="rejection")
    runs = [[round_of("abxy", "length")], [scored("hi", "abcd")], [scored("hi", "abxy")]]
    runs.insert(lost, [FULL])
    harness.targets.first_scripts = [[round_of("abcd", "length")], *runs]
    await harness.complete()
    counts = await done(harness)
    assert (counts.num_requests, counts.num_tokens, counts.skipped) == (1, 4, {})
    assert harness.pauses == [0.25]
    first, second = reruns(harness)[lost : lost + 2]
    assert second == replace(first, request_id=second.request_id)


async def test_a_law_whose_first_run_has_no_place_is_skipped(
    make_harness: Any, round_of: RoundOf
) -> None:
    """Whether it has one depends on no text; and what never fits must not stop what comes."""
    harness = make_harness(audit=ON | {"tie_tolerance": 0.01}, mode="rejection")
    harness.targets.first_scripts = [[round_of("abcd", "length")], [FULL]]
    await harness.complete()
    counts = await done(harness)
    assert (counts.e_value, counts.num_tokens, counts.skipped) == (1.0, 0, {Skip.BUSY: 1})


async def test_a_text_that_fills_the_context_is_scored_but_for_its_last(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(max_model_len=8, audit=ON, mode="rejection")
    harness.targets.first_scripts = [
        [round_of("abcdef", "length")], [round_of("abcde", "length")], [scored("hi", "abcde")],
        [scored("hi", "abcde")],
    ]  # fmt: skip
    await harness.complete(max_tokens=6)
    counts = await done(harness)
    assert (counts.num_tokens, counts.num_requests) == (5, 1)
    assert [r.max_tokens for r in reruns(harness)] == [5, 1, 1]
