"""How many replicas a load needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from paceline.autoscaling.demand import Demand, Knobs, draft_demand, target_demand
from paceline.autoscaling.reports import DraftLoad, TargetLoad
from paceline.config import ControllerConfig
from paceline.simulate.fleet import Fleet
from tests.unit.simulate.settings import config

KNOBS = Knobs()
YAML = Path(__file__).parents[3] / "deploy" / "serve" / "autoscale.yaml"
IDLE = TargetLoad(0, 0, 0, 0, 0, 0, 0, 0, 0)
DRAFT = DraftLoad(0, 100, 0, 0)


def targets_for(num_requests: float = 0, per_replica: float = 8, *loads: TargetLoad) -> float:
    return replicas(target_demand(loads or (IDLE,), num_requests, per_replica, KNOBS))


def drafts_for(targets: list[TargetLoad], drafts: list[DraftLoad]) -> float:
    return replicas(draft_demand(targets, drafts, KNOBS))


def replicas(demand: Demand) -> float:
    return max(demand.at_least, demand.most)


class TestTargets:
    @pytest.mark.parametrize(("ongoing", "needed"), [(0, 1), (1, 1), (8, 1), (12, 1.5), (80, 10)])
    def test_ongoing_work(self, ongoing: float, needed: float) -> None:
        assert targets_for(ongoing) == needed
        running = replace(IDLE, num_running=ongoing)
        assert targets_for(0, 8, running) == needed, "sequences count where Serve sees no request"

    def test_a_lone_stream_needs_one_however_busy_it_keeps_the_engine(self) -> None:
        lone = replace(IDLE, num_running=1, kv_share=0.01, row_share=5 / 512)
        assert targets_for(1, 8, lone) == 1

    def test_full_cache_and_full_passes(self) -> None:
        full = replace(IDLE, num_running=4, kv_share=0.85)
        assert targets_for(4, 100, full, full) == pytest.approx(2)
        assert targets_for(4, 100, full, replace(IDLE, row_share=0.75)) == 1
        packed = replace(IDLE, num_running=4, row_share=0.9)
        assert targets_for(4, 100, packed, packed) == pytest.approx(2.4)

    def test_a_queue_says_that_what_runs_is_all_that_fits(self) -> None:
        queued = replace(IDLE, num_running=8, num_waiting=4)
        assert targets_for(0, 100, queued) == 1.5
        assert targets_for(0, 100, queued, queued) == 3
        assert targets_for(0, 1000, replace(queued, num_waiting=800)) == 2, "doubled at most"
        brief = replace(queued, num_waiting=0.8)
        assert targets_for(0, 100, brief, brief) == 1, "a moment is no queue"


class TestDrafts:
    def test_none_when_nobody_wants_one(self) -> None:
        assert drafts_for([replace(IDLE, num_running=9)], [replace(DRAFT, busy_share=1.0)]) == 0

    def test_the_first_one(self) -> None:
        wanting = replace(IDLE, num_running=9, num_wanting=9, num_unserved=9)
        assert drafts_for([IDLE, wanting], []) == 1

    def test_sessions(self) -> None:
        wanting = replace(IDLE, num_wanting=170)
        assert drafts_for([wanting, wanting], [DRAFT]) == pytest.approx(4)

    def test_busy_only_as_far_as_targets_verify_what_it_makes(self) -> None:
        """A draft with little to do runs ahead of what is verified: no reason for another."""
        busy = replace(DRAFT, busy_share=0.9, drafted_rate=100)
        ahead = replace(IDLE, num_wanting=8, verified_rate=30)
        assert drafts_for([ahead], [busy]) == 1
        used = replace(ahead, verified_rate=100)
        assert drafts_for([used], [busy]) == pytest.approx(1.5)
        assert drafts_for([used, used], [busy, busy]) == pytest.approx(3)
        assert drafts_for([used, used], [busy]) == pytest.approx(1.5), "a share is at most 1"

    def test_late_proposals_of_busy_drafts(self) -> None:
        busy = replace(DRAFT, busy_share=0.7, drafted_rate=100)
        late = replace(IDLE, num_wanting=8, verified_rate=10, wanted_rate=100, missing_rate=40)
        assert drafts_for([late], [busy]) == pytest.approx(100 / 60)
        assert drafts_for([late], [replace(busy, busy_share=0.5)]) == 1, "the way is long"
        assert drafts_for([replace(late, missing_rate=9)], [busy]) == 1, "few are late"
        assert drafts_for([replace(late, missing_rate=99)], [busy]) == 2, "doubled at most"

    @pytest.mark.parametrize(
        ("step_ms", "pass_ms", "window", "needed"),
        [
            (3.0, 25.0, 4.0, 1),  # 5 steps take 15 ms: late is the way
            (5.0, 25.0, 4.0, 1),
            (5.1, 25.0, 4.0, 100 / 60),
            (3.0, 25.0, 8.0, 100 / 60),
            (0.0, 25.0, 4.0, 100 / 60),  # of a release that does not say it
            (3.0, 0.0, 0.0, 100 / 60),
        ],
    )
    def test_late_because_of_the_way(
        self, step_ms: float, pass_ms: float, window: float, needed: float
    ) -> None:
        """Each correction empties a window for a round trip; a draft ahead is always busy."""
        busy = replace(DRAFT, num_sessions=8, busy_share=1.0, drafted_rate=1000, step_ms=step_ms)
        late = replace(IDLE, num_wanting=8, verified_rate=10, wanted_rate=100, missing_rate=40)
        late = replace(late, pass_ms=pass_ms, window=window)
        assert drafts_for([late], [busy]) == pytest.approx(needed)

    def test_whose_passes_and_steps_count(self) -> None:
        """Those of the sequences: neither an idle target nor an idle draft has a say."""
        busy = replace(DRAFT, num_sessions=8, busy_share=1.0, drafted_rate=1000, step_ms=6.0)
        late = replace(IDLE, num_wanting=8, verified_rate=10, wanted_rate=100, missing_rate=40)
        late = replace(late, pass_ms=25.0, window=4.0)
        other = replace(IDLE, pass_ms=900.0, window=1.0)
        unused = replace(DRAFT, busy_share=0.9, step_ms=0.1)
        assert drafts_for([late, other], [busy]) > 1.5
        assert drafts_for([late], [busy, unused]) > 3
        far = replace(late, pass_ms=100.0)
        assert drafts_for([far, far, far, late], [busy]) == 1, "in the mean"

    @pytest.mark.parametrize("batch", [4, 8])
    @pytest.mark.parametrize(("acceptance", "fan_out"), [(0.6, 2), (0.8, 0)])
    def test_one_healthy_draft_is_enough_for_a_target(
        self, batch: int, acceptance: float, fan_out: int
    ) -> None:
        """As simulated: 3 ms steps, 25 ms passes, K = 4. A fifth or more comes late."""
        settings = config(batch=batch, acceptance=acceptance, k=4, fan_out=fan_out, duration_s=4.0)
        fleet = Fleet(settings)
        metrics, (drafting,) = fleet.run().metrics, fleet.drafts
        (leader,) = fleet.deciders
        counts, total_s = leader.policy.starvation(), settings.duration_s + settings.warmup_s
        assert counts.missing > 0.2 * counts.wanted
        assert drafting.busy_us > KNOBS.draft_busy_share * 1e6 * total_s
        target = replace(
            IDLE,
            num_wanting=batch,
            wanted_rate=counts.wanted / total_s,
            missing_rate=counts.missing / total_s,
            verified_rate=metrics.num_draft_tokens / settings.duration_s,
            pass_ms=leader.busy_us / leader.num_passes / 1e3,
            window=leader.mean_cap,
        )
        draft = replace(
            DRAFT,
            num_sessions=batch,
            busy_share=drafting.busy_us / total_s / 1e6,
            drafted_rate=metrics.num_drafted / settings.duration_s,
            step_ms=drafting.busy_us / drafting.num_steps / 1e3,
        )
        assert drafts_for([target], [draft]) <= 1 + KNOBS.tolerance

    @pytest.mark.parametrize(
        ("sequences", "num_targets", "is_enough"),
        [(2, 1, True), (4, 1, True), (10, 1, False), (10, 2, False), (24, 2, False)],
    )
    def test_the_file_for_trying(self, sequences: int, num_targets: int, is_enough: bool) -> None:
        """deploy/serve/autoscale.yaml: with its numbers one draft is too slow for 10 sequences, as
        tests/serve/test_autoscaling.py expects, and fast enough for a few."""
        (application,) = yaml.safe_load(YAML.read_text())["applications"]
        args = application["args"]
        model, k = args["target"]["model"], args["speculation"]["num_speculative_tokens"]
        alpha = 1 - args["draft"]["model"]["toy_error_rate"]
        accepted = sum(alpha**n for n in range(1, k + 1))
        steps = args["draft"]["model"]
        step_ms = steps["toy_step_ms"] + sequences * steps["toy_row_ms"]
        mine = sequences / num_targets
        # Two rows of each, while windows are half empty.
        pass_ms = model["toy_step_ms"] + 2 * mine * model["toy_row_ms"]
        wanted = 1000 / pass_ms * mine * accepted
        busy = replace(DRAFT, num_sessions=sequences, busy_share=1.0, drafted_rate=1e9)
        for window in (k, accepted):  # where targets say K, and where they do not
            late = replace(
                IDLE, num_wanting=mine, wanted_rate=wanted, missing_rate=wanted / 2,
                pass_ms=pass_ms, window=window,
            )  # fmt: skip
            needed = drafts_for([late] * num_targets, [replace(busy, step_ms=step_ms)])
            assert (needed <= 1) == is_enough

    def test_sequences_that_no_draft_takes(self) -> None:
        half = replace(IDLE, num_wanting=12, num_unserved=4)
        assert drafts_for([half, half], [DRAFT, DRAFT]) == 3
        assert drafts_for([replace(half, num_unserved=12)], [DRAFT]) == 1, "not their number"
        assert drafts_for([replace(half, num_unserved=1)], [DRAFT] * 3) == 1, "it will be in time"

    @pytest.mark.parametrize(
        ("sequences", "most"), [(1, 1), (1.9, 1), (2, 2), (3, 2), (4, 3), (12, 4)]
    )
    def test_drafts_that_few_share_are_enough_however_busy(
        self, sequences: float, most: float
    ) -> None:
        busy = [replace(DRAFT, busy_share=1.0, drafted_rate=100)] * 2
        late = replace(IDLE, verified_rate=200, wanted_rate=100, missing_rate=90)
        assert drafts_for([replace(late, num_wanting=sequences)], busy) == most

    def test_controller_does_not_hide_that_drafts_are_scarce(self) -> None:
        """It lets drafts run less far ahead from there on, and so keeps them from being busier."""
        assert KNOBS.draft_busy_share < ControllerConfig().max_draft_utilization
