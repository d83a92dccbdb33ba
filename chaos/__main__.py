"""python -m chaos --scenario NAME|all|random --seed N [--seeds N] [--json FILE]

Starts a service on this machine, breaks it, prints a table; the exit code says whether every
promise held. Loopback only, bounded, and stops by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from chaos import cluster, report, run
from chaos.bad_model import bad_model
from chaos.drafts_dead import drafts_dead
from chaos.overload import overload
from chaos.scenarios import BY_NAME, SCENARIOS, SLOW_STEP_MS, Scenario, draw_random

# Scenarios that are more than faults by the clock.
SPECIAL = {"bad_model": bad_model, "drafts_dead": drafts_dead, "overload": overload}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    started_s = time.monotonic()
    results: list[run.Result] = []
    print(report.header(), flush=True)
    try:
        # The loop is closed last: gRPC's poller, once used (`rogue`), speaks to it until the end.
        with asyncio.Runner() as runner:
            for is_slow in (False, True):
                _run_service(runner, options, results, is_slow)
    finally:  # also what an interrupted run has found
        if options.json:
            report.write(results, options.json)
        if options.seeds > 1:
            print(report.table(results), flush=True)
        minutes = (time.monotonic() - started_s) / 60
        print(f"{report.summary(results)}, {minutes:.1f} minutes", flush=True)
    return int(any(result.violations for result in results) or not results)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    names = [*BY_NAME, "random"]
    parser.add_argument("--scenario", default="all", choices=["all", *names], metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds, from --seed on")
    parser.add_argument("--json", type=Path, help="write the results there")
    return parser.parse_args(argv)


def _run_service(
    runner: asyncio.Runner, options: argparse.Namespace, results: list[run.Result], is_slow: bool
) -> None:
    """All scenarios of one kind of service, one seed after another."""
    plan = {
        seed: [s for s in _chosen(options.scenario, seed) if s.is_slow is is_slow]
        for seed in range(options.seed, options.seed + options.seeds)
    }
    if any(plan.values()):
        file = cluster.load_file(toy_step_ms=SLOW_STEP_MS) if is_slow else cluster.load_file()
        with cluster.running(file, options.seed) as service:
            runner.run(_run_all(service, plan, results))


async def _run_all(
    service: cluster.Cluster, plan: dict[int, list[Scenario]], results: list[run.Result]
) -> None:
    await service.wait_steady()
    for seed, scenarios in plan.items():
        needs_texts = any(scenario.steps for scenario in scenarios)
        reference = await run.make_reference(service, seed) if needs_texts else run.NO_REFERENCE
        for scenario in scenarios:
            result = await _run_one(service, scenario, seed, reference)
            results.append(result)
            print(report.line(result), flush=True)


def _chosen(name: str, seed: int) -> list[Scenario]:
    if name == "random":
        return [draw_random(seed)]
    if name == "all":
        return [*SCENARIOS, draw_random(seed)]
    return [BY_NAME[name]]


async def _run_one(
    service: cluster.Cluster, scenario: Scenario, seed: int, reference: run.Reference
) -> run.Result:
    special = SPECIAL.get(scenario.kind)
    if special is None:
        return await run.run_faults(service, scenario, seed, reference)
    return await special(service, scenario, seed, reference)


if __name__ == "__main__":
    sys.exit(main())
