"""Several streams read as one: order, ends, and nothing read that nobody takes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from paceline.gateway.merge import merge

WIDTHS = [1, 2, 5]


class Source:
    """Counts up to `end`, or to an error at `fails_at`; remembers how far it was read."""

    def __init__(
        self, end: int, fails_at: int | None = None, error: BaseException | None = None
    ) -> None:
        self._end = end
        self._fails_at = fails_at
        self._error = error or ValueError("broken")
        self.num_read = 0
        self.is_closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._end):
                await asyncio.sleep(0)
                if number == self._fails_at:
                    raise self._error
                self.num_read += 1
                yield number
        finally:
            self.is_closed = True


async def until_still(sources: list[Source]) -> None:
    """Until whatever may run by itself has run."""
    for _ in range(20 * len(sources)):
        await asyncio.sleep(0)


async def read_into(found: list[tuple[int, int]], sources: list[Source]) -> None:
    async with aclosing(merge([source.items() for source in sources])) as merged:
        async for pair in merged:
            found.append(pair)


def only_this_task() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("ends", [[4], [3, 3], [0, 5, 2], [0, 0], [1] * 9])
async def test_every_item_once_and_in_its_sources_order(ends: list[int]) -> None:
    sources = [Source(end) for end in ends]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        found = [pair async for pair in merged]
    for index, end in enumerate(ends):
        assert [item for whose, item in found if whose == index] == [*range(end)]
    assert len(found) == sum(ends)
    assert all(source.is_closed for source in sources)
    assert only_this_task()


async def test_none_waits_for_another() -> None:
    gate = asyncio.Event()

    async def later() -> AsyncGenerator[int, None]:
        await gate.wait()
        yield 7

    async with aclosing(merge([later(), Source(3).items()])) as merged:
        assert [await anext(merged) for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]
        gate.set()
        assert [pair async for pair in merged] == [(0, 7)]


@pytest.mark.parametrize("width", WIDTHS)
async def test_each_gets_its_turn(width: int) -> None:
    """Sources that always have something: none is read twice while another waits."""
    sources = [Source(50) for _ in range(width)]
    found: list[tuple[int, int]] = []
    await read_into(found, sources)
    assert [item for _, item in found] == sorted(item for _, item in found)


@pytest.mark.parametrize("width", WIDTHS)
async def test_no_more_is_read_than_is_taken(width: int) -> None:
    sources = [Source(100) for _ in range(width)]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        for num_taken in range(1, 30):
            await anext(merged)
            await until_still(sources)
            num_ahead = sum(source.num_read for source in sources) - num_taken
            assert num_ahead <= (width if width > 1 else 0)
    assert all(source.is_closed for source in sources)
    assert only_this_task()


@pytest.mark.parametrize("width", WIDTHS)
async def test_the_first_error_ends_all(width: int) -> None:
    sources = [Source(100) for _ in range(width - 1)] + [Source(100, fails_at=3)]
    found: list[tuple[int, int]] = []
    with pytest.raises(ValueError, match="broken"):
        await read_into(found, sources)
    assert [item for whose, item in found if whose == width - 1] == [0, 1, 2]
    assert all(source.is_closed for source in sources)
    assert only_this_task()


class Sore(Source):
    """Cannot be closed without an error."""

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            async for number in super().items():
                yield number
        finally:
            raise KeyError("closed")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_sore", [False, True])
async def test_two_errors_are_one(width: int, is_sore: bool) -> None:
    """The later ones are nobody's, and nothing is logged of them either."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    sources = [Source(2, fails_at=0)]
    sources += [Sore(9) if is_sore else Source(2, fails_at=0) for _ in range(width - 1)]
    with pytest.raises(ValueError, match="broken"):
        await read_into([], sources)
    sources.clear()  # they hold the error, and it all that was going on
    gc.collect()
    assert complaints == []
    assert only_this_task()


@pytest.mark.parametrize("width", WIDTHS)
async def test_a_source_that_somebody_else_cancelled(width: int) -> None:
    """An error like any other, not a wait without end."""
    cancelled = Source(5, fails_at=1, error=asyncio.CancelledError())
    sources = [Source(1) for _ in range(width - 1)] + [cancelled]
    with pytest.raises(asyncio.CancelledError):
        await read_into([], sources)
    assert all(source.is_closed for source in sources)
    assert only_this_task()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_taken", [0, 1, 7])
async def test_closed_early(width: int, num_taken: int) -> None:
    sources = [Source(100) for _ in range(width)]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        for _ in range(num_taken):
            await anext(merged)
    assert all(source.is_closed or not source.num_read for source in sources)
    assert only_this_task()


@pytest.mark.parametrize("width", WIDTHS)
async def test_the_reader_is_cancelled(width: int) -> None:
    never = asyncio.Event()
    closed = []

    async def silent() -> AsyncGenerator[int, None]:
        try:
            await never.wait()
            yield 0
        finally:
            closed.append(True)

    async def read() -> None:
        async with aclosing(merge([silent() for _ in range(width)])) as merged:
            await anext(merged)

    task = asyncio.ensure_future(read())
    await until_still([Source(0)] * width)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(closed) == width
    assert only_this_task()
