"""PeerStream over a hand-written carrier: no socket, no gRPC, and every ending by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from paceline.config import RpcConfig
from paceline.errors import LocalProtocolError
from paceline.protocol.messages import Bye, DraftMessage, Drain, Ping, Pong, TargetMessage
from paceline.rpc.codec import decode_draft, draft_codec, encode_target
from paceline.rpc.errors import StreamClosed, StreamLost
from paceline.rpc.limits import WireLimits
from paceline.rpc.stream import DraftStream, Load, TransportError
from tests.rpc import messages as m

CONFIG = RpcConfig(ping_interval_s=60.0, peer_timeout_s=61.0)  # quiet, unless a test says so
LIMITS = WireLimits.from_config(CONFIG, m.VOCAB_SIZE)


class Carrier:
    """Bytes for the stream come from `arriving`; what it writes lands in `written`."""

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[bytes | TransportError | None] = asyncio.Queue()
        self.written: list[bytes] = []
        self.has_written = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.is_finished = False
        self.hangs_up = True  # as soon as we finish, as a well-behaved peer does
        self.write_error: TransportError | None = None

    async def read(self) -> bytes | None:
        item = await self.arriving.get()
        if isinstance(item, TransportError):
            raise item
        return item

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()
        self.has_written.set()
        if self.write_error is not None:
            raise self.write_error
        self.written.append(data)

    async def finish_writing(self) -> None:
        self.is_finished = True
        if self.hangs_up:
            self.arriving.put_nowait(None)

    def arrive(self, *said: TargetMessage) -> None:
        for data in encode_target(said, LIMITS):
            self.arriving.put_nowait(data)

    async def heard(self) -> list[DraftMessage]:
        """What the stream writes next, at least one message."""
        await self.has_written.wait()
        self.has_written.clear()
        written, self.written = self.written, []
        return parse(written)


def parse(written: Sequence[bytes]) -> list[DraftMessage]:
    return [message for data in written for message in decode_draft(data, LIMITS)]


@pytest.fixture
def carrier() -> Carrier:
    return Carrier()


@pytest.fixture(autouse=True)
async def _no_orphans() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    mine = asyncio.current_task()
    assert asyncio.all_tasks() - before - {mine} == set()


def make(carrier: Carrier, **changes: float) -> DraftStream:
    config = CONFIG.model_copy(update=changes)
    return DraftStream(carrier, draft_codec(LIMITS), config, dials=True)


async def test_messages_pass_in_order_and_neighbours_share_a_write(carrier: Carrier) -> None:
    said: list[DraftMessage] = [
        m.OPENED,
        m.DRAFT_TOKENS,
        replace(m.DRAFT_TOKENS, session_id=8),
        m.NACK,
    ]
    async with make(carrier) as stream:
        for message in said:
            stream.send(message)
        await carrier.has_written.wait()
        assert len(carrier.written) == 3
        assert await carrier.heard() == said
        assert stream.bytes_sent > 0


async def test_receive_hands_out_all_that_came(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        carrier.arrive(m.OPEN, m.VERDICT, m.VERDICT, Drain())
        got: list[TargetMessage] = []
        while len(got) < 4:
            got += await stream.receive()
        assert got == [m.OPEN, m.VERDICT, m.VERDICT, Drain()]


async def test_receive_may_be_cancelled_and_loses_nothing(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await stream.receive()
        carrier.arrive(m.VERDICT)
        assert await stream.receive() == [m.VERDICT]


async def test_leaving_says_bye_after_what_is_queued(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        stream.send(m.NACK)
    assert parse(carrier.written) == [m.NACK, Bye("")]
    assert carrier.is_finished
    assert isinstance(stream.end, StreamClosed)


async def test_close_gives_its_reason_and_ends_receive(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        stream.close("going home")
        stream.send(m.NACK)  # too late, dropped
        stream.close("again")
        with pytest.raises(StreamClosed, match="closed here: going home"):
            await stream.receive()
    assert parse(carrier.written) == [Bye("going home")]


async def test_a_bye_of_the_peer_is_an_orderly_end(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        carrier.arrive(m.VERDICT, Bye("maintenance"))
        assert await stream.receive() == [m.VERDICT]
        for _ in range(2):
            with pytest.raises(StreamClosed, match="maintenance"):
                await stream.receive()
    assert carrier.written == []  # a Bye is not answered


async def test_eof_without_bye_is_a_lost_peer(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        carrier.arrive(m.VERDICT)
        carrier.arriving.put_nowait(None)
        assert await stream.receive() == [m.VERDICT]  # what came before is still handed out
        with pytest.raises(StreamLost, match="end of stream without a Bye") as lost:
            await stream.receive()
        assert not isinstance(lost.value, StreamClosed)
    assert carrier.written == []


async def test_a_failing_read_is_a_lost_peer(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        carrier.arriving.put_nowait(TransportError("UNAVAILABLE: gone"))
        with pytest.raises(StreamLost, match="UNAVAILABLE: gone"):
            await stream.receive()


async def test_a_failing_write_leaves_the_verdict_to_the_reader(carrier: Carrier) -> None:
    """The peer said Bye and hung up: our write fails before we read the Bye."""
    carrier.write_error = TransportError("already finished")
    async with make(carrier) as stream:
        stream.send(m.NACK)
        for _ in range(3 * CONFIG.max_outbox_messages):  # not an overflow either
            await asyncio.sleep(0)
            stream.send(m.NACK)
        assert stream.end is None
        carrier.arrive(Bye("I left"))
        with pytest.raises(StreamClosed, match="I left"):
            await stream.receive()


async def test_the_owner_may_declare_the_peer_gone(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        for reason in ("cancelled", "second reason"):
            stream.lose(reason)
        with pytest.raises(StreamLost, match="cancelled"):
            await stream.receive()
    assert carrier.written == []


async def test_outbox_overflow_ends_the_stream(carrier: Carrier) -> None:
    carrier.may_write.clear()
    async with make(carrier, max_outbox_messages=8) as stream:
        for _ in range(9):
            stream.send(m.NACK)
        with pytest.raises(StreamLost, match="outbox overflow: 8 messages wait for a slow peer"):
            await stream.receive()


async def test_a_burst_within_the_limit_is_no_overflow(carrier: Carrier) -> None:
    async with make(carrier, max_outbox_messages=8) as stream:
        for _ in range(8):
            stream.send(m.NACK)
        assert await carrier.heard() == [m.NACK] * 8
        assert stream.end is None


async def test_a_full_inbox_stops_the_reader(carrier: Carrier) -> None:
    async with make(carrier, max_outbox_messages=8) as stream:
        for _ in range(20):
            carrier.arrive(m.VERDICT)
        got: list[list[TargetMessage]] = []
        while sum(map(len, got)) < 20:
            got.append(await stream.receive())
        assert max(map(len, got)) == 8
        assert sum(map(len, got)) == 20


async def test_after_a_failed_write_the_reader_drains_the_call(carrier: Carrier) -> None:
    carrier.write_error = TransportError("already finished")
    async with make(carrier) as stream:
        stream.send(m.NACK)
        await carrier.has_written.wait()
        carrier.arrive(m.VERDICT)
        assert await stream.receive() == [m.VERDICT]
        carrier.arrive(m.VERDICT)
        carrier.arriving.put_nowait(None)
        stream.lose("given up")
    assert carrier.arriving.empty()


async def test_malformed_messages_are_counted_then_end_the_stream(carrier: Carrier) -> None:
    async with make(carrier, max_remote_errors=3) as stream:
        carrier.arrive(m.WELCOME)
        assert await stream.receive_first() == m.WELCOME
        stream.establish()
        for _ in range(2):
            carrier.arriving.put_nowait(b"garbage")
        carrier.arrive(m.VERDICT)
        assert await stream.receive() == [m.VERDICT]
        assert stream.num_remote_errors == 2
        stream.report_remote_error("rejected proposal of an unknown session")
        sentence = "too many malformed messages, the last: rejected proposal"
        with pytest.raises(StreamLost, match=sentence) as lost:
            await stream.receive()
        assert type(lost.value) is StreamLost
    bye = parse(carrier.written)[-1]
    assert isinstance(bye, Bye)
    assert bye.reason.startswith(sentence)


async def test_one_malformed_message_in_the_handshake_is_enough(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        carrier.arriving.put_nowait(b"garbage")
        with pytest.raises(StreamLost, match="too many malformed messages"):
            await stream.receive_first()


@pytest.mark.parametrize("late", [m.WELCOME, Pong(1, 2)], ids=["welcome", "pong"])
async def test_messages_out_of_place_are_offences(carrier: Carrier, late: TargetMessage) -> None:
    async with make(carrier) as stream:
        carrier.arrive(m.WELCOME)
        await stream.receive_first()
        stream.establish()
        carrier.arrive(late)
        carrier.arrive(m.VERDICT)
        assert await stream.receive() == [m.VERDICT]
        assert stream.num_remote_errors == 1


async def test_no_handshake_in_time(carrier: Carrier) -> None:
    async with make(carrier, hello_timeout_s=0.01) as stream:
        with pytest.raises(StreamLost, match=r"no handshake within 0\.01 s"):
            await stream.receive_first()
    assert parse(carrier.written) == [Bye("no handshake in time")]


async def test_pings_are_answered_with_our_clock(carrier: Carrier) -> None:
    clock_us = 5_000
    stream = DraftStream(carrier, draft_codec(LIMITS), CONFIG, dials=True, now_us=lambda: clock_us)
    async with stream:
        carrier.arrive(Ping(sent_us=77, num_sessions=3, queue_len=9))
        assert await carrier.heard() == [Pong(ping_sent_us=77, received_us=5_000)]
        assert stream.peer_load == Load(3, 9)


async def test_pongs_set_the_clock(carrier: Carrier) -> None:
    clock_us = 1_000
    stream = DraftStream(carrier, draft_codec(LIMITS), CONFIG, dials=True, now_us=lambda: clock_us)
    async with stream:
        stream.local_load = Load(2, 1)
        stream.establish()
        assert await carrier.heard() == [Ping(1_000, num_sessions=2, queue_len=1)]
        clock_us = 1_400
        carrier.arrive(Pong(ping_sent_us=1_000, received_us=91_200), m.VERDICT)
        assert await stream.receive() == [m.VERDICT]
        assert (stream.clock.rtt_us, stream.clock.offset_us) == (400, 90_000)


async def test_silence_is_a_lost_peer(carrier: Carrier) -> None:
    async with make(carrier, ping_interval_s=0.02, peer_timeout_s=0.2) as stream:
        stream.establish()
        with pytest.raises(StreamLost, match=r"the peer was silent for 0\.2 s"):
            await stream.receive()
        assert sum(isinstance(message, Ping) for message in parse(carrier.written)) >= 4


async def test_our_own_standstill_is_not_the_peers_silence(carrier: Carrier) -> None:
    """The clock jumps between two ticks, as when this process was stopped and continued."""
    clock_us = 0

    def now_us() -> int:
        nonlocal clock_us
        clock_us += 100_000_000
        return clock_us

    config = CONFIG.model_copy(update={"ping_interval_s": 0.001, "peer_timeout_s": 0.01})
    async with DraftStream(
        carrier, draft_codec(LIMITS), config, dials=True, now_us=now_us
    ) as stream:
        stream.establish()
        pings: list[DraftMessage] = []
        while len(pings) < 20:
            pings += await carrier.heard()
        assert stream.end is None


async def test_an_owner_that_does_not_take_its_mail_hears_no_silence(carrier: Carrier) -> None:
    changes = {"max_outbox_messages": 8, "ping_interval_s": 0.005, "peer_timeout_s": 0.02}
    async with make(carrier, **changes) as stream:
        stream.establish()
        for _ in range(9):
            carrier.arrive(m.VERDICT)
        pings: list[DraftMessage] = []
        while len(pings) < 12:  # 3 x peer_timeout_s
            pings += await carrier.heard()
        assert stream.end is None
        assert len(await stream.receive()) == 8


async def test_too_long_a_message_is_refused_at_once(carrier: Carrier) -> None:
    async with make(carrier) as stream:
        with pytest.raises(LocalProtocolError, match="token ids in one entry"):
            stream.send(replace(m.DRAFT_TOKENS, token_ids=(1,) * (2**20 + 1)))
        assert stream.end is None


async def test_our_own_bug_is_loud(carrier: Carrier) -> None:
    async def own() -> None:
        async with make(carrier) as stream:
            stream.send(replace(m.DRAFT_TOKENS, token_ids=(-1,)))
            await stream.receive()

    with pytest.raises(ExceptionGroup) as group:
        await own()
    assert group.group_contains(LocalProtocolError, match="cannot encode DraftTokens")


async def test_the_owners_exception_leaves_unwrapped(carrier: Carrier) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with make(carrier):
            raise KeyError("mine")
    assert parse(carrier.written) == [Bye("")]


async def test_a_cancelled_owner_still_says_bye(carrier: Carrier) -> None:
    running = asyncio.Event()

    async def own() -> None:
        async with make(carrier) as stream:
            running.set()
            await stream.receive()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(own())
        await running.wait()
        task.cancel()
    assert task.cancelled()
    assert parse(carrier.written) == [Bye("")]


async def test_the_dialling_end_lingers_until_the_peer_hung_up(carrier: Carrier) -> None:
    carrier.hangs_up = False
    stream = DraftStream(carrier, draft_codec(LIMITS), CONFIG, dials=True)
    left = asyncio.Event()

    async def own() -> None:
        async with stream:
            pass
        left.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(own())
        assert await carrier.heard() == [Bye("")]
        carrier.arrive(m.VERDICT)  # crossed our Bye on the way
        assert not left.is_set()
        carrier.arriving.put_nowait(None)
        await left.wait()
