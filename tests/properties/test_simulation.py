"""The whole pure stack under faults: 2,000 schedules, others each day, every invariant always.

A failing seed is replayed and made small with `python -m chaos.simulate --replay SEED`; to run a
day's seeds again set PACELINE_SIMULATION_START to the number that the test prints.
"""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import date
from itertools import pairwise

import pytest

from paceline.generation import GenerateRequest
from paceline.protocol.target_session import TargetSession
from paceline.testing.cluster import SimulatedCluster, run_seed
from paceline.testing.coverage import MIN_SEEDS, missing
from paceline.testing.draw import draw_scenario
from paceline.testing.faults import Fault, FaultPlan
from paceline.testing.invariants import InvariantError
from paceline.testing.scenario import COUPLED, GREEDY, Client, Scenario
from paceline.testing.world import Parts

START = "PACELINE_SIMULATION_START"
# Schedules that once broke a rule: a fail-over whose rounds had a gap, a straggler that crossed
# into a target's next life.
REGRESSIONS = (16, 17, 933)


def run_scenario(**fields):
    return SimulatedCluster(Scenario(**fields)).run()


def client(sampling=GREEDY, max_tokens=24, target_id=0, index=0):
    request = GenerateRequest(f"r{index}", (3, 5, 7 + index), max_tokens, sampling, ignore_eos=True)
    return Client(target_id, 0, request)


def test_todays_schedules():
    """Lossless, once, bounded, fenced, live, clean: see `testing.invariants` and the checks."""
    start = int(os.environ.get(START, date.today().toordinal() * 10_000))
    print(f"{START}={start}")
    fired, counts = Counter(), Counter()
    for seed in range(start, start + MIN_SEEDS):
        report = run_seed(seed)
        fired.update(report.fired)
        counts.update(report.counts)
    assert missing(MIN_SEEDS, fired, counts) == []


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_schedule_that_once_broke_a_rule(seed):
    assert run_seed(seed).counts["tokens"] > 0


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
def test_without_any_draft_it_is_plain_decoding(sampling):
    clients = tuple(client(sampling, index=i) for i in range(3))
    report = run_scenario(
        seed=0, num_targets=1, draft_errors=(0.0,), clients=clients, are_drafts_up=False
    )
    assert report.counts["passes"] == 1 + 24  # the first request does not wait for the others
    assert report.counts["plain"] == 3 * 24


def test_all_drafts_lost_in_mid_stream():
    """Passes follow each other without a pause, whether a draft is there, dying or dead."""
    faults = FaultPlan(num_kills=2, restart_share=0.0, horizon_us=15_000)
    reports = [
        run_scenario(
            seed=seed, num_targets=1, draft_errors=(0.0, 0.0), clients=(client(),), faults=faults
        )
        for seed in range(40)
    ]
    lost = [r for r in reports if r.fired[Fault.KILL] == 2 and r.counts["accepted"]]
    assert len(lost) >= 5
    for report in lost:
        commits = [event[0] for event in report.trace if event[1] == "commit"]
        assert all(later - earlier == 1000 for earlier, later in pairwise(commits))


@pytest.mark.parametrize("sampling", [GREEDY, COUPLED])
@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 8])
def test_a_perfect_draft_never_rewinds_and_nothing_is_wasted(sampling, num_speculative_tokens):
    """A pass yields K + 1 tokens, so n tokens take ceil(n / (K + 1)) passes."""
    report = run_scenario(
        seed=0,
        num_targets=1,
        draft_errors=(0.0,),
        clients=(client(sampling, max_tokens=48),),
        num_speculative_tokens=num_speculative_tokens,
        max_draft_ahead=2 * num_speculative_tokens + 2,  # the next window fills during a pass
        pass_us=20_000,
    )
    assert report.counts["rewinds"] == 0
    assert report.counts["rejected"] == 0
    passes = 2 + -(-(48 - 2) // (num_speculative_tokens + 1))  # two until the draft is there
    assert report.counts["passes"] == passes
    assert report.counts["accepted"] == 48 - passes


def test_a_failure_names_its_seed():
    class Broken(TargetSession):
        def commit(self, acceptance, *path):
            return super().commit(replace(acceptance, next_token_id=1), *path)

    with pytest.raises(InvariantError) as caught:
        run_seed(17, Parts(target_session=Broken))
    assert caught.value.__notes__[0].startswith("replay: run_seed(17), broken at ")


def test_two_targets_share_two_drafts():
    clients = tuple(client(target_id=i % 2, index=i) for i in range(6))
    report = run_scenario(
        seed=1, num_targets=2, draft_errors=(0.0, 0.2), clients=clients, pass_us=3000
    )
    dialled = {event[3:] for event in report.trace if event[1] == "dial"}
    assert dialled == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert report.counts["opened"] == 6


@pytest.mark.parametrize("kind", ["OpenSession", "Opened", "DraftTokens", "Verdict"])
@pytest.mark.parametrize("fault", [Fault.DROP, Fault.DUPLICATE, Fault.DELAY])
def test_one_message_can_be_hit_by_name(kind, fault):
    scripted = FaultPlan(scripted={(kind, 1): fault})
    report = run_scenario(
        seed=2,
        num_targets=1,
        draft_errors=(0.1,),
        clients=(client(),),
        pass_us=3000,
        faults=scripted,
    )
    assert report.fired == {fault: 1, f"{fault} {kind}": 1}


def test_same_seed_same_schedule():
    for seed in range(30):
        assert draw_scenario(seed) == draw_scenario(seed)
        assert run_seed(seed).trace == run_seed(seed).trace


HASHES = """
from paceline.protocol.target_session import TargetSession
from paceline.testing.cluster import run_seed
import sys
sys.stdout.write(" ".join(run_seed(seed).trace_hash for seed in range(60)))
"""


def test_traces_do_not_depend_on_the_hash_seed():
    """A set or dict order that leaks into a decision would make seeds unreplayable."""

    def hashes(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", HASHES]
        done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        return done.stdout.split()

    first, second = hashes("1"), hashes("2")
    assert len(set(first)) > 50
    assert first == second
