"""Gateway, target and draft that trace into a real OTLP receiver, in one process; for tests."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc

from paceline.config import AppConfig
from paceline.draft.driver import DraftDriver
from paceline.engine.base import Engine, EngineInfo
from paceline.engine.timed import TimedEngine
from paceline.engine.toy import ToyEngine
from paceline.engine.worker import EngineWorker, monotonic_us
from paceline.gateway.api import build_api
from paceline.gateway.service import GatewayService, ServedModel, TargetStream
from paceline.gateway.spans import GatewayTracer
from paceline.gateway.tokenizer import ToyTokenizer
from paceline.generation import GenerateRequest, RoundDelta
from paceline.protocol.acceptance_model import Survivals
from paceline.protocol.lone_wait import LonePolicy, WindowOutlook
from paceline.protocol.messages import TargetMessage
from paceline.round_times import STAGE_OF_SPAN, Interval
from paceline.target.driver import TargetDriver
from paceline.tracing.process import ProcessTracer, open_tracer
from tests.rpc import fleet

INFO = EngineInfo("toy", 257, 512, 16, 512, tokenizer_hash="toy", eos_token_ids=())
DRAFT_SPANS = {"draft", "rewind", "wire_back"}


@dataclass
class Seen:
    """One span as the receiver got it; times in nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int
    end: int
    kind: int
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    is_error: bool


@dataclass
class Receiver(rpc.TraceServiceServicer):
    """A collector: what it was sent."""

    spans: list[Seen] = field(default_factory=list)
    address: str = ""

    def Export(self, request: Any, context: Any) -> Any:
        for resource_spans in request.resource_spans:
            service = attributes_of(resource_spans.resource)["service.name"]
            for scope in resource_spans.scope_spans:
                self.spans += [_seen(service, span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, *names: str) -> list[Seen]:
        found = [span for span in self.spans if span.name in names]
        return sorted(found, key=lambda span: span.begin)

    def children(self, parent: Seen) -> list[Seen]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    def only(self, name: str) -> Seen:
        (span,) = self.named(name)
        return span


def _seen(service: str, span: Any) -> Seen:
    return Seen(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.kind,
        attributes_of(span),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.code == 2,
    )


def attributes_of(holder: Any) -> dict[str, Any]:
    found = {}
    for pair in holder.attributes:
        value = getattr(pair.value, pair.value.WhichOneof("value"))
        is_list = hasattr(value, "values")
        found[pair.key] = [one.string_value for one in value.values] if is_list else value
    return found


def intervals(children: list[Seen]) -> list[Interval]:
    return [(STAGE_OF_SPAN[child.name], child.begin, child.end) for child in children]


@contextmanager
def receiver() -> Iterator[Receiver]:
    """On a loopback port of its own, until the end."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Receiver()
    rpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.address = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


class _Stream:
    def __init__(self, rounds: AsyncIterator[RoundDelta]) -> None:
        self._rounds = rounds

    def __aiter__(self) -> AsyncIterator[RoundDelta]:
        return self._rounds

    def cancel(self) -> None:
        pass


class _Targets:
    """A `TargetClient` of one target, and all that it was asked and has answered."""

    def __init__(self, driver: TargetDriver) -> None:
        self._driver = driver
        self.requests: list[GenerateRequest] = []
        self.deltas: list[RoundDelta] = []

    def generate(self, request: GenerateRequest) -> TargetStream:
        self.requests.append(request)
        return _Stream(self._rounds(request))

    async def _rounds(self, request: GenerateRequest) -> AsyncIterator[RoundDelta]:
        async for delta in fleet.rounds(self._driver, request):
            self.deltas.append(delta)
            yield delta

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        self._driver.abort(request_id, choice)

    async def ready(self) -> bool:
        return True


class Patient(LonePolicy):
    """Waits for a second whatever it costs, if anything is missing."""

    def wait_until(
        self,
        outlook: WindowOutlook,
        acceptance: float,
        now_us: int,
        survivals: Survivals | None = None,
    ) -> int:
        return now_us + 1_000_000 * (outlook.have < outlook.want)


@dataclass
class Fleet:
    """`heard` is all that the draft has received. `tracers` are those of the three processes."""

    target: TargetDriver
    draft: DraftDriver
    targets: _Targets
    tracers: list[ProcessTracer | None]
    client: httpx.AsyncClient
    heard: list[TargetMessage] = field(default_factory=list)
    rtt_us: int = 0

    def learn_rtt(self) -> None:
        """The longer of the two round trips that the ends' clocks were compared with."""
        streams = [*self.target._streams.values(), *self.draft._streams.values()]
        self.rtt_us = max(stream.clock.rtt_us or 0 for stream in streams)

    async def complete(
        self, max_tokens: int = 24, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": "toy", "prompt": "Once upon a time", "max_tokens": max_tokens, **fields}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    def close(self) -> int:
        """Flush all; the spans that were lost."""
        for tracer in self.tracers:
            if tracer is not None:
                tracer.close()
        return sum(tracer.num_dropped for tracer in self.tracers if tracer is not None)


@asynccontextmanager
async def traced_fleet(
    tracing: dict[str, Any],
    *,
    step_ms: float = 3.0,
    draft_ms: float = 0.5,
    error_rate: float = 0.1,
    draft_clock_us: int = 0,
    engine: Engine | None = None,
    waits: bool = False,
    **speculation: Any,
) -> AsyncIterator[Fleet]:
    """`draft_clock_us`: how far ahead the draft's monotonic clock is of everybody else's. `waits`:
    the target does, always, until all the proposals that it wants are there."""
    if waits:
        speculation |= {"lookahead": "fixed", "max_lone_wait_ms": 1000.0}
    settings = fleet.config(**speculation).model_dump() | {"tracing": tracing}
    config = AppConfig.model_validate(settings)
    kinds = ("gateway", "target", "draft")
    tracers = [open_tracer(config.tracing, f"paceline-{kind}", {}) for kind in kinds]
    slow = TimedEngine(engine or ToyEngine(INFO), base_ms=step_ms)
    quick = TimedEngine(ToyEngine(INFO, error_rate=error_rate), base_ms=draft_ms)
    worker = EngineWorker(quick, now_us=lambda: monotonic_us() + draft_clock_us)
    async with TargetDriver(EngineWorker(slow), config, "target-7", "t", tracers[1]) as target:
        if waits:
            target.scheduler.policy.lone = Patient(1_000_000)
        draft = DraftDriver(worker, config.draft, config.rpc, "draft-9", "d", tracers[2])
        async with draft:
            draft.set_targets([target.server.address])
            # Both ends know the other's clock before anything is traced.
            await fleet.until(lambda: target.num_links == 1 and _know_clocks(target, draft))
            targets = _Targets(target)
            service = GatewayService(
                config.gateway,
                [ServedModel("toy", ToyTokenizer(), targets, INFO.max_model_len)],
                clock=time.time,
                random_hex=map("{:032x}".format, itertools.count(1)).__next__,
                random_seed=lambda: 2**64 - 1,
                tracer=None if tracers[0] is None else GatewayTracer(tracers[0], config.tracing),
            )
            transport = httpx.ASGITransport(build_api(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                made = Fleet(target, draft, targets, tracers, client)
                receive = draft.table.receive

                def record(link_id: int, message: TargetMessage, now_us: int) -> Any:
                    made.heard.append(message)
                    return receive(link_id, message, now_us)

                draft.table.receive = record  # type: ignore[method-assign]
                yield made
                await service.drain()


def _know_clocks(target: TargetDriver, draft: DraftDriver) -> bool:
    streams = [*target._streams.values(), *draft._streams.values()]
    return len(streams) == 2 and all(each.clock.offset_us is not None for each in streams)
