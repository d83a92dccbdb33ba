"""What the adaptive policy promises, in a pure simulation (`policy_world`): deterministic, short.

Tables with all K and longer runs: `python -m tests.properties.policy_lab`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.properties.policy_lab import (
    ADAPTIVE,
    BEST_K,
    HARSH_SEEDS,
    contended,
    drifting,
    far,
    harsh,
    harsh_mixes,
    stationary,
    steps,
    useless,
)
from tests.properties.policy_world import OFF, fixed, run


@pytest.mark.parametrize("name", stationary())
def test_at_least_97_percent_of_the_best_fixed_k(name):
    """`BEST_K` comes from the table; its neighbors are tried too, should it have moved."""
    setting, seconds = stationary()[name]
    best = max(run(setting, fixed(k), seconds).rate for k in BEST_K[name])
    assert run(setting, ADAPTIVE, seconds).rate >= 0.97 * best


@pytest.mark.parametrize("name", drifting())
def test_a_drifting_mix_beats_every_fixed_k(name):
    setting, seconds = drifting()[name]
    best = max(run(setting, fixed(k), seconds).rate for k in BEST_K[name])
    assert run(setting, ADAPTIVE, seconds).rate > best


@pytest.mark.parametrize("seed", HARSH_SEEDS)
@pytest.mark.parametrize("name", harsh_mixes())
def test_a_mix_that_jumps_beats_every_fixed_k(name, seed):
    setting, seconds = harsh_mixes()[name]
    setting = replace(setting, seed=seed)
    best = max(run(setting, fixed(k), seconds).rate for k in BEST_K[name])
    assert run(setting, ADAPTIVE, seconds).rate > best


@pytest.mark.parametrize("name", [name for name in harsh() if name in BEST_K])
def test_a_class_that_changes_at_a_stroke(name):
    setting, seconds = harsh()[name]
    best = max(run(setting, fixed(k), seconds).rate for k in BEST_K[name])
    assert run(setting, ADAPTIVE, seconds).rate >= 0.95 * best


@pytest.mark.parametrize("num_sequences", [1, 8, 32, 64])
def test_a_useless_draft_costs_nothing(num_sequences):
    setting, seconds = useless(num_sequences)
    outcome = run(setting, ADAPTIVE, seconds)
    assert outcome.rate >= 0.98 * run(setting, OFF, seconds).rate
    assert outcome.proposals < 0.05 * outcome.passes * num_sequences


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_a_draft_too_far_away_costs_nothing(acceptance):
    setting, seconds = far(acceptance)
    assert run(setting, ADAPTIVE, seconds).rate >= 0.98 * run(setting, OFF, seconds).rate


def test_contention_opens_the_breaker():
    """Passes are 30 % slower while the draft works, and rows are free: nothing predicts that."""
    setting, seconds = contended(until_s=float("inf"))
    outcome = run(setting, ADAPTIVE, seconds)
    assert "open" in {state for _, _, state, _ in outcome.trace}
    assert outcome.rate >= 0.97 * run(setting, OFF, seconds).rate


def test_drafting_comes_back_when_the_contention_is_gone():
    setting, seconds = contended(until_s=12.0)
    outcome = run(setting, ADAPTIVE, seconds)
    late = [cap for now_us, _, state, cap in outcome.trace if now_us > 50e6]
    assert min(late[-5:]) >= 1.0
    assert outcome.policy.profit.deal.state.value in ("drafting", "control")


@pytest.mark.parametrize("name", ["good draft", "bad draft"])
def test_steps_of_concurrency_are_never_slower(name):
    setting, seconds = steps(name)
    ours, without = run(setting, ADAPTIVE, seconds), run(setting, OFF, seconds)
    for (tokens, us), (plain_tokens, plain_us) in zip(ours.by_step, without.by_step, strict=True):
        assert tokens / us >= 0.95 * plain_tokens / plain_us


def test_a_run_is_a_function_of_its_setting():
    setting, _ = stationary()["B 8, a .8, row 1 %"]
    one, other = (run(setting, ADAPTIVE, 2.0) for _ in range(2))
    assert (one.tokens, one.passes, one.trace) == (other.tokens, other.passes, other.trace)
