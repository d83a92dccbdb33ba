"""What the policy reads of a replica's metrics."""

from __future__ import annotations

import pytest
from ray.serve._private.common import TimeStampedValue

from paceline.autoscaling.reports import Reports, draft_load, target_load
from tests.unit.autoscaling.contexts import DRAFT_METRICS, TARGET_METRICS


def reports(first: dict[str, float], **increases: float) -> Reports:
    """Two points, 2 s apart."""
    last = {name: value + increases.get(name, 0) for name, value in first.items()}
    return Reports(
        {
            name: {0: [TimeStampedValue(0.0, first[name]), TimeStampedValue(2.0, last[name])]}
            for name in first
        },
        0,
    )


def test_a_pass_and_its_windows() -> None:
    """40 passes in 1 s of 2, 4 sequences, 2.5 wanted tokens a window."""
    counts = {"num_passes": 40, "busy_us": 1e6, "wanted_tokens": 400}
    load = target_load(reports(TARGET_METRICS, **counts))
    assert (load.pass_ms, load.window) == (25.0, 2.5)
    saying = target_load(reports({**TARGET_METRICS, "num_speculative_tokens": 4}, **counts))
    assert saying.window == 4, "K itself where a target says it"
    idle = target_load(reports(TARGET_METRICS))
    assert (idle.pass_ms, idle.window) == (0, 0)


def test_a_step() -> None:
    load = draft_load(reports(DRAFT_METRICS, num_passes=300, busy_us=9e5))
    assert load.step_ms == pytest.approx(3.0)
    assert draft_load(reports(DRAFT_METRICS)).step_ms == 0
    older = {name: value for name, value in DRAFT_METRICS.items() if name != "num_passes"}
    assert draft_load(reports(older, busy_us=9e5)).step_ms == 0, "of a release without it"
