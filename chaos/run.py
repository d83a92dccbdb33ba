"""Carries a scenario out: reference, traffic, faults by the clock, healing, verdict.

Knows no fault and no scenario by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import Any

from chaos import checks, traffic
from chaos.cluster import Cluster, NotSteady
from chaos.faults import all_faults
from chaos.faults.base import Fault
from chaos.scenarios import Scenario, Step

NUM_REQUESTS = 18
REFERENCE_CONCURRENCY = 6
TAIL_S = 0.3  # traffic goes on so long after the last fault was healed
DEADLINE_S = 90.0
QUIET_TIMEOUT_S = 20.0
RETURN_TIMEOUT_S = 30.0
MAX_SHOWN = 3


@dataclass
class Reference:
    """What a seed's requests say undisturbed and without drafts, and how long a round takes."""

    requests: list[traffic.Request]
    outcomes: list[traffic.Outcome]
    round_s: float


# For scenarios with traffic of their own.
NO_REFERENCE = Reference([], [], 0.0)


@dataclass
class Result:
    """One line of the table; `as_json` is what `--json` writes."""

    scenario: str
    seed: int
    promise: str
    faults_fired: int = 0
    findings: checks.Findings = field(default_factory=checks.Findings)
    round_s: float = 0.0
    steady_s: float = 0.0  # from the last heal until every replica is there again
    draft_back_s: float = 0.0  # and until a proposal was accepted again
    target_lag_s: float = 0.0  # the longest that a target's event loop stood still
    skipped: str = ""
    violations: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def worst_stall_rounds(self) -> float:
        return self.findings.worst_stall_s / self.round_s if self.round_s else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "seed": self.seed,
            "faults_fired": self.faults_fired,
            "text_identical": self.findings.text_identical,
            "tokens_lost": self.findings.tokens_lost,
            "tokens_duplicated": self.findings.tokens_duplicated,
            "requests_failed": self.findings.failed,
            "worst_stall_rounds": round(self.worst_stall_rounds, 1),
            "worst_stall_s": round(self.findings.worst_stall_s, 3),
            "round_ms": round(self.round_s * 1000, 2),
            "requests": self.findings.requests,
            "requests_finished": self.findings.finished,
            "requests_left": self.findings.left,
            "tokens_compared": self.findings.tokens_compared,
            "target_lag_s": round(self.target_lag_s, 3),
            "errors": dict(self.findings.errors),
            "accepted": self.findings.accepted,
            "steady_s": round(self.steady_s, 2),
            "draft_back_s": round(self.draft_back_s, 2),
            "promise": self.promise,
            "skipped": self.skipped,
            "violations": self.violations,
            "figures": self.figures,
        }


async def make_reference(
    cluster: Cluster, seed: int, requests: list[traffic.Request] | None = None
) -> Reference:
    """Raises NotSteady when even the undisturbed service fails requests."""
    requests = requests or traffic.draw_requests(seed, NUM_REQUESTS)
    plain = [traffic.without_drafts(request) for request in requests]
    outcomes = await traffic.run_load(cluster.url, plain, REFERENCE_CONCURRENCY)
    outcomes.sort(key=lambda outcome: outcome.request.index)
    failed = [outcome.error for outcome in outcomes if outcome.has_failed]
    if failed:
        raise NotSteady(f"the reference run failed: {failed}")
    return Reference(requests, outcomes, checks.median_gap_s(outcomes))


async def run_faults(
    cluster: Cluster, scenario: Scenario, seed: int, reference: Reference
) -> Result:
    """One scenario of timed faults under load."""
    result = Result(scenario.name, seed, scenario.promise, round_s=reference.round_s)
    rng = random.Random(f"{scenario.name}/{seed}")
    kinds = all_faults()
    missing = [step.fault for step in scenario.steps if kinds[step.fault].why_not]
    if missing:
        result.skipped = "; ".join(kinds[name].why_not for name in missing)
        return result
    faults = [kinds[step.fault](cluster, rng) for step in scenario.steps]
    await cluster.wait_steady()
    await cluster.take_lag_s()
    over = asyncio.Event()
    load = asyncio.create_task(
        traffic.run_load(cluster.url, reference.requests, scenario.concurrency, over.is_set)
    )
    try:
        try:
            await asyncio.gather(
                *(
                    _play(step, fault, rng)
                    for step, fault in zip(scenario.steps, faults, strict=True)
                )
            )
        finally:
            for fault in faults:
                await fault.heal()
        await asyncio.sleep(TAIL_S)
        over.set()
        async with asyncio.timeout(DEADLINE_S):
            outcomes = await load
    except TimeoutError:
        result.violations.append(f"requests did not end within {DEADLINE_S:.0f} s")
        outcomes = []
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    result.faults_fired = sum(fault.num_fired for fault in faults)
    result.findings = checks.examine(outcomes, reference.outcomes)
    result.target_lag_s = await cluster.take_lag_s()
    await settle(cluster, result)
    judge(result, scenario)
    return result


async def _play(step: Step, fault: Fault, rng: random.Random) -> None:
    """A little off the second, so that the pass that is hit is another one for each seed."""
    await asyncio.sleep(step.at_s + rng.uniform(0.0, 0.3))
    await fault.inject()
    await asyncio.sleep(step.until_s - step.at_s)
    await fault.heal()


async def settle(cluster: Cluster, result: Result) -> None:
    """The service comes back whole, empty, and with drafts in use; what does not is a violation."""
    started_s = time.monotonic()
    try:
        result.steady_s = await cluster.wait_steady()
        await cluster.wait_quiet(QUIET_TIMEOUT_S)
    except NotSteady as problem:
        result.violations.append(f"not healed: {problem}")
        return
    while not await accepts(cluster):
        if time.monotonic() - started_s > RETURN_TIMEOUT_S:
            result.violations.append("no proposal was accepted after the fault was healed")
            return
    result.draft_back_s = time.monotonic() - started_s
    with contextlib.suppress(NotSteady):
        await cluster.wait_quiet(QUIET_TIMEOUT_S)


async def accepts(cluster: Cluster) -> bool:
    """Whether drafts help a request of now."""
    body = {"model": "toy", "prompt": "again", "max_tokens": 32, "seed": 1, "ignore_eos": True}
    async with traffic.client(cluster.url) as http:
        outcome = await traffic.send(http, traffic.Request(-1, "/v1/completions", body))
    return outcome.num_accepted > 0


def judge(result: Result, scenario: Scenario) -> None:
    """Compare what was found with what was promised."""
    found = result.findings
    if not result.faults_fired:
        result.violations.append("no fault fired")
    if not found.finished:
        result.violations.append("no request finished")
    result.violations += found.differing[:MAX_SHOWN]
    if found.tokens_lost or found.tokens_duplicated:
        result.violations.append(
            f"{found.tokens_lost} tokens lost, {found.tokens_duplicated} duplicated"
        )
    forbidden = {code: n for code, n in found.errors.items() if code not in scenario.may_fail}
    if forbidden:
        result.violations.append(f"failed requests: {forbidden}")
