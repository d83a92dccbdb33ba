"""The event loop of Serve's replicas (uvloop), for benchmarks that run drivers without Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[object, object, T]) -> T:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
