"""Heartbeats in, answers out: registry, pool and ceilings together, and what dies with it."""

import json
from random import Random

import pytest

from paceline.config import ControllerConfig
from paceline.controller import fleet as limits
from paceline.controller.fleet import Fleet
from paceline.fleet_reports import Ceilings, DraftReport, TargetReport, read_guidance
from paceline.protocol.lookahead import AcceptanceClass, Choice, ClassCounts, Explanation
from paceline.sampling.params import VerificationMode

GREEDY = AcceptanceClass("toy", VerificationMode.GREEDY, 0.0)
WHY = Explanation({"pass_us": 25e3}, (Choice(0, 1, 1.0, 25e3), Choice(4, 5, 3.0, 27e3)), 1, "pays")


def target(number, **figures):
    return TargetReport(
        f"t{number}", "boot", f"host-{number}:1", 1,
        **{"num_speculative_tokens": 4.0, "max_num_speculative_tokens": 16, "max_draft_ahead": 16,
           "pass_ms": 25.0, **figures},
    )  # fmt: skip


def draft(number, connected=(), **figures):
    return DraftReport(f"d{number}", "boot", 1, 64, connected=connected, **figures)


def seen(number):
    return {GREEDY: ClassCounts((10.0 * (number + 1),), (5.0 * (number + 1),))}


class Rig:
    """A few replicas, and whichever Controller lives."""

    def __init__(self, num_targets=5, num_drafts=4, **config):
        self.config = ControllerConfig(targets_per_draft=2, **config)
        self.num_targets, self.num_drafts = num_targets, num_drafts
        self.fleet = Fleet(self.config)
        self.now = 0.0
        self.streams = dict.fromkeys(range(num_drafts), ())
        self.ceilings = {n: Ceilings() for n in range(num_targets)}
        self.priors = {}
        self.missing = 0.0

    def beat(self, order=None, *, busy_share=0.2, missing_share=0.0):
        """One heartbeat of everybody, a second after the last."""
        self.now += 1.0
        self.missing += 100 * missing_share
        beats = [(True, n) for n in range(self.num_targets)]
        beats += [(False, n) for n in range(self.num_drafts)]
        (order or Random(0)).shuffle(beats)
        for is_target, number in beats:
            if is_target:
                report = target(
                    number, class_counts=seen(number), ceilings=self.ceilings[number],
                    wanted=100 * self.now, missing=self.missing, explanation=WHY,
                )  # fmt: skip
                answer = self.fleet.hear_target(TargetReport.read(report.plain()), self.now)
                self.priors[number], self.ceilings[number] = read_guidance(answer)
            else:
                report = draft(
                    number,
                    self.streams[number],
                    busy_share=busy_share,
                    batch=4.0,
                    num_sessions=4,
                    step_ms=30.0,
                )
                report = DraftReport.read(report.plain())
                self.streams[number] = self.fleet.hear_draft(report, self.now)


@pytest.mark.parametrize("seed", range(5))
def test_killed_and_built_again_from_one_round_of_heartbeats(seed):
    rig = Rig()
    for _ in range(3):
        rig.beat()
    rig.beat(busy_share=1.0, missing_share=0.5)
    rig.beat(busy_share=1.0, missing_share=0.5)
    rig.beat(busy_share=1.0, missing_share=0.5)
    streams, priors, ceilings = dict(rig.streams), dict(rig.priors), dict(rig.ceilings)
    assert set(ceilings.values()) != {Ceilings()}
    rig.fleet = Fleet(rig.config)
    rig.beat(Random(seed), busy_share=1.0, missing_share=0.5)
    assert rig.ceilings == ceilings, "what was in force stays in force"
    assert rig.streams == streams, "nobody moves while it learns"
    assert {n: rig.fleet.pool.priors(f"t{n}", rig.now) for n in priors} == priors
    rig.beat(Random(seed))
    assert rig.streams == streams
    assert {f"d{n}": mine for n, mine in streams.items()} == rig.fleet.registry.assignment


def test_nobody_hears_its_own_counts():
    rig = Rig(num_targets=2, num_drafts=0)
    rig.beat()
    rig.beat()
    assert rig.priors == {0: seen(1), 1: seen(0)}


def test_a_target_that_goes_leaves_what_it_knew():
    rig = Rig(num_targets=1, num_drafts=0)
    rig.beat()
    rig.fleet.leave("t0", 2.0)
    guidance = rig.fleet.hear_target(target(7), 2.0)
    assert read_guidance(guidance)[0] == seen(0)
    assert rig.fleet.board.load_of("t0") is None


def test_limits_that_change_while_it_runs():
    rig = Rig(num_targets=3, num_drafts=1)
    rig.beat()
    rig.beat()
    assert len(rig.fleet.registry.assignment["d0"]) == 2
    changes = {"targets_per_draft": 3, "max_draft_utilization": 0.1}
    rig.fleet.set_config(rig.config.model_copy(update=changes))
    for _ in range(8):
        rig.beat(busy_share=0.15, missing_share=0.5)
    assert len(rig.fleet.registry.assignment["d0"]) == 3
    assert rig.ceilings[0] != Ceilings()


def test_status_says_who_serves_whom_and_why():
    rig = Rig(num_targets=2, num_drafts=2)
    rig.beat()
    rig.beat()
    status = json.loads(json.dumps(rig.fleet.status(), allow_nan=False))
    assert (status["num_targets"], status["num_drafts"]) == (2, 2)
    assert status["assignment"] == {"d0": ["host-0:1", "host-1:1"], "d1": ["host-0:1", "host-1:1"]}
    first = status["targets"][0]
    assert (first["replica_id"], first["drafts"]) == ("t0", ["d0", "d1"])
    assert first["num_speculative_tokens"] == 4.0
    assert first["draft_utilization"] == pytest.approx(0.2)
    assert first["classes"] == [
        {
            "draft_model": "toy",
            "mode": "greedy",
            "temperature": 0.0,
            "num_draft_tokens": 10.0,
            "acceptance_rate": 0.5,
        }
    ]
    assert first["explanation"]["choices"][1]["pass_us"] == 27e3
    assert status["drafts"][1]["busy_share"] == 0.2
    assert status["drafts"][1]["targets"] == ["host-0:1", "host-1:1"]


def test_an_explanation_stays_until_there_is_another():
    rig = Rig(num_targets=1, num_drafts=0)
    rig.beat()
    rig.fleet.hear_target(target(0), 1.5)
    assert rig.fleet.status()["targets"][0]["explanation"]["reason"] == "pays"


def test_status_is_bounded(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SHOWN", 3)
    rig = Rig(num_targets=5, num_drafts=4)
    rig.beat()
    status = rig.fleet.status()
    assert (status["num_targets"], status["num_drafts"]) == (5, 4)
    assert [len(status[name]) for name in ("targets", "drafts", "assignment")] == [3, 3, 3]
