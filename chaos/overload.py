"""Scenario: ten times the load that the service can carry. Does it still do its best?

First the peak: as many clients as there are places, each asking again at once. Then requests
arrive ten times as often as they were finished there, whatever becomes of them. Then the peak once
more: two peaks tell what else this machine does. Goodput is what the targets committed in the
same middle part of every phase, as no admitted request fails.

Runs with slow engines (`scenarios.SLOW_STEP_MS`): what is scarce must be the accelerator, as in
production, not the cores that client, proxy, gateways and targets share here.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from chaos import alone, checks, cpu, run, traffic
from chaos.cluster import Cluster
from chaos.run import Result
from chaos.scenarios import SHED, Scenario

FACTOR = 10
MAX_TOKENS = 160
NUM_BODIES = 12  # asked again and again, so that all answers have a reference
WARM_UP_S = 2.5
WINDOW_S = 7.0
MAX_IN_FLIGHT = 1000
MIN_GOODPUT = 0.9
# Half of the refusals; or, where the machine itself is that slow, twice what the cheapest request
# there is takes in the same flood.
MAX_REFUSAL_S = 0.25
MAX_REFUSAL_FACTOR = 2.0
PROBE_PAUSE_S = 0.25


@dataclass
class Phase:
    """What one way of asking brought."""

    outcomes: list[traffic.Outcome]
    goodput: float  # tokens/s in the middle part
    finished_per_s: float
    cores: str  # in use meanwhile
    cheapest: list[float] = field(default_factory=list)  # seconds of a GET /v1/models meanwhile

    def latencies(self, is_done: bool) -> list[float]:
        return sorted(
            outcome.ended_s - outcome.started_s
            for outcome in self.outcomes
            if outcome.is_done is is_done
        )


def body(seed: int, index: int) -> traffic.Request:
    fields = {
        "model": "toy",
        "prompt": f"load {index}",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8 if index % 3 else 0.0,
        "seed": seed * 1000 + index,
        "ignore_eos": True,
    }
    return traffic.Request(index, "/v1/completions", fields)


async def committed(cluster: Cluster) -> tuple[float, int]:
    """(now, tokens committed by all targets so far)."""
    targets = await cluster.stats("TargetReplica")
    total = sum(int(target["scheduler"]["num_committed_tokens"]) for target in targets)
    return time.monotonic(), total


@dataclass(frozen=True)
class Window:
    """The middle part of a phase."""

    began_s: float
    ended_s: float
    goodput: float
    cores: str

    def phase(self, outcomes: list[traffic.Outcome]) -> Phase:
        finished = [o for o in outcomes if o.is_done and self.began_s < o.ended_s <= self.ended_s]
        per_s = len(finished) / (self.ended_s - self.began_s)
        return Phase(outcomes, self.goodput, per_s, self.cores)


async def watch(cluster: Cluster) -> Window:
    """The window of a phase that has just begun."""
    await asyncio.sleep(WARM_UP_S)
    busy = cpu.read()
    began_s, first = await committed(cluster)
    await asyncio.sleep(WINDOW_S)
    ended_s, last = await committed(cluster)
    cores = busy.until(cpu.read())
    return Window(began_s, ended_s, (last - first) / (ended_s - began_s), cores)


async def closed_loop(cluster: Cluster, requests: list[traffic.Request], places: int) -> Phase:
    """The peak: every place is taken all the time."""
    over = asyncio.Event()
    load = asyncio.create_task(traffic.run_load(cluster.url, requests, places, over.is_set))
    window = await watch(cluster)
    over.set()
    return window.phase(await load)


async def open_loop(cluster: Cluster, requests: list[traffic.Request], per_s: float) -> Phase:
    """Arrivals by the clock."""
    watcher = asyncio.create_task(watch(cluster))
    prober = asyncio.create_task(probe(cluster, watcher))
    tasks: list[asyncio.Task[traffic.Outcome]] = []
    started_s = time.monotonic()
    async with traffic.client(cluster.url, MAX_IN_FLIGHT) as http:
        while not watcher.done():
            due_s = started_s + len(tasks) / per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            request = requests[len(tasks) % len(requests)]
            tasks.append(asyncio.create_task(traffic.send(http, request)))
        outcomes = list(await asyncio.gather(*tasks))
    phase = (await watcher).phase(outcomes)
    phase.cheapest = await prober
    return phase


async def probe(cluster: Cluster, watcher: asyncio.Task[Window]) -> list[float]:
    """How long the cheapest request takes, again and again until the window ends."""
    seconds = []
    async with traffic.client(cluster.url) as http:
        while not watcher.done():
            started_s = time.monotonic()
            (await http.get("/v1/models")).raise_for_status()
            seconds.append(time.monotonic() - started_s)
            await asyncio.sleep(PROBE_PAUSE_S)
    return seconds


async def overload(
    cluster: Cluster, scenario: Scenario, seed: int, reference: run.Reference
) -> Result:
    """Peak and ten times the peak in one run."""
    result = Result(scenario.name, seed, scenario.promise, round_s=reference.round_s)
    await cluster.wait_steady()
    places = cluster.config.target.max_num_seqs * len(await cluster.replicas("TargetReplica"))
    requests = [body(seed, index) for index in range(NUM_BODIES)]
    references = alone.references(cluster.config.target.model, requests)
    peak = await closed_loop(cluster, requests, places)
    flood = await open_loop(cluster, requests, FACTOR * peak.finished_per_s)
    again = await closed_loop(cluster, requests, places)
    await run.settle(cluster, result)
    at_peak = [*peak.outcomes, *again.outcomes]
    refused = [outcome for outcome in flood.outcomes if outcome.has_failed]
    lost_at_peak = [outcome for outcome in at_peak if outcome.has_failed]
    result.faults_fired = len(refused)
    # A refused request has no text to compare, and has not failed: that it is told is promised.
    answered = [o for o in at_peak + flood.outcomes if o.is_done]
    result.findings = checks.examine(answered, references)
    result.findings.requests = len(at_peak) + len(flood.outcomes)
    result.findings.errors = Counter(o.error for o in [*refused, *lost_at_peak])
    result.findings.failed = sum(o.error not in SHED for o in [*refused, *lost_at_peak])
    run.judge(result, scenario)
    _judge(result, [peak, again], flood, refused)
    return result


def _judge(
    result: Result, peaks: list[Phase], flood: Phase, refused: list[traffic.Outcome]
) -> None:
    peak, goodputs = peaks[0], [phase.goodput for phase in peaks]
    share = flood.goodput / statistics.mean(goodputs)
    # By how much the peaks differ from their mean: what this run cannot tell.
    error = (max(goodputs) - min(goodputs)) / 2 / statistics.mean(goodputs)
    quick = flood.latencies(is_done=False) or [0.0]
    median_s, worst_s = statistics.median(quick), quick[int(0.99 * (len(quick) - 1))]
    cheapest_s = statistics.median(flood.cheapest or [0.0])
    admitted = flood.latencies(is_done=True) or [0.0]
    result.figures = {
        "goodput": f"{flood.goodput:.0f} tokens/s at 10x, at the peak before and after "
        f"{' and '.join(f'{goodput:.0f}' for goodput in goodputs)} "
        f"({share:.3f} +- {error:.3f} of the peak)",
        "CPU in use": f"{peak.cores} at the peak, {flood.cores} at 10x",
        "offered": f"{len(flood.outcomes) / (WARM_UP_S + WINDOW_S):.1f} requests/s against "
        f"{peak.finished_per_s:.1f} finished at the peak, {len(refused)} refused "
        f"{dict(result.findings.errors)}",
        "refusals": f"median {median_s * 1000:.0f} ms, p99 {worst_s * 1000:.0f} ms; GET /v1/models "
        f"meanwhile: median {cheapest_s * 1000:.0f} ms",
        "admitted": f"median {statistics.median(admitted):.1f} s, at the peak "
        f"{statistics.median(peak.latencies(is_done=True)):.1f} s",
    }
    if share + error < MIN_GOODPUT:
        result.violations.append(f"goodput fell to {share:.2f} of the peak")
    if not refused:
        result.violations.append("nothing was refused: no overload")
    unclear = [o for o in refused if o.status not in (429, 503) or not o.retry_after]
    if unclear:
        result.violations.append(f"{len(unclear)} refusals without 429/503 and Retry-After")
    if median_s > max(MAX_REFUSAL_S, MAX_REFUSAL_FACTOR * cheapest_s):
        result.violations.append(f"refusals take {median_s:.2f} s")
