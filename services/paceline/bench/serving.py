"""Our own scheme as it runs in production, but for Ray: the real target driver in this process,
the real draft driver in another, gRPC between them, and clients that ask again and again.

No draft is the same target with drafting off. It measures between two pass ends, so that every
pass counts whole.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace

from paceline.bench.draft_process import script_to_json
from paceline.bench.processes import Helper, helper
from paceline.bench.schemes import (
    PROMPT_LEN,
    Kind,
    Measurement,
    Scheme,
    Setting,
    prompt,
    target_engine,
)
from paceline.config import AppConfig, TracingConfig
from paceline.engine.timed import TimedEngine
from paceline.engine.worker import EngineWorker
from paceline.errors import RequestError
from paceline.generation import GenerateRequest
from paceline.sampling.params import SamplingParams
from paceline.target.driver import TargetDriver
from paceline.tracing.context import MASK_64, is_sampled
from paceline.tracing.process import ProcessTracer, open_tracer

_GREEDY = SamplingParams(temperature=0.0)
_ATTACH_TIMEOUT_S = 20.0
_PING_INTERVAL_S = 0.1
_GOLDEN = 0x9E3779B97F4A7C15
NO_TRACING = TracingConfig()


def app_config(setting: Setting, scheme: Scheme, num_seqs: int) -> AppConfig:
    """The defaults, but for what the scheme says and room for everybody."""
    speculation: dict[str, object] = {"max_fan_out": scheme.fan_out}
    if scheme.kind is Kind.NO_DRAFT:
        speculation = {"method": "off"}
    elif scheme.k is not None:
        speculation |= {"lookahead": "fixed", "num_speculative_tokens": scheme.k}
    return AppConfig.model_validate(
        {
            "target": {"max_num_seqs": num_seqs, "max_rows_per_pass": 8192},
            "draft": {"max_sessions": num_seqs, "max_rows_per_pass": 8192},
            "speculation": speculation,
            "rpc": {"ping_interval_s": _PING_INTERVAL_S},
        }
    )


@dataclass(frozen=True, slots=True)
class Wire:
    """The way to a target: through the relay with so much delay, or straight to it (None).
    `measured_rtt_ms` is what the streams' pings said when nothing else was going on."""

    delay_us: float | None
    measured_rtt_ms: float


class Helpers:
    """The processes beside this one, and the wires between them by round trip (ms)."""

    def __init__(self, draft: Helper, relay: Helper) -> None:
        self.draft = draft
        self._relay = relay
        self._wires: dict[float, Wire] = {}

    async def address(self, target: str, wire: Wire) -> str:
        if wire.delay_us is None:
            return target
        answer = await self._relay.ask("set", address=target, delay_us=wire.delay_us)
        return str(answer["address"])

    async def wire(self, setting: Setting) -> Wire:
        """Measured once for each round trip."""
        rtt_ms = setting.rtt_ms
        if rtt_ms not in self._wires:
            self._wires[rtt_ms] = await self._calibrate(setting)
        return self._wires[rtt_ms]

    async def _calibrate(self, setting: Setting) -> Wire:
        """The relay costs time itself: only the rest is added. Where even the bare loopback takes
        longer, the wire is that."""
        rtt_us = setting.rtt_ms * 1e3
        config = app_config(setting, Scheme(Kind.OURS), 1)
        engine = target_engine(setting.costs, 64, 1)
        async with TargetDriver(EngineWorker(engine), config, "bench-wire", "boot") as driver:

            async def measure(delay_us: float | None) -> float:
                address = await self.address(driver.server.address, Wire(delay_us, 0.0))
                json = config.model_dump(mode="json")
                answer = await self.draft.ask("ping", address=address, config=json)
                return float(answer["rtt_us"])

            relay_us = await measure(0.0)
            if relay_us > rtt_us:
                return Wire(None, await measure(None) / 1e3)
            delay_us = (rtt_us - relay_us) / 2
            delay_us = max(0.0, delay_us + (rtt_us - await measure(delay_us)) / 2)
            return Wire(delay_us, await measure(delay_us) / 1e3)


@asynccontextmanager
async def helpers() -> AsyncIterator[Helpers]:
    async with (
        helper("paceline.bench.draft_process") as draft,
        helper("paceline.bench.relay") as relay,
    ):
        yield Helpers(draft, relay)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Everything that is counted, at the end of a pass."""

    at_s: float
    busy_s: float
    num_late: int
    stats: dict[str, int]
    draft: dict[str, float]

    def until(self, end: _Mark) -> Measurement:
        wall_s, busy_s = end.at_s - self.at_s, end.busy_s - self.busy_s
        draft = {f"draft_{name}": end.draft[name] - self.draft[name] for name in end.draft}
        counts = {name: float(end.stats[name] - self.stats[name]) for name in end.stats} | draft
        num_passes = max(1.0, counts["num_passes"])
        return Measurement(
            tokens_per_s=counts["num_committed_tokens"] / wall_s,
            target_busy=busy_s / wall_s,
            tokens_per_pass=counts["num_committed_tokens"] / num_passes,
            rows_per_pass=counts["num_rows"] / num_passes,
            pass_ms=1e3 * busy_s / num_passes,
            gap_ms=1e3 * (wall_s - busy_s) / num_passes,
            k=counts["num_draft_tokens"] / max(1.0, counts["num_rounds"]),
            draft_busy=draft["draft_busy_s"] / wall_s if draft else None,
            num_late=end.num_late - self.num_late,
            counts=counts,
        )


class Service:
    """A target with or without its draft, and `set_concurrency` clients that never pause."""

    def __init__(
        self,
        driver: TargetDriver,
        engine: TimedEngine,
        setting: Setting,
        draft: Helper | None,
        run: int,
        tracer: ProcessTracer | None = None,
        sample_ratio: float = 0.0,
    ) -> None:
        self.driver = driver
        self.tracer = tracer
        self._sample_ratio = sample_ratio
        self.num_failures = 0
        self._engine = engine
        self._setting = setting
        self._draft = draft
        self._run = run
        self._clients: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._next_pass: asyncio.Future[_Mark] | None = None

    async def set_concurrency(self, num_clients: int) -> None:
        """Clients that are too many hang up in the middle of their requests."""
        while len(self._clients) < num_clients:
            self._clients.append(asyncio.create_task(self._ask_forever(len(self._clients))))
        left, self._clients = self._clients[num_clients:], self._clients[:num_clients]
        for client in left:
            client.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _ask_forever(self, place: int) -> None:
        while True:
            number = next(self._numbers)
            request = GenerateRequest(
                f"bench-{number}",
                prompt(place, number, self._run),
                self._setting.max_tokens,
                _GREEDY,
                ignore_eos=True,
                traceparent=self._traceparent(number),
            )
            try:
                async with aclosing(self.driver.generate(request)) as deltas:
                    async for _ in deltas:
                        self._end_pass()
            except RequestError:
                self.num_failures += 1
                await asyncio.sleep(0.1)  # not a million of them

    def _traceparent(self, number: int) -> str:
        """What a gateway would say: of any number of requests in a row the right share is
        sampled."""
        if self.tracer is None:
            return ""
        trace_id = (number + 1) * _GOLDEN & MASK_64
        flags = int(is_sampled(trace_id, self._sample_ratio))
        return f"00-{trace_id:032x}-{trace_id or 1:016x}-{flags:02x}"

    def _end_pass(self) -> None:
        if self._next_pass is not None and not self._next_pass.done():
            self._next_pass.set_result(self._mark())

    def _mark(self) -> _Mark:
        stats = self.driver.scheduler.stats.numbers()
        return _Mark(time.perf_counter(), self._engine.busy_s, self._engine.num_late, stats, {})

    async def _at_pass_end(self) -> _Mark:
        draft = {} if self._draft is None else await self._draft.ask("stats")
        self._next_pass = asyncio.get_running_loop().create_future()
        return replace(await self._next_pass, draft=draft)

    async def measure(self, warmup_s: float, seconds: float) -> Measurement:
        """From one pass end to another; needs clients."""
        await asyncio.sleep(warmup_s)
        begin, num_failures = await self._at_pass_end(), self.num_failures
        forecast = self.driver.scheduler.policy.forecast
        tokens, us = forecast.tokens, forecast.us
        await asyncio.sleep(seconds)
        tokens, us = forecast.tokens - tokens, forecast.us - us
        end = await self._at_pass_end()
        return replace(
            begin.until(end),
            predicted_tokens_per_s=1e6 * tokens / us if us else None,
            num_failures=self.num_failures - num_failures,
        )


@asynccontextmanager
async def service(
    setting: Setting,
    scheme: Scheme,
    helpers: Helpers,
    num_seqs: int,
    run: int = 0,
    tracing: TracingConfig = NO_TRACING,
) -> AsyncIterator[Service]:
    """Without clients yet; a draft, if the scheme has one, is attached."""
    config = app_config(setting, scheme, num_seqs).model_copy(update={"tracing": tracing})
    max_len = setting.max_tokens + PROMPT_LEN
    engine = target_engine(setting.costs, max_len, num_seqs)
    async with AsyncExitStack() as stack:
        tracer = open_tracer(tracing, "paceline-target", {})
        if tracer is not None:
            stack.callback(tracer.close)
        driver = TargetDriver(EngineWorker(engine), config, "bench-target", "boot", tracer)
        await stack.enter_async_context(driver)
        draft = None
        if scheme.kind is Kind.OURS:
            draft = helpers.draft
            wire = await helpers.wire(setting)
            address = await helpers.address(driver.server.address, wire)
            stack.push_async_callback(draft.ask, "stop")
            await draft.ask(
                "start",
                address=address,
                config=config.model_dump(mode="json"),
                costs=asdict(setting.costs),
                script=script_to_json(setting.script),
                max_len=max_len,
            )
            async with asyncio.timeout(_ATTACH_TIMEOUT_S):
                while not driver.num_links:  # noqa: ASYNC110 - the driver has no event for it
                    await asyncio.sleep(0.005)
        ratio = tracing.sample_ratio
        running = Service(driver, engine, setting, draft, run, tracer, ratio)
        stack.push_async_callback(running.set_concurrency, 0)
        yield running
