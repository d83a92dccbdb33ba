"""Both loops on a clock of their own: who is in flight, what is due when, what is skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from paceline.bench.load import FAILURE_PAUSE_S, Amount, closed_loop, open_loop


class Time:
    """Stands still but for who sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


class Service:
    """Answers when told to. `sent`: (index, due, begun) of each request in order."""

    def __init__(self, time: Time, is_ok: bool = True) -> None:
        self.time, self.is_ok = time, is_ok
        self.sent: list[tuple[int, float, float]] = []
        self.waiting: list[asyncio.Event] = []
        self.most_in_flight = 0
        self.is_instant = False

    async def send(self, index: int, due_s: float) -> bool:
        self.sent.append((index, due_s, self.time.now_s))
        if not self.is_instant:
            answered = asyncio.Event()
            self.waiting.append(answered)
            self.most_in_flight = max(self.most_in_flight, len(self.waiting))
            await answered.wait()
            self.waiting.remove(answered)
        return self.is_ok

    async def answer_one(self) -> None:
        self.waiting[0].set()
        await settle()


async def settle() -> None:
    """Whatever can go on without time or answers has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_closed_loop_keeps_exactly_n_in_flight() -> None:
    time, not_full = Time(), []
    service = Service(time)
    loop = asyncio.ensure_future(
        closed_loop(service.send, 3, Amount(7), time.clock, time.sleep, not_full.append)
    )
    await settle()
    for num_answered in range(1, 8):
        assert len(service.waiting) == min(3, 8 - num_answered)
        assert not_full == ([] if num_answered < 6 else [104.0 + 1.0])
        time.now_s += 1
        await service.answer_one()
    result = await loop
    assert service.most_in_flight == 3
    assert [index for index, _, _ in service.sent] == list(range(7))
    # All of them were due at the moment at which they were sent.
    assert all(due_s == begun_s for _, due_s, begun_s in service.sent)
    assert (result.begun, result.skipped, result.full_until_s) == (7, 0, 105.0)


async def test_a_closed_loop_ends_with_its_duration() -> None:
    time = Time()
    service = Service(time)
    loop = asyncio.ensure_future(
        closed_loop(service.send, 2, Amount(duration_s=10.0), time.clock, time.sleep)
    )
    await settle()
    time.now_s += 9.9
    await service.answer_one()
    assert len(service.waiting) == 2
    time.now_s += 0.1
    await service.answer_one()
    await service.answer_one()
    assert (await loop).begun == 3


async def test_a_client_whose_request_failed_waits_before_the_next() -> None:
    time = Time()
    service = Service(time, is_ok=False)
    service.is_instant = True
    await closed_loop(service.send, 1, Amount(3), time.clock, time.sleep)
    assert time.sleeps == [FAILURE_PAUSE_S] * 3


def every(gap_s: float) -> Iterator[float]:
    due_s = 0.0
    while True:
        due_s += gap_s
        yield due_s


async def test_open_arrivals_do_not_wait_for_answers() -> None:
    time = Time()
    service = Service(time)
    loop = asyncio.ensure_future(
        open_loop(service.send, every(2.0), 100, Amount(5), time.clock, time.sleep)
    )
    await settle()
    assert len(service.waiting) == 5
    assert [due_s for _, due_s, _ in service.sent] == [102.0, 104.0, 106.0, 108.0, 110.0]
    assert not loop.done()
    while service.waiting:
        await service.answer_one()
    assert (await loop).begun == 5


async def test_a_request_that_was_sent_late_is_due_when_it_should_have_been() -> None:
    """No coordinated omission: a client that was held up does not move the schedule."""
    time = Time()
    service = Service(time)
    service.is_instant = True

    async def oversleep(seconds: float) -> None:
        await time.sleep(seconds + (0.0 if time.sleeps else 7.0))

    await open_loop(service.send, every(2.0), 100, Amount(4), time.clock, oversleep)
    assert [due_s for _, due_s, _ in service.sent] == [102.0, 104.0, 106.0, 108.0]
    assert [begun_s for _, _, begun_s in service.sent] == [109.0, 109.0, 109.0, 109.0]


async def test_in_flight_requests_are_bounded_and_the_rest_is_counted() -> None:
    time = Time()
    service = Service(time)
    loop = asyncio.ensure_future(
        open_loop(service.send, every(1.0), 2, Amount(6), time.clock, time.sleep)
    )
    await settle()
    assert [index for index, _, _ in service.sent] == [0, 1]
    while service.waiting:
        await service.answer_one()
    result = await loop
    assert (result.begun, result.skipped, service.most_in_flight) == (2, 4, 2)


async def test_an_answer_makes_room_in_the_open_loop() -> None:
    time = Time()
    service, all_due = Service(time), asyncio.Event()

    async def sleep(seconds: float) -> None:
        if len(service.sent) == 2 and len(service.waiting) == 2 and time.now_s >= 104.0:
            await service.answer_one()
        await time.sleep(seconds)
        if len(time.sleeps) == 6:
            all_due.set()

    loop = asyncio.ensure_future(
        open_loop(service.send, every(1.0), 2, Amount(6), time.clock, sleep)
    )
    await all_due.wait()
    await settle()
    while service.waiting:
        await service.answer_one()
    result = await loop
    # 2 and 3 found it full; 4 takes the place and, with it, its own number.
    assert [index for index, _, _ in service.sent] == [0, 1, 4]
    assert (result.begun, result.skipped) == (3, 3)


async def test_open_arrivals_end_with_the_duration() -> None:
    time = Time()
    service = Service(time)
    service.is_instant = True
    amount = Amount(duration_s=10.0)
    result = await open_loop(service.send, every(3.0), 9, amount, time.clock, time.sleep)
    assert (result.begun, time.now_s) == (3, 109.0)
