"""Scenario: all drafts die under load. Is the service then as fast as one without drafts?

Blocks with dead drafts and blocks that ask for `speculation: off` take turns, so that whatever
else this machine does hits both alike. Then the drafts return.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass

from chaos import checks, run, traffic
from chaos.cluster import Cluster
from chaos.faults.drafts_gone import DraftsGone
from chaos.run import Result
from chaos.scenarios import Scenario

CONCURRENCY = 8
MAX_TOKENS = 64
NUM_PAIRS = 6
NUM_HEALTHY = 3
MIN_RATIO = 0.97
MIN_RETURN = 0.8  # two moments on a shared machine: less exact than blocks in turns


@dataclass
class Block:
    """One crowd of equal requests that came together."""

    outcomes: list[traffic.Outcome]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(outcome.num_tokens for outcome in self.outcomes) / self.seconds

    @property
    def accepted_share(self) -> float:
        total = sum(outcome.num_tokens for outcome in self.outcomes)
        return sum(outcome.num_accepted for outcome in self.outcomes) / total if total else 0.0


async def block(cluster: Cluster, seed: int, is_off: bool = False) -> Block:
    """Eight requests of the same length; texts depend on the seed alone."""
    requests = []
    for index in range(CONCURRENCY):
        body = {
            "model": "toy",
            "prompt": f"block {index}",
            "max_tokens": MAX_TOKENS,
            "temperature": 0.8 if index % 2 else 0.0,
            "seed": seed * 100 + index,
            "ignore_eos": True,
        }
        request = traffic.Request(index, "/v1/completions", body)
        requests.append(traffic.without_drafts(request) if is_off else request)
    started_s = time.monotonic()
    outcomes = await traffic.run_load(cluster.url, requests, CONCURRENCY)
    return Block(outcomes, time.monotonic() - started_s)


async def drafts_dead(
    cluster: Cluster, scenario: Scenario, seed: int, reference: run.Reference
) -> Result:
    """Healthy, killed in the middle of a block, dead and off in turns, healed."""
    result = Result(scenario.name, seed, scenario.promise, round_s=reference.round_s)
    await cluster.wait_steady()
    fault = DraftsGone(cluster, random.Random(f"{scenario.name}/{seed}"))
    alone = await block(cluster, seed, is_off=True)
    before = [await block(cluster, seed) for _ in range(NUM_HEALTHY)]
    try:
        hit = asyncio.create_task(block(cluster, seed))
        await asyncio.sleep(before[-1].seconds / 3)
        await fault.inject()
        killed = await hit
        async with asyncio.timeout(60.0):
            await fault.wait_gone()
        dead, off = [], []
        for _ in range(NUM_PAIRS):
            dead.append(await block(cluster, seed))
            off.append(await block(cluster, seed, is_off=True))
    finally:
        await fault.heal()
    await run.settle(cluster, result)
    after = [await block(cluster, seed) for _ in range(NUM_HEALTHY)]
    result.faults_fired = fault.num_fired
    references = sorted(alone.outcomes, key=lambda outcome: outcome.request.index)
    blocks = [*before, killed, *dead, *off, *after]
    result.findings = checks.examine([o for b in blocks for o in b.outcomes], references)
    run.judge(result, scenario)
    _compare(result, before, dead, off, after)
    return result


def _compare(
    result: Result, before: list[Block], dead: list[Block], off: list[Block], after: list[Block]
) -> None:
    ratio = statistics.median(
        d.tokens_per_s / o.tokens_per_s for d, o in zip(dead, off, strict=True)
    )
    returned = _speed(after) / _speed(before)
    result.figures = {
        "tokens/s": (
            f"{_speed(before):.0f} with drafts, {_speed(dead):.0f} all dead, "
            f"{_speed(off):.0f} speculation off, {_speed(after):.0f} drafts back"
        ),
        "dead / off": round(ratio, 4),
        "accepted share of tokens": (
            f"{_share(before):.2f} before, {_share(dead):.2f} dead, {_share(after):.2f} back"
        ),
        "back / before": round(returned, 3),
    }
    if ratio < MIN_RATIO:
        result.violations.append(f"with dead drafts {ratio:.3f} of the speed without drafts")
    if _share(dead):
        result.violations.append("proposals were accepted although all drafts were dead")
    if returned < MIN_RETURN or _share(after) < MIN_RETURN * _share(before):
        result.violations.append(f"speed did not return: {returned:.2f} of what it was")


def _speed(blocks: list[Block]) -> float:
    return statistics.median(block.tokens_per_s for block in blocks)


def _share(blocks: list[Block]) -> float:
    return statistics.mean(block.accepted_share for block in blocks)
