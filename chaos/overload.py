"""Scenario: ten times the load that the service can carry. Does it still do its best?

First the peak: as many clients as there are places, each asking again at once. Then requests
arrive ten times as often as they were finished there, whatever becomes of them. Goodput is what
the targets committed in the same middle part of both phases, as no admitted request fails.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass

from chaos import run, traffic
from chaos.checks import Findings
from chaos.cluster import Cluster
from chaos.run import Result
from chaos.scenarios import SHED, Scenario

FACTOR = 10
MAX_TOKENS = 250
WARM_UP_S = 4.0
WINDOW_S = 8.0
MAX_IN_FLIGHT = 1000
MIN_GOODPUT = 0.9
MAX_REFUSAL_S = 0.25


@dataclass
class Phase:
    """What one way of asking brought."""

    outcomes: list[traffic.Outcome]
    goodput: float  # tokens/s
    finished_per_s: float

    def latencies(self, is_done: bool) -> list[float]:
        return sorted(
            outcome.ended_s - outcome.started_s
            for outcome in self.outcomes
            if outcome.is_done is is_done
        )


def body(index: int) -> traffic.Request:
    fields = {
        "model": "toy",
        "prompt": f"load {index}",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        "seed": index,
        "ignore_eos": True,
    }
    return traffic.Request(index, "/v1/completions", fields)


async def committed(cluster: Cluster) -> tuple[float, int]:
    """(now, tokens committed by all targets so far)."""
    targets = await cluster.stats("TargetReplica")
    total = sum(int(target["scheduler"]["num_committed_tokens"]) for target in targets)
    return time.monotonic(), total


async def watch(cluster: Cluster) -> tuple[float, float, float]:
    """(goodput, from, until) of the middle part of a phase that has just begun."""
    await asyncio.sleep(WARM_UP_S)
    began_s, first = await committed(cluster)
    await asyncio.sleep(WINDOW_S)
    ended_s, last = await committed(cluster)
    return (last - first) / (ended_s - began_s), began_s, ended_s


async def closed_loop(cluster: Cluster, places: int) -> Phase:
    """The peak: every place is taken all the time."""
    over = asyncio.Event()
    requests = [body(index) for index in range(200)]
    load = asyncio.create_task(traffic.run_load(cluster.url, requests, places, over.is_set))
    goodput, began_s, ended_s = await watch(cluster)
    over.set()
    outcomes = await load
    finished = [o for o in outcomes if o.is_done and began_s < o.ended_s <= ended_s]
    return Phase(outcomes, goodput, len(finished) / (ended_s - began_s))


async def open_loop(cluster: Cluster, per_s: float) -> Phase:
    """Arrivals by the clock."""
    watcher = asyncio.create_task(watch(cluster))
    tasks: list[asyncio.Task[traffic.Outcome]] = []
    started_s = time.monotonic()
    async with traffic.client(cluster.url, MAX_IN_FLIGHT) as http:
        while not watcher.done():
            due_s = started_s + len(tasks) / per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(asyncio.create_task(traffic.send(http, body(1000 + len(tasks)))))
        outcomes = list(await asyncio.gather(*tasks))
    goodput, began_s, ended_s = await watcher
    finished = [o for o in outcomes if o.is_done and began_s < o.ended_s <= ended_s]
    return Phase(outcomes, goodput, len(finished) / (ended_s - began_s))


async def overload(
    cluster: Cluster, scenario: Scenario, seed: int, reference: run.Reference
) -> Result:
    """Peak and ten times the peak in one run."""
    result = Result(scenario.name, seed, scenario.promise, round_s=reference.round_s)
    await cluster.wait_steady()
    places = cluster.config.target.max_num_seqs * len(await cluster.replicas("TargetReplica"))
    peak = await closed_loop(cluster, places)
    flood = await open_loop(cluster, FACTOR * peak.finished_per_s)
    await run.settle(cluster, result)
    refused = [outcome for outcome in flood.outcomes if outcome.has_failed]
    result.faults_fired = len(refused)
    result.findings = Findings(
        requests=len(peak.outcomes) + len(flood.outcomes),
        finished=sum(outcome.is_done for outcome in peak.outcomes + flood.outcomes),
        failed=0,
        errors=Counter(outcome.error for outcome in refused),
    )
    _judge(result, peak, flood, refused)
    return result


def _judge(result: Result, peak: Phase, flood: Phase, refused: list[traffic.Outcome]) -> None:
    share = flood.goodput / peak.goodput
    quick = flood.latencies(is_done=False) or [0.0]
    median_s, worst_s = statistics.median(quick), quick[int(0.99 * (len(quick) - 1))]
    admitted = flood.latencies(is_done=True) or [0.0]
    result.figures = {
        "goodput": f"{peak.goodput:.0f} tokens/s at the peak, {flood.goodput:.0f} at 10x "
        f"({share:.3f})",
        "offered": f"{len(flood.outcomes) / (WARM_UP_S + WINDOW_S):.1f} requests/s against "
        f"{peak.finished_per_s:.1f} finished at the peak, {len(refused)} refused "
        f"{dict(result.findings.errors)}",
        "refusals": f"median {median_s * 1000:.0f} ms, p99 {worst_s * 1000:.0f} ms",
        "admitted": f"median {statistics.median(admitted):.1f} s, at the peak "
        f"{statistics.median(peak.latencies(is_done=True)):.1f} s",
    }
    if share < MIN_GOODPUT:
        result.violations.append(f"goodput fell to {share:.2f} of the peak")
    if not refused:
        result.violations.append("nothing was refused: no overload")
    wrong = {code for code in result.findings.errors if code not in SHED}
    if wrong:
        result.violations.append(f"refused with {sorted(wrong)}")
    unclear = [o for o in refused if o.status not in (429, 503) or not o.retry_after]
    if unclear:
        result.violations.append(f"{len(unclear)} refusals without 429/503 and Retry-After")
    if median_s > MAX_REFUSAL_S:
        result.violations.append(f"refusals take {median_s:.2f} s")
    result.findings.failed = len([o for o in refused if o.error not in SHED])
