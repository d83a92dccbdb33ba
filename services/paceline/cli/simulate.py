"""`paceline simulate`."""

from __future__ import annotations


def simulate() -> None:
    """Simulate a fleet: tokens/s, latency and cost of a configuration."""
    raise NotImplementedError
