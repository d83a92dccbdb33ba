"""`paceline bench live`: load a running service and say what its clients saw.

One run is one side (what the configuration asks) or, with a comparison, that side and the same
requests without speculation in turns: A B, B A, ... so that a machine that drifts favors neither.
The result is one plain dict, which is the JSON file. Knows no terminal and no plots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline import __version__
from paceline.bench.arrivals import arrival_times
from paceline.bench.client import Ask, Clock, LoadClient, Outcome
from paceline.bench.load import MAX_REQUESTS, Amount, Sleep, closed_loop, open_loop
from paceline.bench.prompts import AUTO, Prompt
from paceline.bench.recorder import Recorder, Slo
from paceline.bench.statistics import ratio, spread
from paceline.errors import ConfigError, PacelineError

Status = Callable[[str], None]
MAX_CONCURRENCY = 4096
MAX_DURATION_S = 86_400.0
OFF: Mapping[str, Any] = {"method": "off"}


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """What to send. Without `rate` a closed loop of `concurrency` clients; with it an open loop.

    `num_requests` 0: every prompt once, or as many as `duration_s` takes. `blocks`: with
    `compare_off`, how often each side runs so much. `speculation` is the request's field,
    `extra_body` has any other.
    """

    url: str
    concurrency: int = 1
    rate: float | None = None
    burstiness: float = 1.0
    max_in_flight: int = 512
    num_requests: int = 0
    duration_s: float | None = None
    num_warmup: int = 0
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    endpoint: str = AUTO
    model: str = ""
    speculation: Mapping[str, Any] = field(default_factory=dict)
    include_rounds: bool = True
    slo: Slo = field(default_factory=Slo)
    compare_off: bool = False
    blocks: int = 3
    timeout_s: float = 600.0
    keep_records: bool = False

    def check(self) -> None:
        """Raises ConfigError, one sentence, for what cannot be run."""
        for name, value, most in (
            ("concurrency", self.concurrency, MAX_CONCURRENCY),
            ("max-in-flight", self.max_in_flight, MAX_CONCURRENCY),
            ("num-requests", self.num_requests or 1, MAX_REQUESTS),
            ("duration", self.duration_s or 1.0, MAX_DURATION_S),
            ("blocks", self.blocks, 1000),
        ):
            if not 0 < value <= most:
                raise ConfigError(f"--{name} must be above 0 and at most {most:g}, not {value}")
        if self.rate is not None and not (self.rate > 0 and self.burstiness > 0):
            raise ConfigError("--rate and --burstiness must be above 0")
        if self.compare_off and self.speculation.get("method") == "off":
            raise ConfigError("--compare off needs a side with speculation; leave out --method off")

    @property
    def most_in_flight(self) -> int:
        return self.concurrency if self.rate is None else self.max_in_flight

    def amount(self, num_prompts: int) -> Amount:
        if self.duration_s is not None:
            return Amount(self.num_requests or MAX_REQUESTS, self.duration_s)
        return Amount(self.num_requests or num_prompts)


async def run_live(
    config: LiveConfig,
    prompts: Sequence[Prompt],
    api_key: str = "",
    status: Status = lambda text: None,
    clock: Clock = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> dict[str, Any]:
    """The whole benchmark. Raises PacelineError when there is no service, or no request of a
    warm-up succeeded; failures of measured requests are counted instead."""
    config.check()
    client = LoadClient(config.url, api_key, config.most_in_flight, config.timeout_s, clock)
    async with client:
        model = config.model or await client.model()
        bench = LiveBench(config, prompts, model, client, status, clock, sleep)
        await bench.warm_up()
        return await (bench.compare() if config.compare_off else bench.measure())


class LiveBench:
    """One benchmark over one client; `run_live` makes it."""

    def __init__(
        self,
        config: LiveConfig,
        prompts: Sequence[Prompt],
        model: str,
        client: LoadClient,
        status: Status,
        clock: Clock,
        sleep: Sleep,
    ) -> None:
        self.config = config
        self._prompts = prompts
        self._model = model
        self.client = client
        self._status = status
        self.clock = clock
        self.sleep = sleep
        for prompt in prompts:
            prompt.fields(config.endpoint)  # what fits no endpoint is said before anything is sent

    async def warm_up(self) -> None:
        """Not measured, with and without drafts as the sides will run."""
        if not (num := self.config.num_warmup):
            return
        self._status(f"warming up with {num} requests")
        for speculation in self._sides().values():
            side = Side(self, speculation, keep_outcomes=True)
            await side.closed(Amount(num), min(num, self.config.most_in_flight))
            if not side.recorder.totals["requests"]:
                failed = side.recorder.outcomes[0]
                raise PacelineError(
                    f"no warm-up request succeeded; the first: {failed.error}, {failed.message}"
                )

    async def measure(self) -> dict[str, Any]:
        side = Side(self, self.config.speculation, self.config.keep_records)
        self._status(self._words("measuring"))
        cpu_s = time.process_time()
        await side.run(self.config.amount(len(self._prompts)))
        return self._result(side, time.process_time() - cpu_s, side.recorder.elapsed_s)

    async def compare(self) -> dict[str, Any]:
        sides = {name: Side(self, spec, True) for name, spec in self._sides().items()}
        blocks: list[dict[str, Any]] = []
        cpu_s, amount = time.process_time(), self.config.amount(len(self._prompts))
        for number in range(self.config.blocks):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            block: dict[str, Any] = {"order": order}
            first_index = max(side.next_index for side in sides.values())
            for name in order:
                self._status(self._words(f"block {number + 1}/{self.config.blocks}, {name},"))
                sides[name].next_index = first_index  # the same requests on both sides
                block[name] = await sides[name].run(amount)
            for figure in ("tokens_per_s", "tpot_ms"):
                block[f"{figure}_ratio"] = _block_ratio(block, figure)
            blocks.append(block)
        drafted, off = sides["with"], sides["off"]
        elapsed_s = drafted.recorder.elapsed_s + off.recorder.elapsed_s
        result = self._result(drafted, time.process_time() - cpu_s, elapsed_s)
        result["compare"] = {
            "off": off.report(),
            "blocks": blocks,
            **{
                name: spread([block[name] for block in blocks if block[name] is not None])
                for name in ("tokens_per_s_ratio", "tpot_ms_ratio")
            },
            "texts": _compare_texts(drafted.recorder.outcomes, off.recorder.outcomes),
        }
        return result

    def ask(self, index: int, speculation: Mapping[str, Any]) -> Ask:
        """Request number `index`: the same prompt and seed on every side."""
        config, prompt = self.config, self._prompts[index % len(self._prompts)]
        path, fields = prompt.fields(config.endpoint)
        fields |= {
            "model": self._model,
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            "seed": config.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if config.ignore_eos:
            fields["ignore_eos"] = True
        fields |= config.extra_body
        extension = dict(speculation) | ({"include_rounds": True} if config.include_rounds else {})
        if extension:
            fields["speculation"] = extension
        return Ask(index, path, fields, prompt.id, prompt.category)

    def _sides(self) -> dict[str, Mapping[str, Any]]:
        sides: dict[str, Mapping[str, Any]] = {"with": self.config.speculation}
        return sides | ({"off": OFF} if self.config.compare_off else {})

    def _words(self, what: str) -> str:
        config, amount = self.config, self.config.amount(len(self._prompts))
        much = f"{amount.num_requests} requests"
        if amount.duration_s is not None:
            much = f"{amount.duration_s:g} s"
        if config.rate is not None:
            return f"{what} {much} at {config.rate:g} requests/s"
        return f"{what} {much}, {config.concurrency} at a time"

    def _result(self, side: Side, cpu_s: float, elapsed_s: float) -> dict[str, Any]:
        config = asdict(self.config)
        return {
            "benchmark": "live",
            "version": __version__,
            "model": self._model,
            "num_prompts": len(self._prompts),
            "config": config,
            # Near 1 the client, one process, is the bottleneck: the figures are its own.
            "client_cpu_share": ratio(cpu_s, elapsed_s),
            **side.report(),
        }


class Side:
    """The requests of one kind, over one or more blocks."""

    def __init__(
        self, bench: LiveBench, speculation: Mapping[str, Any], keep_outcomes: bool
    ) -> None:
        self._bench = bench
        self._config = bench.config
        self._speculation = speculation
        self.recorder = Recorder(self._config.slo, keep_outcomes)
        self._num_full_tokens, self._full_s = 0, 0.0
        self.next_index = 0

    async def run(self, amount: Amount) -> dict[str, Any]:
        """One block; its own figures. Later blocks go on in the list of prompts."""
        if self._config.rate is None:
            return await self.closed(amount, self._config.concurrency)
        arrivals = arrival_times(self._config.rate, self._config.burstiness, self._config.seed)
        before = self._begin()
        result = await open_loop(
            self._send,
            arrivals,
            self._config.max_in_flight,
            amount,
            self._bench.clock,
            self._bench.sleep,
        )
        for _ in range(result.skipped):
            self.recorder.skip()
        return self._end(before, result.begun + result.skipped)

    async def closed(self, amount: Amount, concurrency: int) -> dict[str, Any]:
        before, began_s = self._begin(), self._bench.clock()
        num_before = self.recorder.num_received_tokens

        def not_full(now_s: float) -> None:
            self._full_s += now_s - began_s
            self._num_full_tokens += self.recorder.num_received_tokens - num_before

        result = await closed_loop(
            self._send, concurrency, amount, self._bench.clock, self._bench.sleep, not_full
        )
        return self._end(before, result.begun)

    def report(self) -> dict[str, Any]:
        summary = self.recorder.summary()
        # Tokens that came while all N clients of the closed loop were busy; null in an open loop.
        summary["full_tokens_per_s"] = ratio(self._num_full_tokens, self._full_s)
        report = {
            "summary": summary,
            "timeline": self.recorder.timeline(),
            "quantiles": self.recorder.quantiles(),
        }
        if self._config.keep_records:
            report["records"] = [_record(outcome) for outcome in self.recorder.outcomes]
        return report

    async def _send(self, index: int, due_s: float) -> bool:
        ask = self._bench.ask(self.next_index + index, self._speculation)
        outcome = await self._bench.client.send(ask, due_s, self.recorder)
        return not outcome.error

    def _begin(self) -> tuple[float, int, float, int]:
        self.recorder.resume(self._bench.clock())
        return self._counts()

    def _end(self, before: tuple[float, int, float, int], num_begun: int) -> dict[str, Any]:
        self.recorder.pause(self._bench.clock())
        self.next_index += num_begun
        after = self._counts()
        elapsed_s, tokens, tpot_s, num_ok = (b - a for a, b in zip(before, after, strict=True))
        return {
            "tokens_per_s": ratio(tokens, elapsed_s),
            "tpot_ms": ratio(tpot_s * 1000, num_ok),
            "num_ok": num_ok,
        }

    def _counts(self) -> tuple[float, int, float, int]:
        totals, tpot = self.recorder.totals, self.recorder.tpot
        return self.recorder.elapsed_s, totals["tokens"], tpot.total, tpot.count


def _block_ratio(block: Mapping[str, Any], figure: str) -> float | None:
    """With speculation / without it; above 1 is more tokens a second, or more time per token."""
    drafted, off = block["with"][figure], block["off"][figure]
    return None if drafted is None or not off else ratio(drafted, off)


def _compare_texts(drafted: Sequence[Outcome], off: Sequence[Outcome]) -> dict[str, int]:
    """Speculation changes no text: requests that both sides answered, and how many are equal."""
    texts = {outcome.ask.index: outcome.text_digest for outcome in off if not outcome.error}
    both = [item for item in drafted if not item.error and item.ask.index in texts]
    equal = sum(item.text_digest == texts[item.ask.index] for item in both)
    return {"compared": len(both), "equal": equal}


def _record(outcome: Outcome) -> dict[str, Any]:
    return {
        "index": outcome.ask.index,
        "prompt_id": outcome.ask.prompt_id,
        "category": outcome.ask.category,
        "error": outcome.error,
        "message": outcome.message,
        "finish_reason": outcome.finish_reason,
        "prompt_tokens": outcome.num_prompt_tokens,
        "output_tokens": outcome.num_tokens,
        "chunks": outcome.num_chunks,
        "start_lag_ms": _ms(outcome.sent_s - outcome.due_s),
        "ttft_ms": _ms(outcome.ttft_s),
        "tpot_ms": _ms(outcome.tpot_s),
        "e2e_ms": _ms(outcome.latency_s),
        "rounds": outcome.num_rounds,
        "proposed": outcome.num_proposed,
        "accepted": outcome.num_accepted,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
