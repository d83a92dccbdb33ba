"""The simulator against the shipped scheduler and draft table, message by message."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.simulate.fleet import Fleet
from tests.unit.simulate.reference import Reference
from tests.unit.simulate.settings import config


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 1, "acceptance": 0.6, "rtt_ms": 2.0, "duration_s": 30.0},
        {"batch": 4, "acceptance": 0.75, "k": 3, "rtt_ms": 10.0, "duration_s": 8.0},
        {"batch": 4, "acceptance": 0.8, "k": 8, "rtt_ms": 40.0, "duration_s": 10.0},
        {"batch": 8, "acceptance": 0.75, "duration_s": 4.0},
        {"batch": 4, "acceptance": 0.6, "fan_out": 2, "k": 4, "duration_s": 12.0},
        {"batch": 4, "num_drafts": 0, "duration_s": 2.0},
    ],
    ids=["lone", "fixed", "far", "adaptive", "branches", "plain"],
)
def test_as_the_shipped_code(options: dict[str, Any]) -> None:
    settings = config(**options)
    metrics = Fleet(settings).run().metrics
    expected = Reference(settings).run()
    assert metrics.num_tokens / settings.duration_s == pytest.approx(expected, rel=0.05)
