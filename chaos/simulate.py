"""Simulated schedules with faults, thousands a minute, and a small replay of what fails.

`python -m chaos.simulate --seeds 2000` runs seeds; `--replay SEED_OR_JSON` one schedule;
`--planted` says how many seeds it takes to find each planted bug. Seed S is the same schedule on
every machine. Nonzero exit: a rule was broken, or the runs met less than they must.
"""

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from chaos import planted
from paceline.testing.cluster import DEFAULT_PARTS, FAILURES, run_seed
from paceline.testing.coverage import MIN_SEEDS, missing
from paceline.testing.draw import draw_scenario
from paceline.testing.shrink import broken_rule, from_json, shrink, to_json
from paceline.testing.world import Parts

CHUNK = 100


@dataclass
class Tally:
    """Of some seeds. `failed`: the first that broke a rule, and which; the others were not run."""

    num_seeds: int = 0
    num_events: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    failed: tuple[int, str] | None = None

    def add(self, other: "Tally") -> None:
        self.num_seeds += other.num_seeds
        self.num_events += other.num_events
        self.fired.update(other.fired)
        self.counts.update(other.counts)
        self.failed = self.failed or other.failed

    def as_dict(self, seconds: float, start: int) -> dict[str, object]:
        return {
            "start": start,
            "seeds": self.num_seeds,
            "seconds": round(seconds, 1),
            "seeds_per_s": round(self.num_seeds / seconds, 1),
            "events": self.num_events,
            "tokens_checked": self.counts["tokens"],
            "faults_fired": {str(k): v for k, v in sorted(self.fired.items())},
            "cases_met": {str(k): v for k, v in sorted(self.counts.items())},
            "failed": None
            if self.failed is None
            else {"seed": self.failed[0], "rule": self.failed[1]},
            "missing": self.missing(),
        }

    def missing(self) -> list[str]:
        return missing(self.num_seeds, self.fired, self.counts)


def parts_of(bug: str | None) -> Parts:
    return DEFAULT_PARTS if bug is None else planted.BUGS[bug]


def run_chunk(bug: str | None, seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        scenario = draw_scenario(seed)
        tally.num_seeds += 1
        try:
            report = run_seed(seed, parts_of(bug))
        except FAILURES:
            tally.failed = (seed, broken_rule(scenario, parts_of(bug)) or "another exception")
            return tally
        tally.num_events += report.num_events
        tally.fired.update(report.fired)
        tally.counts.update(report.counts)
    return tally


def tallies(seeds: range, jobs: int, bug: str | None) -> Iterator[Tally]:
    """In the order of the seeds, whatever the number of processes."""
    chunks = [seeds[index : index + CHUNK] for index in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        yield from map(partial(run_chunk, bug), chunks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(partial(run_chunk, bug), chunks)


def simulate(seeds: range, jobs: int, bug: str | None) -> Tally:
    """Up to the first failure."""
    total = Tally()
    for tally in tallies(seeds, jobs, bug):
        total.add(tally)
        if total.failed:
            break
    return total


def show(tally: Tally, seconds: float, start: int) -> None:
    fired = {kind: n for kind, n in tally.fired.items() if " " not in kind}
    print(
        f"{tally.num_seeds} seeds from {start} in {seconds:.1f} s:"
        f" {tally.num_seeds / seconds:.0f} seeds/s, {tally.num_events} events,"
        f" {tally.counts['tokens']} tokens checked, {sum(fired.values())} faults fired"
    )
    for title, counts in (("faults", fired), ("cases", tally.counts)):
        print(title + ": " + ", ".join(f"{k} {counts[k]}" for k in sorted(counts) if counts[k]))


def show_failure(seed: int, rule: str, bug: str | None) -> None:
    """Shrink it and print the command that brings it back."""
    print(f"\nseed {seed} breaks a rule: {rule}")
    small, num_tries = shrink(draw_scenario(seed), lambda s: broken_rule(s, parts_of(bug)))
    print(f"shrunk in {num_tries} runs; replay with:")
    option = [] if bug is None else ["--bug", bug]
    print(shlex.join(["python", "-m", "chaos.simulate", *option, "--replay", to_json(small)]))


def replay(what: str, bug: str | None) -> int:
    scenario = draw_scenario(int(what)) if what.isdigit() else from_json(what)
    rule = broken_rule(scenario, parts_of(bug))
    print("all rules hold" if rule is None else f"breaks a rule: {rule}")
    return rule is not None


def show_planted(jobs: int) -> int:
    """A table of all planted bugs; nonzero when one is not found."""
    print("bug | seeds needed | rule broken\n--- | --- | ---")
    is_any_missed = False
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for bug, found in zip(planted.BUGS, pool.imap(planted.find, planted.BUGS), strict=True):
            is_any_missed |= found is None
            cells = ("-", "NOT FOUND") if found is None else (found.num_seeds, found.rule)
            print(bug, *cells, sep=" | ", flush=True)
    return is_any_missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=MIN_SEEDS, help="how many schedules")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes; the results are the same")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--replay", metavar="SEED_OR_JSON", help="run one schedule")
    parser.add_argument("--bug", choices=planted.BUGS, metavar="NAME", help="plant this bug")
    parser.add_argument("--planted", action="store_true", help="find every planted bug")
    options = parser.parse_args(arguments)
    if options.planted:
        return show_planted(options.jobs)
    if options.replay is not None:
        return replay(options.replay, options.bug)
    began = time.monotonic()
    seeds = range(options.start, options.start + options.seeds)
    tally = simulate(seeds, options.jobs, options.bug)
    seconds = max(time.monotonic() - began, 1e-3)
    show(tally, seconds, options.start)
    if options.json:
        options.json.write_text(json.dumps(tally.as_dict(seconds, options.start), indent=2) + "\n")
    if tally.failed:
        show_failure(*tally.failed, options.bug)
    elif tally.missing():
        print("never met: " + ", ".join(tally.missing()))
    return bool(tally.failed or tally.missing())


if __name__ == "__main__":
    sys.exit(main())
