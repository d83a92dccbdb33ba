"""How fuzzed bytes reach the world: straight through the codec, or through a real PeerStream.

Both give the same promise: `hear` returns the messages that came out, or counts a refusal; nothing
else may be raised. An ear that `is_deaf` has had its stream ended and must be replaced.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

from paceline.errors import RemoteProtocolError
from paceline.rpc.codec import Codec
from paceline.rpc.errors import StreamLost
from paceline.rpc.stream import PeerStream, TransportError
from tests.fuzz.world import RPC


class Ear(Protocol):
    """One end of one link. `close` may be called at any time, once."""

    is_deaf: bool

    async def hear(self, data: list[bytes]) -> list[Any]: ...

    async def close(self) -> None: ...


class DirectEar:
    """The codec alone. `refused` counts refusals by the beginning of their sentence."""

    is_deaf = False

    def __init__(self, codec: Codec[Any, Any], refused: Counter[str]) -> None:
        self._decode = codec.decode
        self._refused = refused

    async def hear(self, data: list[bytes]) -> list[Any]:
        messages: list[Any] = []
        for one in data:
            try:
                decoded = self._decode(one)
            except RemoteProtocolError as error:
                self._refused[first_words(str(error))] += 1
                continue
            assert decoded, "a message without entries"
            messages += decoded
        return messages

    async def close(self) -> None:
        pass


class Carrier:
    """Carries bytes to one stream and keeps what it writes until `take`."""

    def __init__(self) -> None:
        self.arriving: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_idle = asyncio.Event()
        self.written: list[bytes] = []
        self.is_broken = False

    async def read(self) -> bytes | None:
        if self.is_broken:
            raise TransportError("the way is gone")
        if self.arriving.empty():
            self.is_idle.set()
        return await self.arriving.get()

    async def write(self, data: bytes) -> None:
        self.written.append(data)

    async def finish_writing(self) -> None:
        self.arriving.put_nowait(None)


class StreamEar:
    """A real stream over a carrier, with an owner that takes its mail at once."""

    def __init__(
        self,
        codec: Codec[Any, Any],
        peer_decode: Callable[[bytes], list[Any]],
        refused: Counter[str],
        dials: bool,
    ) -> None:
        self.is_deaf = False
        self._carrier = Carrier()
        self._peer_decode = peer_decode
        self._refused = refused
        clock: Iterator[int] = count(1)
        self._stream: PeerStream[Any, Any] = PeerStream(
            self._carrier, codec, RPC, dials, now_us=lambda: next(clock)
        )
        self._mail: list[Any] = []
        self._task: asyncio.Task[None] | None = None

    async def hear(self, data: list[bytes]) -> list[Any]:
        if self._task is None:
            self._task = asyncio.create_task(self._own())
            await self._carrier.is_idle.wait()
        if not data:
            return []
        num_errors = self._stream.num_remote_errors
        self._carrier.is_idle.clear()
        for one in data:
            self._carrier.arriving.put_nowait(one)
        waits = {asyncio.ensure_future(self._carrier.is_idle.wait()), self._task}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits - {self._task}:
            wait.cancel()
        for _ in range(4):  # the owner's turn, and the writer's
            await asyncio.sleep(0)
        self._refused["in a stream"] += self._stream.num_remote_errors - num_errors
        written, self._carrier.written = self._carrier.written, []
        for one in written:
            assert self._peer_decode(one), "a stream wrote what its peer cannot read"
        self.is_deaf = self._stream.end is not None
        mail, self._mail = self._mail, []
        return mail

    async def _own(self) -> None:
        try:
            async with self._stream as stream:
                stream.establish()
                while True:
                    self._mail += await stream.receive()
        except StreamLost:
            pass

    async def close(self) -> None:
        if self._task is not None:
            self._carrier.arriving.put_nowait(None)
            await self._task
            if not self._task.cancelled() and self._task.exception() is not None:
                raise self._task.exception()


def first_words(sentence: str) -> str:
    """Sentences without what they quote: a few kinds, however many messages."""
    words = ["#" if any(c.isdigit() for c in word) else word for word in sentence.split()[:4]]
    return " ".join(words)
