"""Several streams read as one. Knows nothing of what they carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

ItemT = TypeVar("ItemT")


async def merge(
    sources: Sequence[AsyncGenerator[ItemT, None]],
) -> AsyncGenerator[tuple[int, ItemT], None]:
    """Each item with its source's index, in the order in which they come, up to the end of all
    sources or the first error of one, which is raised.

    Close it (`aclosing`), and all sources are closed. Invariant: no source is read further than
    one item beyond what was taken of it; so none can keep another's items waiting, either.
    """
    if len(sources) == 1:  # nobody else to wait for
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    # Of each source one item and its end at most.
    queue: asyncio.Queue[tuple[int, ItemT] | asyncio.Task[None]] = asyncio.Queue(2 * len(sources))
    gates = [asyncio.Semaphore(0) for _ in sources]
    pumps = [
        asyncio.create_task(_pump(index, source, queue, gates[index]))
        for index, source in enumerate(sources)
    ]
    for pump in pumps:
        pump.add_done_callback(queue.put_nowait)
    num_open = len(pumps)
    try:
        while num_open:
            news = await queue.get()
            if isinstance(news, asyncio.Task):
                news.result()
                num_open -= 1
            else:
                gates[news[0]].release()
                yield news
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)
        for pump in pumps:
            pump.cancelled() or pump.exception()  # seen: only the first error is anybody's


async def _pump(
    index: int,
    source: AsyncGenerator[ItemT, None],
    queue: asyncio.Queue[tuple[int, ItemT] | asyncio.Task[None]],
    gate: asyncio.Semaphore,
) -> None:
    async with aclosing(source):
        async for item in source:
            queue.put_nowait((index, item))
            await gate.acquire()
