"""A simulated fleet against what can be computed, and what must never happen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.simulate.config import SimulateConfig
from paceline.simulate.decider import FollowerDecider, PolicyDecider
from paceline.simulate.fleet import Fleet
from paceline.simulate.places import Places
from tests.unit.simulate.settings import config, raw


def rate(settings: SimulateConfig) -> float:
    """Tokens per second."""
    return Fleet(settings).run().metrics.num_tokens / settings.duration_s


def test_without_drafts_it_is_plain_decoding() -> None:
    for batch in (1, 8, 32):
        settings = config(batch=batch, num_drafts=0)
        fleet = Fleet(settings)
        metrics = fleet.run().metrics
        pass_s = (25 + 0.05 * batch) / 1000
        assert metrics.num_tokens / 10 == pytest.approx(batch / pass_s, rel=0.003)
        assert metrics.num_round_tokens == metrics.num_rounds
        assert metrics.target_busy_us == pytest.approx(10e6, rel=1e-6)


def test_overhead_is_added_to_each_pass() -> None:
    data = raw(batch=8, num_drafts=0)
    data["hardware"]["targets"]["large"]["overhead_ms"] = 5
    fleet = Fleet(SimulateConfig.model_validate(data))
    metrics = fleet.run().metrics
    assert metrics.num_tokens / 10 == pytest.approx(8 / 0.0304, rel=0.005)
    assert metrics.target_busy_us / 10e6 == pytest.approx(25.4 / 30.4, rel=0.005)


class WaitForAll:
    """Every pass waits until the window holds K: the schedule of math.md 2g.2."""

    def __init__(self, places: Places, k: int) -> None:
        self.places, self.k = places, k
        self.num_waits = 0
        self._is_waiting = False

    def until_us(self, place: int, now_us: float) -> float | None:
        is_full = self.places.arrived_chain[place] == self.places.chain[place]
        if is_full and self.places.arrived[place] - self.places.committed[place] >= self.k:
            self._is_waiting = False
            return None
        self.num_waits += not self._is_waiting
        self._is_waiting = True
        return now_us + 1e9


@pytest.mark.parametrize(("acceptance", "rtt_ms"), [(0.75, 2.0), (0.9, 8.0)])
def test_a_chain_that_waits_for_its_window(acceptance: float, rtt_ms: float) -> None:
    """h = a^(K+1), E = (1 - a^(K+1)) / (1 - a), T = V + (1 - h)(RTT + K d)."""
    k = 4
    settings = config(k=k, acceptance=acceptance, rtt_ms=rtt_ms, duration_s=60.0)
    fleet = Fleet(settings)
    (target,) = fleet.targets
    hold = target.hold = WaitForAll(fleet.places, k)
    metrics = fleet.run().metrics
    hit = acceptance ** (k + 1)
    tokens = (1 - hit) / (1 - acceptance)
    pass_ms = 25.25 + (1 - hit) * (rtt_ms + k * 3.01)
    assert metrics.mean_acceptance_length == pytest.approx(tokens, rel=0.02)
    assert 1 - hold.num_waits / metrics.num_passes == pytest.approx(hit, abs=0.02)
    assert 60e3 / metrics.num_passes == pytest.approx(pass_ms, rel=0.02)
    assert metrics.num_draft_tokens == k * metrics.num_rounds


def ceiling(acceptance: float, batch: int) -> float:
    """Every window full at the best K and the target never idle (math.md 2i)."""

    def tokens(k: int) -> float:
        return sum(acceptance**i for i in range(k + 1))

    return max(1e3 * batch * tokens(k) / (25 + 0.05 * batch * (k + 1)) for k in range(64))


@pytest.mark.parametrize("fan_out", [0, 2])
@pytest.mark.parametrize(("batch", "acceptance"), [(1, 0.9), (8, 0.6), (32, 0.9)])
def test_never_above_the_ceiling_and_never_far_below_plain(
    batch: int, acceptance: float, fan_out: int
) -> None:
    settings = config(batch=batch, acceptance=acceptance, fan_out=fan_out, duration_s=2.0)
    measured = rate(settings)
    assert measured < 1.02 * ceiling(acceptance, batch)
    assert measured > 0.97 * 1e3 * batch / (25 + 0.05 * batch)


def test_branches_pay_where_the_draft_has_time() -> None:
    options: dict[str, Any] = {"batch": 4, "acceptance": 0.6, "k": 4, "duration_s": 6.0}
    assert rate(config(fan_out=2, **options)) > 1.08 * rate(config(**options))


def test_useless_drafts_cost_nothing() -> None:
    settings = config(batch=8, acceptance=0.0, k=2)
    metrics = Fleet(settings).run().metrics
    assert metrics.num_accepted_tokens == 0 < metrics.num_drafted
    assert metrics.num_tokens / 10 == pytest.approx(8 / 0.0254, rel=0.005)


def test_perfect_drafts_are_always_accepted() -> None:
    metrics = Fleet(config(batch=4, acceptance=1.0, k=3)).run().metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
    assert metrics.mean_acceptance_length == pytest.approx(4.0, abs=0.05)


def test_the_same_seed_is_the_same_run() -> None:
    options = {"batch": 8, "output_tokens": {"distribution": "exponential", "mean": 40}}

    def run(seed: int) -> tuple[int, int, int]:
        metrics = Fleet(config(duration_s=4.0, seed=seed, **options)).run().metrics
        return metrics.num_tokens, metrics.num_rows, metrics.num_finished

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_nothing_is_lost() -> None:
    """Every request runs, waits, has ended or was refused, and every token is in a request."""
    data = raw(
        batch=8,
        num_targets=3,
        num_drafts=2,
        output_tokens={"distribution": "exponential", "mean": 30},
        duration_s=6.0,
        warmup_s=0,
    )
    large = data["hardware"]["targets"]["large"]
    large |= {"max_num_seqs": 4, "kv_tokens": 2048, "max_queued_seqs": 2}
    data["traffic"]["classes"][0]["output_tokens"]["max"] = 500
    settings = SimulateConfig.model_validate(data)
    fleet = Fleet(settings)
    metrics, requests = fleet.run().metrics, fleet.requests
    ongoing = sum(target.num_ongoing for target in fleet.targets)
    assert requests.num_made == requests.num_ended + requests.num_refused + ongoing
    assert requests.num_refused > 0
    assert requests.num_ended > 50
    places = fleet.places
    left = sum(
        int(places.committed[place] - places.prompt_len[place])
        for target in fleet.targets
        for place in target.running
    )
    assert metrics.num_tokens == fleet.requests.ended_tokens + left
    assert (places.committed <= places.end_len).all()
    has_draft = places.draft_id >= 0
    assert (places.granted < places.end_len)[has_draft].all()
    assert (places.told <= places.committed)[has_draft].all()
    assert (places.draft_len <= places.end_len)[has_draft].all()
    sessions = [place for draft in fleet.drafts for place in draft.sessions]
    assert len(sessions) == len(set(sessions))
    assert set(sessions) <= {p for target in fleet.targets for p in target.running}


def test_who_does_not_fit_gives_way_and_comes_back() -> None:
    data = raw(batch=4, num_drafts=1, output_tokens={"mean": 400}, duration_s=20.0)
    data["hardware"]["targets"]["large"] |= {"kv_tokens": 900}
    settings = SimulateConfig.model_validate(data)
    fleet = Fleet(settings)
    metrics = fleet.run().metrics
    assert metrics.num_preemptions > 0
    assert metrics.num_finished > 10
    assert fleet.requests.ended_tokens <= 400 * fleet.requests.num_ended


def test_prompts_are_computed_in_chunks() -> None:
    """1000 rows in passes of at most 100: the first token comes with the tenth."""
    data = raw(batch=1, num_drafts=0, output_tokens={"mean": 1}, duration_s=30.0)
    data["hardware"]["targets"]["large"]["max_rows_per_pass"] = 100
    data["traffic"]["classes"][0]["prompt_tokens"] = {"mean": 1000}
    metrics = Fleet(SimulateConfig.model_validate(data)).run().metrics
    assert metrics.ttft.percentile_ms(50) == pytest.approx(10 * 30, rel=0.01)
    assert metrics.num_rows == 100 * metrics.num_passes


def test_places_of_a_draft_are_limited() -> None:
    data = raw(batch=16, num_drafts=1, k=2)
    data["hardware"]["drafts"]["small"]["max_sessions"] = 5
    fleet = Fleet(SimulateConfig.model_validate(data))
    metrics = fleet.run().metrics
    assert len(fleet.drafts[0].sessions) == 5
    assert metrics.num_draft_tokens / metrics.num_rounds < 5 / 16 * 2


def test_followers_do_about_what_leaders_do() -> None:
    options: dict[str, Any] = {"batch": 8, "num_targets": 4, "num_drafts": 2, "duration_s": 2.5}
    exact = Fleet(config(policy_sampling=1, **options))
    sampled = Fleet(config(policy_sampling=4, **options))
    first, second = exact.run(), sampled.run()
    assert (first.num_leaders, second.num_leaders) == (4, 1)
    assert second.metrics.num_tokens == pytest.approx(first.metrics.num_tokens, rel=0.05)


def test_fractions_of_the_leader_fall_to_followers_in_turn() -> None:
    settings = config(batch=400, k=3)
    places = Places(1, 400)
    leader = PolicyDecider(places, 0, settings.speculation, settings.traffic.classes)
    leader.caps[:] = 2.5
    index = np.arange(400)
    counts = FollowerDecider(places, leader).plan(index, np.full(400, 9), 0, 4000)
    assert set(counts.tolist()) == {2, 3}
    assert counts.mean() == pytest.approx(2.5, abs=0.02)
    cut = FollowerDecider(places, leader).plan(index, np.full(400, 9), 0, 500)
    assert int(cut.sum()) <= 500


def test_scarce_drafts_get_a_ceiling() -> None:
    """One slow draft for two full targets: the Controller shrinks how far it may run."""
    data = raw(batch=16, num_targets=2, duration_s=5.0, has_controller=True, k=4)
    data["hardware"]["drafts"]["small"]["base_ms"] = 12
    fleet = Fleet(SimulateConfig.model_validate(data))
    fleet.run()
    assert fleet.controller.min_draft_ahead is not None
    assert fleet.controller.min_draft_ahead < 9
    assert int(fleet.places.credit.max()) == fleet.controller.min_draft_ahead


def rate_with_ceilings(data: dict[str, Any]) -> tuple[float, Fleet]:
    fleet = Fleet(SimulateConfig.model_validate(data | {"has_controller": True}))
    return fleet.run().metrics.num_tokens / data["duration_s"], fleet


@pytest.mark.parametrize("rtt_ms", [0.5, 4.0])
def test_one_healthy_draft_gets_no_ceiling(rtt_ms: float) -> None:
    """It is always busy, and a window is empty after each correction: nothing is scarce."""
    data = raw(batch=4, acceptance=0.6, k=4, fan_out=2, rtt_ms=rtt_ms)
    with_ceilings, fleet = rate_with_ceilings(data)
    assert fleet.controller.min_draft_ahead is None
    assert with_ceilings >= 0.99 * rate(SimulateConfig.model_validate(data))


@pytest.mark.parametrize(
    ("base_ms", "row_ms", "fan_out"),
    [(8, 0.01, 2), (1, 0.5, 0), (1, 0.8, 0), (1, 0.5, 2)],
)
def test_ceilings_cost_nothing_where_one_slow_draft_serves_four_targets(
    base_ms: float, row_ms: float, fan_out: int
) -> None:
    """Steps whose rows cost little or much; measured when ceilings have come down."""
    data = raw(
        batch=4, num_targets=4, acceptance=0.8, k=4, fan_out=fan_out, warmup_s=15, duration_s=6.0
    )
    data["hardware"]["drafts"]["small"] |= {"base_ms": base_ms, "row_ms": row_ms}
    data["traffic"]["classes"][0]["prompt_tokens"] = {"mean": 1}
    with_ceilings, fleet = rate_with_ceilings(data)
    assert fleet.controller.min_draft_ahead is not None
    assert with_ceilings >= 0.99 * rate(SimulateConfig.model_validate(data))


def test_a_far_zone_is_slower() -> None:
    zones = [
        {"name": "near", "target_share": 0.5, "draft_share": 1.0},
        {"name": "far", "target_share": 0.5, "draft_share": 0.0},
    ]
    network = {"zones": zones, "zone_rtt_ms": [[0.5, 0.5], [60.0, 60.0]]}
    fleet = Fleet(
        config(batch=4, num_targets=2, k=3, acceptance=0.9, network=network, duration_s=5.0)
    )
    fleet.run()
    near, far = (
        int((fleet.places.committed[target.low : target.high] - 16).sum())
        for target in fleet.targets
    )
    assert near > 1.2 * far


def test_acceptance_that_drifts() -> None:
    drift = {"acceptance": 0.95, "period_s": 4.0, "shape": "square"}
    data = raw(batch=4, acceptance=0.05, k=4, duration_s=4.0)
    data["traffic"]["classes"][0]["drift"] = drift
    drifting = rate(SimulateConfig.model_validate(data))
    low, high = (rate(config(batch=4, acceptance=a, k=4, duration_s=4.0)) for a in (0.05, 0.95))
    assert 1.1 * low < drifting < 0.9 * high


def test_an_open_loop_serves_what_comes() -> None:
    arrivals = {"process": "poisson", "requests_per_s": 6.0}
    data = raw(batch=8, num_targets=2, output_tokens={"mean": 20}, duration_s=20.0)
    data["traffic"]["arrivals"] = arrivals
    metrics = Fleet(SimulateConfig.model_validate(data)).run().metrics
    assert metrics.num_finished == pytest.approx(120, rel=0.15)
    ttft, e2e = metrics.ttft.percentile_ms(50), metrics.e2e.percentile_ms(50)
    assert ttft is not None
    assert e2e is not None
    assert 25 < ttft < 70
    assert e2e > ttft
