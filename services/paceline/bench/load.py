"""When requests are sent: a closed loop of N clients, or an open loop with its own arrivals.

Closed: each client sends its next request when its last one has ended, so exactly N are in flight
until there is nothing left to send. Open: a request is sent when it is due, whatever the service
does; latency counts from then, so a slow service cannot hide its queue (no coordinated omission).
Clock and sleep come from the caller. Knows no HTTP and no prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

# Sends request number i, due at that time of the clock; False when it failed. Never raises for
# what a service does.
Send = Callable[[int, float], Awaitable[bool]]
Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

# A client whose request failed waits: a service that refuses at once is not hammered.
FAILURE_PAUSE_S = 0.1
# Requests of one run, however long it may take.
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Amount:
    """How much to send: so many requests, or as many as begin within `duration_s`."""

    num_requests: int = MAX_REQUESTS
    duration_s: float | None = None

    def is_over(self, num_begun: int, elapsed_s: float) -> bool:
        is_late = self.duration_s is not None and elapsed_s >= self.duration_s
        return is_late or num_begun >= min(self.num_requests, MAX_REQUESTS)


@dataclass(slots=True)
class LoopResult:
    """Requests `begun`, `skipped` (open loop: due when too many were in flight), and in the closed
    loop when the first client found nothing more to send: until then all N were in flight."""

    begun: int = 0
    skipped: int = 0
    full_until_s: float | None = None


async def closed_loop(
    send: Send,
    concurrency: int,
    amount: Amount,
    clock: Clock,
    sleep: Sleep,
    when_not_full: Callable[[float], None] = lambda now_s: None,
) -> LoopResult:
    """`when_not_full` is called once, at the moment from which fewer than N are in flight."""
    result, began_s = LoopResult(), clock()

    async def one_client() -> None:
        while not amount.is_over(result.begun, clock() - began_s):
            index = result.begun
            result.begun += 1
            if not await send(index, clock()):
                await sleep(FAILURE_PAUSE_S)
        if result.full_until_s is None:
            result.full_until_s = clock()
            when_not_full(result.full_until_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_client())
    return result


async def open_loop(
    send: Send,
    arrivals: Iterator[float],
    max_in_flight: int,
    amount: Amount,
    clock: Clock,
    sleep: Sleep,
) -> LoopResult:
    """A request that is due while `max_in_flight` are in flight is skipped and counted: its place
    in the order (and its prompt) is used up all the same."""
    result, began_s, num_in_flight = LoopResult(), clock(), 0

    async def one_request(index: int, due_s: float) -> None:
        nonlocal num_in_flight
        try:
            await send(index, due_s)
        finally:
            num_in_flight -= 1

    async with asyncio.TaskGroup() as group:
        for index, due_s in enumerate(arrivals):
            if amount.is_over(index, due_s):
                break
            # Also when it is late: those that were sent must get their turn.
            await sleep(max(0.0, began_s + due_s - clock()))
            if num_in_flight >= max_in_flight:
                result.skipped += 1
                continue
            result.begun += 1
            num_in_flight += 1
            group.create_task(one_request(index, began_s + due_s))
    return result
