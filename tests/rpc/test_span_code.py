"""Span code beside the pass loops: it comes after passes, and a bug in it costs spans only."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from paceline.config import AppConfig
from paceline.draft.driver import DraftDriver
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker
from paceline.errors import RequestError
from paceline.generation import GenerateRequest
from paceline.target.driver import TargetDriver
from paceline.target.traces import MAX_FLUSH_ROUNDS, MAX_KEPT_ROUNDS
from paceline.tracing.spans import Span
from tests.rpc import fleet

pytestmark = pytest.mark.timeout(60)
TRACE = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"


class Spans(list[Span]):
    """A `Tracer` that keeps everything."""

    unix_offset_us = 10**15

    def emit(self, span: Span) -> None:
        self.append(span)

    def num(self, name: str) -> int:
        return sum(span.name == name for span in self)


class Broken(Spans):
    """Has a bug, whatever it is told."""

    def emit(self, span: Span) -> None:
        super().emit(span)
        raise KeyError("a bug of ours")


def request(name: str, flags: str, max_tokens: int = MAX_KEPT_ROUNDS + 8) -> GenerateRequest:
    wanted = fleet.request(name, max_tokens=max_tokens, method="off" if flags == "00" else "model")
    return dataclasses.replace(wanted, traceparent=f"00-{TRACE}-{flags}")


@asynccontextmanager
async def traced(spans: Spans, slow_request_s: float = 30.0) -> AsyncIterator[TargetDriver]:
    settings = fleet.config().model_dump() | {"tracing": {"slow_request_s": slow_request_s}}
    engine = TimedEngine(ToyEngine(fleet.INFO), base_ms=1.0, row_ms=0.0)
    config = AppConfig.model_validate(settings)
    async with TargetDriver(EngineWorker(engine), config, "t", "t-boot", spans) as driver:
        yield driver


async def slow_one(target: TargetDriver) -> None:
    """A request that is over when the target has long been idle."""
    async with aclosing(target.generate(request("r", "00"))) as deltas:
        async for delta in deltas:
            if delta is not None and delta.finish_reason is not None:
                break
        await fleet.until_free(target)


async def test_an_idle_target_tells_of_a_slow_request_by_and_by() -> None:
    spans = Spans()
    async with traced(spans, slow_request_s=1e-6) as target:
        await slow_one(target)
        assert spans.num("round") <= MAX_FLUSH_ROUNDS
        await fleet.until(lambda: spans.num("round") == MAX_KEPT_ROUNDS, timeout_s=5)
        assert spans.num("session") == 1


async def test_what_still_waits_at_the_end_is_told() -> None:
    spans = Spans()
    async with traced(spans, slow_request_s=1e-6) as target:
        await slow_one(target)
        await target._loop.stop()
        assert spans.num("round") <= MAX_FLUSH_ROUNDS
    assert spans.num("round") == MAX_KEPT_ROUNDS


async def test_a_target_that_stops_tells_the_rest() -> None:
    spans = Spans()
    async with traced(spans) as target, aclosing(target.generate(request("r", "00"))) as deltas:
        for _ in range(3 * MAX_FLUSH_ROUNDS):
            await anext(deltas)
        await target.stop()
        with pytest.raises(RequestError, match="target"):
            async for _ in deltas:
                pass
        assert spans.num("round") > 3 * MAX_FLUSH_ROUNDS
        assert spans.num("session") == 1


async def test_a_bug_in_span_code_ends_neither_loop(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Broken(), Broken()
    settings = fleet.config()
    worker = EngineWorker(ToyEngine(fleet.INFO))
    async with (
        traced(ours) as target,
        DraftDriver(worker, settings.draft, settings.rpc, "d", "d-boot", theirs) as draft,
    ):
        draft.set_targets([target.server.address])
        await fleet.until(lambda: target.num_links == 1)
        for name in ("first", "second"):
            wanted = request(name, "01")
            deltas = await fleet.collect(target, wanted)
            assert fleet.tokens(deltas) == fleet.alone(wanted)
            assert fleet.accepted(deltas) > 0
        target.check_health()
        draft.check_health()
        assert target.num_links == 1
    assert len(ours) > 2
    assert len(theirs) > 2
    lines = [record for record in caplog.records if "spans lost" in record.message]
    assert len(lines) == 2  # one of each process's


async def test_a_bug_at_a_requests_or_rounds_begin_or_end_is_not_the_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug of ours")

    for place in ("TargetTracer.begin", "RequestTrace.end", "RoundFacts.of"):
        async with traced(Spans()) as target:
            with monkeypatch.context() as patch:
                patch.setattr(f"paceline.target.traces.{place}", broken)
                wanted = request("r", "01", max_tokens=5)
                assert fleet.tokens(await fleet.collect(target, wanted)) == fleet.alone(wanted)
