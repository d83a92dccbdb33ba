"""Scenario: all drafts die under load. Is the service then as fast as one without drafts?

Every block that is judged (healthy, dead, back) is followed by one that asks for `speculation:
off`, and only the ratios are compared: whatever else this machine does hits both alike. Engines
are slow, or drafts could bring no speed here (`scenarios.SLOW_STEP_MS`).
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from statistics import mean, median

from chaos import alone, checks, run, traffic
from chaos.cluster import Cluster
from chaos.faults.drafts_gone import DraftsGone
from chaos.run import Result
from chaos.scenarios import Scenario

CONCURRENCY = 8
MAX_TOKENS = 24
NUM_PAIRS = 5
NUM_HEALTHY = 3
MIN_RATIO = 0.97  # within the standard error of this run
MIN_ACCEPTANCE = 0.9  # of what it was: texts are the same, only the timing differs
# So much slower may the speed be that returns, at least; the spread of the healthy blocks of this
# run, if that is more: three blocks cannot tell a smaller difference from chance.
MIN_TOLERANCE = 0.1


@dataclass
class Block:
    """One crowd of equal requests that came together."""

    outcomes: list[traffic.Outcome]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return MAX_TOKENS * sum(outcome.is_done for outcome in self.outcomes) / self.seconds

    @property
    def accepted_share(self) -> float:
        total = sum(outcome.num_tokens for outcome in self.outcomes)
        return sum(outcome.num_accepted for outcome in self.outcomes) / total if total else 0.0


def draw_requests(seed: int) -> list[traffic.Request]:
    """Eight of the same length, greedy and coupled; the seed decides the texts."""
    requests = []
    for index in range(CONCURRENCY):
        body = {
            "model": "toy",
            "prompt": f"block {index}",
            "max_tokens": MAX_TOKENS,
            "temperature": 0.8 if index % 2 else 0.0,
            "seed": seed * 100 + index,
            "ignore_eos": True,
            "stream": True,
            "speculation": {"include_rounds": True},
        }
        requests.append(traffic.Request(index, "/v1/completions", body))
    return requests


async def block(cluster: Cluster, requests: list[traffic.Request]) -> Block:
    started_s = time.monotonic()
    outcomes = await traffic.run_load(cluster.url, requests, CONCURRENCY)
    return Block(outcomes, time.monotonic() - started_s)


@dataclass
class Pair:
    """A block and its neighbor without drafts."""

    block: Block
    off: Block

    @property
    def ratio(self) -> float:
        return self.block.tokens_per_s / self.off.tokens_per_s

    @property
    def round_ratio(self) -> float:
        """Of the median rounds: hardly moved by what else runs on this machine."""
        own = checks.median_gap_s(self.block.outcomes)
        return checks.median_gap_s(self.off.outcomes) / own if own else 1.0


async def pairs(cluster: Cluster, requests: list[traffic.Request], number: int) -> list[Pair]:
    plain = [traffic.without_drafts(request) for request in requests]
    return [
        Pair(await block(cluster, requests), await block(cluster, plain)) for _ in range(number)
    ]


async def drafts_dead(
    cluster: Cluster, scenario: Scenario, seed: int, reference: run.Reference
) -> Result:
    """Healthy, killed in the middle of a block, dead, back."""
    result = Result(scenario.name, seed, scenario.promise)
    await cluster.wait_steady()
    fault = DraftsGone(cluster, random.Random(f"{scenario.name}/{seed}"))
    requests = draw_requests(seed)
    before = await pairs(cluster, requests, NUM_HEALTHY)
    try:
        hit = asyncio.create_task(block(cluster, requests))
        await asyncio.sleep(before[-1].block.seconds / 3)
        await fault.inject()
        killed = await hit
        async with asyncio.timeout(60.0):
            await fault.wait_gone()
        dead = await pairs(cluster, requests, NUM_PAIRS)
    finally:
        await fault.heal()
    await run.settle(cluster, result)
    back = await pairs(cluster, requests, NUM_HEALTHY)
    result.faults_fired = fault.num_fired
    blocks = [killed, *(b for pair in [*before, *dead, *back] for b in (pair.block, pair.off))]
    references = alone.references(cluster.config.target.model, requests)
    result.findings = checks.examine([o for b in blocks for o in b.outcomes], references)
    result.round_s = checks.median_gap_s(o for pair in before for o in pair.off.outcomes)
    run.judge(result, scenario)
    _compare(result, before, dead, back)
    return result


def _compare(result: Result, before: list[Pair], dead: list[Pair], back: list[Pair]) -> None:
    speeds, rounds = [p.ratio for p in dead], [p.round_ratio for p in dead]
    ratios = [pair.ratio for pair in before]
    tolerance = max(MIN_TOLERANCE, (max(ratios) - min(ratios)) / median(ratios))
    limit = 1.0 - tolerance
    returned = _ratio(back) / _ratio(before)
    off = _speed([pair.off for pair in (*before, *dead, *back)])
    result.figures = {
        "tokens/s": (
            f"{_speed([p.block for p in before]):.0f} with drafts, "
            f"{_speed([p.block for p in dead]):.0f} all dead, {off:.0f} speculation off, "
            f"{_speed([p.block for p in back]):.0f} drafts back"
        ),
        "dead / off": (
            f"{median(speeds):.3f} +- {error(speeds):.3f} (median of {_shown(dead)}); rounds per "
            f"second {median(rounds):.3f} +- {error(rounds):.3f}"
        ),
        "drafts / off": (
            f"{_ratio(before):.2f} before ({_shown(before)}), {_ratio(back):.2f} back "
            f"({_shown(back)}): back / before {returned:.3f}, limit {limit:.3f}"
        ),
        "accepted share of tokens": (
            f"{_share(before):.3f} before, {_share(dead):.3f} dead, {_share(back):.3f} back"
        ),
    }
    for what, ratios in (("speed", speeds), ("rounds per second", rounds)):
        if median(ratios) + error(ratios) < MIN_RATIO:
            result.violations.append(
                f"with dead drafts {median(ratios):.3f} of the {what} without drafts"
            )
    if _share(dead):
        result.violations.append("proposals were accepted although all drafts were dead")
    if returned < limit:
        result.violations.append(f"speed did not return: {returned:.3f} of what it was")
    if _share(back) < MIN_ACCEPTANCE * _share(before):
        result.violations.append("acceptance did not return")


def error(values: list[float]) -> float:
    """The standard error of their median, itself estimated from medians."""
    spread = median([abs(value - median(values)) for value in values])
    return 1.25 * 1.48 * spread / len(values) ** 0.5


def _ratio(found: list[Pair]) -> float:
    return median([pair.ratio for pair in found])


def _shown(found: list[Pair]) -> str:
    return ", ".join(f"{pair.ratio:.3f}" for pair in found)


def _speed(blocks: list[Block]) -> float:
    return median(block.tokens_per_s for block in blocks)


def _share(found: list[Pair]) -> float:
    return mean(pair.block.accepted_share for pair in found)
