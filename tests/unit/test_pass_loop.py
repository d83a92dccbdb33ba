"""The loop of a replica: turns, wake-ups, failures and its end."""

import asyncio
import logging

import pytest

from paceline.pass_loop import PassLoop


async def test_turns_follow_wake_ups_and_none_is_lost():
    seen = []
    second, done = asyncio.Event(), asyncio.Event()

    async def turn():
        seen.append(len(seen))
        if len(seen) == 1:
            loop.wake()  # before the wait of the same turn: it must return at once
        if len(seen) == 2:
            second.set()
        if len(seen) == 3:
            done.set()
        await loop.wait(None)

    loop = PassLoop("test", turn)
    assert not loop.is_running
    loop.start()
    async with asyncio.timeout(60):
        await second.wait()
        loop.wake()
        await done.wait()
    loop.check_health()
    await loop.stop()
    assert seen == [0, 1, 2]
    assert not loop.is_running


async def test_a_wait_ends_with_its_time():
    async def turn():
        await loop.wait(0.0)
        turns.append(1)
        if len(turns) == 5:
            done.set()

    turns, done = [], asyncio.Event()
    loop = PassLoop("test", turn)
    loop.start()
    async with asyncio.timeout(60):
        await done.wait()
    await loop.stop()


async def test_a_turn_that_raises_ends_the_loop_loudly(caplog):
    caplog.set_level(logging.ERROR, logger="paceline")

    async def turn():
        raise ZeroDivisionError("planted")

    ended = asyncio.Event()
    loop = PassLoop("test", turn, ended.set)
    with pytest.raises(RuntimeError, match="not running: None"):
        loop.check_health()
    loop.start()
    async with asyncio.timeout(60):
        await ended.wait()
    await loop.stop()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        loop.check_health()
    assert "the pass loop of this test failed" in caplog.text
