"""`paceline bench orchestration`."""

from __future__ import annotations


def bench_orchestration() -> None:
    """Measure scheduling against its ceiling, with engines that only cost time."""
    raise NotImplementedError
