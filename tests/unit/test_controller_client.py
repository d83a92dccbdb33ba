"""Heartbeats go on through failures, and end with a goodbye."""

import asyncio
import logging

from paceline.controller_client import HeartbeatLoop


async def test_beats_survive_a_controller_that_is_away(caplog):
    caplog.set_level(logging.WARNING, logger="paceline")  # starting Serve here turns it down
    beats, third = [], asyncio.Event()

    async def report():
        beats.append(1)
        if len(beats) == 3:
            third.set()
        if len(beats) < 3:
            raise ConnectionError("planted")

    async def goodbye():
        said.append("bye")

    said = []
    loop = HeartbeatLoop(0.001, report, goodbye)
    loop.start()
    async with asyncio.timeout(60):
        await third.wait()
    await loop.stop()
    assert said == ["bye"]
    assert caplog.text.count("no answer from the controller") == 1, "said once, not every beat"


async def test_a_goodbye_that_nobody_hears_does_not_stop_the_stop():
    async def report():
        pass

    async def goodbye():
        raise ConnectionError("planted")

    loop = HeartbeatLoop(0.001, report, goodbye)
    loop.start()
    async with asyncio.timeout(60):
        await loop.stop()


async def test_news_do_not_wait_for_the_next_beat():
    beats = asyncio.Queue()

    async def report():
        beats.put_nowait("beat")

    async def goodbye():
        beats.put_nowait("bye")

    loop = HeartbeatLoop(3600.0, report, goodbye)
    loop.start()
    async with asyncio.timeout(60):
        assert await beats.get() == "beat"
        loop.hurry()
        assert await beats.get() == "beat"
    await loop.stop()
    assert [beats.get_nowait() for _ in range(beats.qsize())] == ["bye"]
