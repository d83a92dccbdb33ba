"""`paceline bench live`."""

from __future__ import annotations


def bench_live() -> None:
    """Load a running service and report what its clients saw."""
    raise NotImplementedError
