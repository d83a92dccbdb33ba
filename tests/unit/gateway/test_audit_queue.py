"""The audit's queue: who gets a place in it, in which order, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.gateway.audit import Auditor
from paceline.gateway.audit_law import PAIR_SIDES, TOKEN_SIDES
from paceline.gateway.audit_samples import Sample, Skip
from paceline.gateway.betting import SequentialTest
from paceline.gateway.openai import CompletionBody
from paceline.gateway.plan import Endpoint
from paceline.generation import RoundDelta
from tests.unit.gateway.audit_tools import ON, TEXT, done, reruns
from tests.unit.gateway.test_audit_manners import scored

RoundOf = Callable[..., RoundDelta]


async def begun(harness: Any, delta: RoundDelta | None = None) -> Sample | None:
    """A sampled request that has got `delta`."""
    body = CompletionBody(model="toy", prompt="hi", temperature=0.0)
    (plan,) = await harness.service.plans(Endpoint.COMPLETIONS, body)
    sample: Sample | None = harness.service.audit.begin(plan)
    if sample is not None and delta is not None:
        sample.receive(delta)
    return sample


async def test_places_are_given_before_the_first_token(
    make_harness: Any, round_of: RoundOf
) -> None:
    """Or the short ones of many requests would take them."""
    harness = make_harness(audit=ON | {"max_pending": 2})
    harness.targets.script = [round_of("ab", "length")]
    audit: Auditor = harness.service.audit
    first, second, third = [await begun(harness, round_of("ab", "length")) for _ in range(3)]
    assert third is None
    audit.end(first)
    counts = await done(harness)
    assert (counts.num_requests, counts.skipped) == (1, {Skip.FULL: 1})
    assert await begun(harness) is not None
    audit.end(second)
    assert (await done(harness)).num_requests == 2


async def test_who_left_before_a_token_leaves_its_place(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(audit=ON | {"max_pending": 1})
    for _ in range(3):
        sample = await begun(harness)
        assert sample is not None
        harness.service.audit.end(sample)
    counts = await done(harness)
    assert (counts.num_requests, counts.skipped, reruns(harness)) == (0, {}, [])


@pytest.mark.parametrize(("mode", "is_held"), [("rejection", True), ("coupled", False)])
async def test_laws_are_weighed_in_the_order_of_their_requests(
    mode: str, is_held: bool, make_harness: Any, round_of: RoundOf
) -> None:
    """Else the short texts come first. Of texts each stands for itself."""
    harness = make_harness(audit=ON, mode=mode)
    gate = asyncio.Event()
    runs = [[round_of("ab", "length")], [scored("hi", "ab")], [scored("hi", "ab")]]
    if mode == "coupled":
        runs = runs[:1]
    harness.targets.first_scripts = [
        [gate, round_of("ab", "length")], [round_of("ab", "length")], *runs, *runs
    ]  # fmt: skip
    slow = harness.begin(TEXT, {"model": "toy", "prompt": "hi", "max_tokens": 2})
    await (await harness.targets.begun.get()).is_waiting.wait()
    await harness.complete(max_tokens=2)
    counts = await done(harness)
    assert counts.num_requests == (0 if is_held else 1)
    gate.set()
    slow.leave.set()
    await slow.task
    counts = await done(harness)
    assert (counts.num_requests, counts.skipped) == (2, {})


class Mismatch(logging.Handler):
    """Acts when the worker, with a mismatch, is about to end: before anybody hears of its end."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act = act

    def emit(self, record: logging.LogRecord) -> None:
        asyncio.get_running_loop().call_soon(self._act)


async def test_who_comes_while_the_worker_ends_is_audited(
    make_harness: Any, round_of: RoundOf
) -> None:
    harness = make_harness(audit=ON)
    first, second = [await begun(harness, round_of("ab", "length")) for _ in range(2)]
    harness.targets.first_scripts = [[round_of("xb", "length")], [round_of("x", "length")]]
    harness.targets.script = [round_of("ab", "length")]
    audit: Auditor = harness.service.audit
    states: list[bool] = []

    def end() -> None:
        states.append(audit.is_idle)
        audit.end(second)

    log, handler = logging.getLogger("paceline.gateway.audit"), Mismatch(end)
    log.addHandler(handler)
    try:
        audit.end(first)
        counts = await done(harness)
    finally:
        log.removeHandler(handler)
    assert states == [False], "the worker is still there"
    assert (counts.num_requests, counts.num_mismatches) == (2, 1)


async def test_nothing_begins_after_the_end(make_harness: Any, round_of: RoundOf) -> None:
    harness = make_harness(audit=ON)
    audit: Auditor = harness.service.audit
    sample = await begun(harness, round_of("ab", "length"))
    await audit.close()
    audit.end(sample)
    assert audit.is_idle
    assert await begun(harness) is None


class SlowTest(SequentialTest):
    """Weighs until it is let go on; remembers how many weigh at once."""

    def __init__(self) -> None:
        super().__init__((TOKEN_SIDES, PAIR_SIDES), 0.01)
        self.go_on, self.most, self._now = threading.Event(), 0, 0

    def end_sample(self) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        self.go_on.wait(10.0)
        super().end_sample()
        self._now -= 1


async def test_one_weighing_at_a_time(make_harness: Any, round_of: RoundOf) -> None:
    """However long it takes: no timeout lets the next one begin."""
    harness = make_harness(audit=ON, mode="rejection", request_timeout_s=0.5)
    runs = [[round_of("ab", "length")], [scored("hi", "ab")], [scored("hi", "ab")]]
    harness.targets.first_scripts = [[round_of("ab", "length")], *runs] * 2
    test = SlowTest()
    harness.service.audit._tests["toy"] = test
    await harness.complete(max_tokens=2)
    async with asyncio.timeout(10):
        while not test.most:  # noqa: ASYNC110 - it is in another thread
            await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.8, test.go_on.set)
    await harness.complete(max_tokens=2)
    counts = await done(harness)
    assert (counts.num_requests, counts.skipped) == (2, {})
    assert (test.most, test.num_samples) == (1, 2)
