"""python -m chaos.soak --minutes 60 --seed N --json FILE

Mixed traffic at a gentle rate, clients that leave, and faults all the time; every 30 s the size
of every process. Twice everything rests, at the five-minute mark and at the end: what is held
then must be the same. The first replica of each kind is never killed, so that something lives as
long as the run; all the others are fair game.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos import checks, cluster, run, samples, traffic
from chaos.faults import all_faults
from chaos.faults.signals import Kill
from chaos.scenarios import ANY_LOSS, SHED
from chaos.soak_report import judge, sample_line, table

logger = logging.getLogger("chaos")

SAMPLE_S = 30.0
BASELINE_S = 300.0
REST_TIMEOUT_S = 120.0
REST_S = 10.0
NUM_REQUESTS = 40
REQUESTS_PER_S = 2.0
MAX_IN_FLIGHT = 12
MAX_CLIENT_CPU = 0.25  # of one core; above it the rate is halved
FAULT_PAUSE_S = (4.0, 14.0)
FAULT_LENGTH_S = (1.5, 6.0)
KILL_EVERY_S = 150.0
KILLS = ("kill_draft", "kill_target", "kill_gateway", "kill_controller")
OTHERS = (
    *("stall_draft", "slow_draft", "stall_target", "link_delay", "link_jitter", "link_loss"),
    *("link_rate", "partition_up", "partition_down", "partition_both", "link_reset"),
    *("corrupt_wire", "garbage", "oversize", "kv_exhaustion", "slow_reader", "disconnect_storm"),
)


class Soak:
    """One run. Everything that it keeps is bounded but the samples (120 an hour)."""

    def __init__(self, service: cluster.Cluster, seed: int, reference: run.Reference) -> None:
        self._service = service
        self._rng = random.Random(f"soak/{seed}")
        self._reference = reference
        self.findings = checks.Findings()
        self.unexpected: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[samples.Sample] = []
        self.started_s = time.monotonic()
        self.num_skipped = 0  # arrivals while too many were in flight
        self._interval_s = 1.0 / REQUESTS_PER_S
        self._spared: frozenset[int] = frozenset()
        self._fragile_until_s = 0.0  # a gateway died just now
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        names = ("Gateway", "TargetReplica", "DraftReplica")
        firsts = [(await self._service.replicas(name))[0].pid for name in names]
        self._spared = frozenset(firsts)

    async def spell(self, seconds: float) -> None:
        """Traffic, faults and samples for so long; then rest until nothing is left."""
        async with asyncio.TaskGroup() as group:
            busy = [
                group.create_task(work)
                for work in (self._arrivals(), self._break_things(), self._take_samples())
            ]
            await asyncio.sleep(seconds)
            for task in busy:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=traffic.TIMEOUT_S)
        try:
            await self._service.wait_steady(REST_TIMEOUT_S)
            await self._service.wait_quiet(REST_TIMEOUT_S)
        except cluster.NotSteady as problem:
            self.problems.append(f"no rest: {problem}")
        await asyncio.sleep(REST_S)

    async def resting_sample(self) -> samples.Sample:
        return await samples.take_lowest(self._service, self.started_s, times=5, pause_s=2.0)

    # -- traffic ----------------------------------------------------------------------------

    async def _arrivals(self) -> None:
        requests = itertools.cycle(self._reference.requests)
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(traffic.client(self._service.url))
            try:
                while True:
                    await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._interval_s)
                    if len(self._tasks) >= MAX_IN_FLIGHT:
                        self.num_skipped += 1
                        continue
                    task = asyncio.create_task(self._ask(http, next(requests)))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            finally:
                if self._tasks:  # the client must outlive its requests
                    await asyncio.wait(self._tasks, timeout=traffic.TIMEOUT_S)

    async def _ask(self, http: Any, request: traffic.Request) -> None:
        outcome = await traffic.send(http, request)
        checks.add(self.findings, outcome, self._reference.outcomes[request.index])
        # A refusal is an answer. A gateway that dies takes its clients' answers along.
        is_excused = outcome.error in SHED
        is_excused |= outcome.error in ANY_LOSS and outcome.started_s < self._fragile_until_s
        if outcome.has_failed and not is_excused:
            self.unexpected[outcome.error] += 1

    # -- faults -----------------------------------------------------------------------------

    async def _break_things(self) -> None:
        kinds = all_faults()
        others = [name for name in OTHERS if name in kinds and not kinds[name].why_not]
        next_kill_s = time.monotonic() + self._rng.uniform(0.3, 1.0) * KILL_EVERY_S
        while True:
            await asyncio.sleep(self._rng.uniform(*FAULT_PAUSE_S))
            name = self._rng.choice(others)
            if time.monotonic() > next_kill_s:
                name = self._rng.choice(KILLS)
                next_kill_s = time.monotonic() + self._rng.uniform(0.5, 1.5) * KILL_EVERY_S
            kind = kinds[name]
            if issubclass(kind, Kill):
                fault = kind(self._service, self._rng, self._spared)
            else:
                fault = kind(self._service, self._rng)
            await self._break(fault, self._rng.uniform(*FAULT_LENGTH_S))

    async def _break(self, fault: Any, seconds: float) -> None:
        if fault.name == "kill_gateway":
            self._fragile_until_s = time.monotonic() + seconds + 15.0
        try:
            try:
                await fault.inject()
                await asyncio.sleep(seconds)
            finally:
                await fault.heal()
                self.fired[fault.name] += bool(fault.num_fired)
            if isinstance(fault, Kill):
                await self._service.wait_steady(REST_TIMEOUT_S)
        except cluster.NotSteady as problem:
            self.problems.append(f"{fault.name}: {problem}")
        except (OSError, ValueError, RuntimeError):
            logger.exception("the fault %s itself failed", fault.name)

    # -- samples ----------------------------------------------------------------------------

    async def _take_samples(self) -> None:
        cpu_s = time.process_time()
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(SAMPLE_S)
            share = (time.process_time() - cpu_s) / (time.monotonic() - began_s)
            cpu_s = time.process_time()
            if share > MAX_CLIENT_CPU:
                self._interval_s *= 2
            sample = await samples.take(self._service, self.started_s)
            self.samples.append(sample)
            print(sample_line(sample, self.findings, self.fired, share), flush=True)


async def soak(service: cluster.Cluster, options: argparse.Namespace) -> int:
    """The whole run; returns the exit code."""
    await service.wait_steady()
    requests = traffic.draw_requests(options.seed, NUM_REQUESTS)
    reference = await run.make_reference(service, options.seed, requests)
    total_s = options.minutes * 60
    baseline_s = min(BASELINE_S, total_s / 4)
    job = Soak(service, options.seed, reference)
    await job.begin()
    await job.spell(baseline_s)
    baseline = await job.resting_sample()
    print(f"-- baseline after {baseline.at_s:.0f} s --", flush=True)
    await job.spell(max(0.0, total_s - (time.monotonic() - job.started_s)))
    end = await job.resting_sample()
    print(table(baseline, end, job.samples, baseline_s))
    problems = job.problems + judge(baseline, end, job.samples, baseline_s)
    problems += job.findings.differing[:5]
    if job.findings.tokens_lost or job.findings.tokens_duplicated:
        found = job.findings
        problems.append(f"{found.tokens_lost} tokens lost, {found.tokens_duplicated} duplicated")
    problems += [f"{n} requests failed: {code}" for code, n in job.unexpected.items()]
    problems += [] if job.fired.total() else ["no fault fired"]
    _tell(job, problems)
    if options.json:
        _write(options.json, job, baseline, end, problems)
    return int(bool(problems))


def _tell(job: Soak, problems: list[str]) -> None:
    found = job.findings
    print(
        f"{found.requests} requests: {found.finished} finished, {found.left} left early, "
        f"{found.failed} failed {dict(found.errors)}, {job.num_skipped} arrivals skipped; "
        f"{found.tokens_compared} tokens compared, {found.tokens_lost} lost, "
        f"{found.tokens_duplicated} duplicated; worst stall {found.worst_stall_s:.2f} s"
    )
    print(f"faults: {dict(job.fired.most_common())}")
    print("PROBLEMS:\n  " + "\n  ".join(problems) if problems else "no problem found", flush=True)


def _write(
    path: Path, job: Soak, baseline: samples.Sample, end: samples.Sample, problems: list[str]
) -> None:
    found = vars(job.findings) | {"errors": dict(job.findings.errors)}
    body = {
        "problems": problems,
        "findings": found,
        "faults_fired": dict(job.fired),
        "baseline": baseline.as_json(),
        "end": end.as_json(),
        "samples": [sample.as_json() for sample in job.samples],
    }
    path.write_text(json.dumps(body, indent=1, default=str) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    hangup = signal.getsignal(signal.SIGHUP)
    with (
        asyncio.Runner() as runner,
        cluster.running(cluster.load_file(), options.seed) as service,
    ):
        if hangup is signal.SIG_IGN:  # started by nohup: the terminal may go
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return runner.run(soak(service, options))


if __name__ == "__main__":
    sys.exit(main())
