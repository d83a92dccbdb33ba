"""A demonstration of autoscaling: load rises and falls, and everything is noted beside it.

A closed loop whose number of clients follows `Phase`s. Each client asks for a text of its own
again and again; the target alone has written all of them before, and each answer is compared. Twice
a second a sample is taken. Starts nothing: the service runs, and a probe counts its replicas.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.client import Ask, LoadClient, Outcome
from paceline.bench.events import Chunk
from paceline.bench.statistics import percentile, ratio
from paceline.errors import PacelineError

SAMPLE_S = 0.5
# Figures of a sample are those of the last so many; of times to first token there are fewer.
RATE_SAMPLES = 4
TTFT_S = 5.0
# At once, before the load: so few that they call for no second target.
NUM_ALONE = 4
TIMEOUT_S = 120.0
# Answers whose times to first token are kept, the latest.
MAX_ANSWERS = 1_000_000
# A client whose request failed waits: a service that refuses at once is not hammered.
FAILURE_PAUSE_S = 0.2
# Of a phase: what its figures are taken from, when replicas have come or gone.
STEADY_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Phase:
    """So many clients for so long."""

    num_clients: int
    seconds: float


# One client, many, one, none. About two minutes.
PHASES = (Phase(1, 15), Phase(16, 50), Phase(1, 30), Phase(0, 30))


@dataclass(frozen=True, slots=True)
class Replicas:
    """What runs, starts and stops; `drafts_at_work` have at least one sequence."""

    targets: int = 0
    targets_starting: int = 0
    targets_stopping: int = 0
    drafts: int = 0
    drafts_starting: int = 0
    drafts_stopping: int = 0
    drafts_at_work: int = 0


Probe = Callable[[], Replicas]


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment, and what answers brought over the last RATE_SAMPLES. `k`: mean K in force over
    the rounds; None where there was none."""

    second: float
    clients: int
    replicas: Replicas
    tokens_per_s: float
    k: float | None
    acceptance_rate: float | None


@dataclass(slots=True)
class _Window:
    """What came between two samples."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    sum_k: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Watcher:
    """`first_tokens`: when each answer began, and after how long."""

    window: _Window = field(default_factory=_Window)
    first_tokens: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_ANSWERS)
    )
    errors: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_different: int = 0

    def begin(self, now_s: float) -> None:
        self.num_requests += 1

    def chunk(self, chunk: Chunk, now_s: float) -> None:
        window = self.window
        window.tokens += chunk.num_tokens
        window.rounds += len(chunk.round_ks)
        window.sum_k += sum(chunk.round_ks)
        window.proposed += chunk.num_proposed
        window.accepted += chunk.num_accepted

    def end(self, outcome: Outcome) -> None:
        if outcome.error:
            self.errors[outcome.error] += 1
        if outcome.first_s is not None and outcome.ttft_s is not None:
            self.first_tokens.append((outcome.first_s, outcome.ttft_s))


class Demonstration:
    """`run` once; `result` is a dict for a JSON file and for the picture."""

    def __init__(
        self, client: LoadClient, model: str, probe: Probe, phases: Sequence[Phase], max_tokens: int
    ) -> None:
        self._client, self._model, self._probe = client, model, probe
        self._phases, self._max_tokens = tuple(phases), max_tokens
        self._watcher = _Watcher()
        self._num_clients = 0
        self._running: dict[int, asyncio.Task[None]] = {}
        self._alone: dict[int, str] = {}  # digests of the target's own texts
        self._samples: list[Sample] = []

    async def run(self, tell: Callable[[str], None]) -> dict[str, Any]:
        """Raises PacelineError when not even the target alone answers."""
        tell("the target alone writes each text")
        await self._write_alone(max(phase.num_clients for phase in self._phases))
        began_s = time.monotonic()
        sampler = asyncio.create_task(self._sample(began_s))
        try:
            for phase in self._phases:
                tell(f"{phase.num_clients} clients for {phase.seconds:g} s")
                self._set_clients(phase.num_clients)
                await asyncio.sleep(phase.seconds)
        finally:
            self._num_clients = 0
            sampler.cancel()
            await asyncio.gather(sampler, *self._running.values(), return_exceptions=True)
        return self._result(began_s)

    def _ask(self, index: int, method: str) -> Ask:
        fields = {
            "model": self._model,
            "prompt": f"story {index}",
            "max_tokens": self._max_tokens,
            "temperature": 0.8 if index % 2 else 0.0,
            "seed": index,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculation": {"method": method, "include_rounds": True},
        }
        return Ask(index, "/v1/completions", fields)

    async def _write_alone(self, num_texts: int) -> None:
        places = asyncio.Semaphore(NUM_ALONE)

        async def write(index: int) -> Outcome:
            async with places:
                now_s = time.monotonic()
                return await self._client.send(self._ask(index, "off"), now_s, _Watcher())

        for outcome in await asyncio.gather(*map(write, range(num_texts))):
            if outcome.error:
                raise PacelineError(f"the target alone failed: {outcome.message or outcome.error}")
            self._alone[outcome.ask.index] = outcome.text_digest

    def _set_clients(self, num_clients: int) -> None:
        """Those that are too many end with their present answer."""
        self._num_clients = num_clients
        for index in range(num_clients):
            task = self._running.get(index)
            if task is None or task.done():
                self._running[index] = asyncio.create_task(self._one_client(index))

    async def _one_client(self, index: int) -> None:
        while index < self._num_clients:
            ask = self._ask(index, "model")
            outcome = await self._client.send(ask, time.monotonic(), self._watcher)
            if outcome.error:
                await asyncio.sleep(FAILURE_PAUSE_S)
            else:
                self._watcher.num_different += outcome.text_digest != self._alone[index]

    async def _sample(self, began_s: float) -> None:
        windows: deque[_Window] = deque(maxlen=RATE_SAMPLES)
        before_s = began_s
        while True:
            await asyncio.sleep(max(0.0, before_s + SAMPLE_S - time.monotonic()))
            replicas = await asyncio.to_thread(self._probe)
            window, self._watcher.window = self._watcher.window, _Window()
            now_s = time.monotonic()
            window.seconds, before_s = now_s - before_s, now_s
            windows.append(window)
            sample = Sample(
                second=round(now_s - began_s, 3),
                clients=self._num_clients,
                replicas=replicas,
                tokens_per_s=sum(w.tokens for w in windows) / sum(w.seconds for w in windows),
                k=ratio(sum(w.sum_k for w in windows), sum(w.rounds for w in windows)),
                acceptance_rate=ratio(
                    sum(w.accepted for w in windows), sum(w.proposed for w in windows)
                ),
            )
            self._samples.append(sample)

    def _result(self, began_s: float) -> dict[str, Any]:
        first_tokens = [(at - began_s, ttft) for at, ttft in self._watcher.first_tokens]
        rows = [row(sample, first_tokens) for sample in self._samples]
        return {
            "phases": [dataclasses.asdict(phase) for phase in self._phases],
            "max_tokens": self._max_tokens,
            "summary": {
                "requests": self._watcher.num_requests,
                "failures": dict(self._watcher.errors),
                "different_texts": self._watcher.num_different,
                **moments(self._samples, self._phases),
                "phases": steady_figures(rows, self._phases),
            },
            "samples": rows,
        }


def row(sample: Sample, first_tokens: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A sample for the result, with the median time to first token of the last TTFT_S.

    `first_tokens`: when answers began, in seconds like the sample's, and after how many.
    """
    figures = dataclasses.asdict(sample)
    figures |= figures.pop("replicas")
    since_s = sample.second - TTFT_S
    ttfts = sorted(ttft for at, ttft in first_tokens if since_s < at <= sample.second)
    p50 = round(1000 * percentile(ttfts, 50), 1) if ttfts else None
    return {**figures, "tokens_per_s": round(sample.tokens_per_s, 2), "ttft_p50_ms": p50}


def moments(samples: Sequence[Sample], phases: Sequence[Phase]) -> dict[str, float | None]:
    """Seconds from a change of load until the replicas have followed; None: they have not.

    The load rises at the beginning of the phase with most clients, and falls at its end; it ends
    with the last phase that has a client.
    """
    peak = max(range(len(phases)), key=lambda index: phases[index].num_clients)
    ends = [sum(phase.seconds for phase in phases[: i + 1]) for i in range(len(phases))]
    rises_s, falls_s = ends[peak] - phases[peak].seconds, ends[peak]
    busy = [end for end, phase in zip(ends, phases, strict=True) if phase.num_clients]

    def after(since_s: float, until_s: float, is_so: Callable[[Replicas], bool]) -> float | None:
        times = (s.second for s in samples if since_s < s.second and is_so(s.replicas))
        first = next(times, None)
        return None if first is None or first > until_s else round(first - since_s, 2)

    last = ends[-1]
    return {
        "second_draft_starts_s": after(
            rises_s, falls_s, lambda r: r.drafts + r.drafts_starting > 1
        ),
        "second_draft_runs_s": after(rises_s, falls_s, lambda r: r.drafts > 1),
        "second_draft_is_used_s": after(rises_s, falls_s, lambda r: r.drafts_at_work > 1),
        "second_target_runs_s": after(rises_s, falls_s, lambda r: r.targets > 1),
        "second_draft_stops_s": after(falls_s, last, lambda r: r.drafts < 2),
        "second_draft_is_gone_s": after(falls_s, last, lambda r: r.drafts + r.drafts_stopping < 2),
        "second_target_is_gone_s": after(
            falls_s, last, lambda r: r.targets + r.targets_stopping < 2
        ),
        "last_draft_is_gone_s": after(busy[-1], last, lambda r: r.drafts + r.drafts_stopping < 1),
    }


def steady_figures(rows: Sequence[dict[str, Any]], phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """Means over the second half of each phase; None where there is nothing."""
    figures, end_s = [], 0.0
    for phase in phases:
        end_s += phase.seconds
        since_s = end_s - STEADY_SHARE * phase.seconds
        seen = [row for row in rows if since_s < row["second"] <= end_s]
        names = ("targets", "drafts", "tokens_per_s", "k", "acceptance_rate", "ttft_p50_ms")
        means: dict[str, Any] = {"clients": phase.num_clients}
        for name in names:
            values = [row[name] for row in seen if row[name] is not None]
            means[name] = ratio(sum(values), len(values))
        figures.append(means)
    return figures
