"""A draft replica for the benchmark: the real driver around an engine that only costs time.

Run as a helper; knows no target's settings and no Ray.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from paceline.bench.ceiling import Costs
from paceline.bench.processes import Handler, serve
from paceline.bench.schemes import draft_engine, engine_info
from paceline.config import AppConfig
from paceline.draft.driver import DraftDriver
from paceline.engine.scripted import Phase, Script
from paceline.engine.timed import TimedEngine
from paceline.engine.worker import EngineWorker
from paceline.protocol.draft_table import SUPPORTED_MODES
from paceline.protocol.messages import PROTOCOL_VERSION, Hello
from paceline.rpc.client import dial
from paceline.tracing.process import ProcessTracer, open_tracer

# Of a measurement of the round trip: as many as the clock filter looks at.
_NUM_PINGS = 32
_PING_INTERVAL_S = 0.01
_CONNECT_TIMEOUT_S = 20.0

Json = dict[str, Any]


def script_to_json(script: Script) -> Json:
    classes = [[[phase.num_tokens, phase.acceptance] for phase in each] for each in script.classes]
    return {"classes": classes, "corrections": list(script.corrections)}


def script_from_json(json: Json) -> Script:
    classes = tuple(tuple(Phase(*phase) for phase in each) for each in json["classes"])
    return Script(classes, tuple(json["corrections"]))


class DraftProcess:
    """At most one draft at a time."""

    def __init__(self) -> None:
        self._engine: TimedEngine | None = None
        self._driver: DraftDriver | None = None
        self._tracer: ProcessTracer | None = None

    async def start(
        self, address: str, config: Json, costs: Json, script: Json, max_len: int
    ) -> Json:
        """A new draft that serves the target at `address`; answers when it is connected."""
        settings = AppConfig.model_validate(config)
        num_seqs = settings.draft.max_sessions
        self._engine = draft_engine(Costs(**costs), script_from_json(script), max_len, num_seqs)
        worker = EngineWorker(self._engine)
        self._tracer = open_tracer(settings.tracing, "paceline-draft", {})
        self._driver = DraftDriver(
            worker, settings.draft, settings.rpc, "bench-draft", "boot", self._tracer
        )
        await self._driver.start()
        self._driver.set_targets([address])
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            while not self._driver.connected:  # noqa: ASYNC110 - it has no event for it
                await asyncio.sleep(0.005)
        return {}

    async def stats(self) -> Json:
        """Numbers that only rise."""
        if self._driver is None or self._engine is None:
            return {}
        engine = self._engine.stats()
        counts = asdict(self._driver.table.stats).items()
        return {name: value for name, value in counts if isinstance(value, int)} | {
            "busy_s": self._engine.busy_s,
            "num_late": self._engine.num_late,
            "num_passes": engine.num_passes,
            "num_rows": engine.num_rows,
            "num_found_rows": engine.num_prefix_tokens,
        }

    async def stop(self) -> Json:
        driver, self._driver, self._engine = self._driver, None, None
        tracer, self._tracer = self._tracer, None
        if driver is not None:
            await driver.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        return {}

    async def ping(self, address: str, config: Json) -> Json:
        """The round trip to a target by the stream's own pings, microseconds."""
        settings = AppConfig.model_validate(config)
        rpc = settings.rpc.model_copy(update={"ping_interval_s": _PING_INTERVAL_S})
        info = engine_info("scripted-draft", 64, 1)
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            boot_id="ping",
            replica_id="bench-ping",
            model_id=info.model_id,
            vocab_size=info.vocab_size,
            tokenizer_hash=info.tokenizer_hash,
            max_model_len=info.max_model_len,
            max_sessions=1,
            modes=SUPPORTED_MODES,
        )
        async with dial(address, rpc, hello) as (_, stream):
            await asyncio.sleep(_NUM_PINGS * _PING_INTERVAL_S * 1.5)
            return {"rtt_us": stream.clock.rtt_us}


async def main() -> None:
    process = DraftProcess()
    handlers: dict[str, Handler] = {
        "start": process.start,
        "stats": process.stats,
        "stop": process.stop,
        "ping": process.ping,
    }
    try:
        await serve(handlers)
    finally:
        await process.stop()


if __name__ == "__main__":
    asyncio.run(main())
