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
    """Each item with its source's index, as they come, up to the end of all sources or the first
    error of one, which is raised.

    Close it (`aclosing`), and all sources are closed. Invariant: while nobody takes an item, no
    source is read further than one item, and one of all of them lies ready.
    """
    if len(sources) == 1:  # nobody else to wait for
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, ItemT] | BaseException | None] = asyncio.Queue(1)
    pumps = [
        asyncio.ensure_future(_pump(index, source, queue)) for index, source in enumerate(sources)
    ]
    num_open = len(pumps)
    try:
        while num_open:
            news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                num_open -= 1
            else:
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
    queue: asyncio.Queue[tuple[int, ItemT] | BaseException | None],
) -> None:
    """Behind the items their end: None, or the error."""
    end: BaseException | None = None
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((index, item))
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        end = error
    await queue.put(end)
