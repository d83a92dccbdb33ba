"""A TCP proxy between drafts and targets, in a process of its own: `python -m chaos.proxy SEED`.

Prints the port where it takes orders (see `proxy_control`). Every shape ends by itself after its
time-to-live, whatever became of the harness, and the process ends with its standard input.
Orders: map, set, clear, reset, stats.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from dataclasses import dataclass, field
from typing import Any

from chaos.shape import Direction, Shape

HOST = "127.0.0.1"
CHUNK_BYTES = 64 << 10
MAX_CHUNKS = 64  # read and not yet written, per direction
HOLD_POLL_S = 0.01
LINGER_S = 1.0
PLAIN = Shape()


@dataclass
class Counts:
    """What has happened so far."""

    connections: int = 0
    bytes: int = 0
    flips: int = 0
    late: int = 0  # chunks that had to wait
    held: int = 0
    resets: int = 0


@dataclass
class Proxy:
    """One listener per upstream. `up` is draft -> target, `down` the other way."""

    seed: int = 0
    up: Shape = PLAIN
    down: Shape = PLAIN
    counts: Counts = field(default_factory=Counts)
    _servers: dict[str, asyncio.Server] = field(default_factory=dict)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _expiry: asyncio.TimerHandle | None = None

    async def map(self, upstream: str) -> str:
        if upstream not in self._servers:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.create_task(self._serve(upstream, reader, writer))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

            self._servers[upstream] = await asyncio.start_server(accept, HOST, 0)
        return f"{HOST}:{self._servers[upstream].sockets[0].getsockname()[1]}"

    def set(self, up: Shape, down: Shape, ttl_s: float) -> None:
        self.clear()
        self.up, self.down = up, down
        self._expiry = asyncio.get_running_loop().call_later(ttl_s, self.clear)

    def clear(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry, self.up, self.down = None, PLAIN, PLAIN

    def reset(self) -> int:
        """Cut every connection with a TCP reset; returns how many there were."""
        cut = len(self._writers) // 2
        for writer in list(self._writers):
            # With a zero linger a close is a reset, whatever was still to be sent.
            own = writer.get_extra_info("socket")
            if own.fileno() >= 0:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self.counts.resets += cut
        return cut

    async def stop(self) -> None:
        self.clear()
        for server in self._servers.values():
            server.close()
        self.reset()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(
        self, upstream: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, _, port = upstream.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self.counts.connections += 1
        rng = random.Random(f"{self.seed}/{upstream}/{self.counts.connections}")
        ends = {writer, far_writer}
        self._writers |= ends
        pipes = [
            asyncio.create_task(self._pipe(reader, far_writer, "up", Direction(rng))),
            asyncio.create_task(self._pipe(far_reader, writer, "down", Direction(rng))),
        ]
        try:
            # gRPC uses no half-closed connections: what one end said last still gets through.
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(pipes, timeout=LINGER_S)
        finally:
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pipe(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
        direction: Direction,
    ) -> None:
        loop = asyncio.get_running_loop()
        # b"" is the end, as it is for a reader.
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        sender = asyncio.create_task(self._send(queue, writer, name))
        try:
            while not sender.done():
                shape: Shape = getattr(self, name)
                data = await reader.read(shape.slice_bytes or CHUNK_BYTES)
                if not data:
                    await queue.put((loop.time(), data))
                    await sender
                    return
                damaged = direction.damage(data, shape)
                self.counts.flips += damaged != data
                self.counts.bytes += len(data)
                due_s = direction.due_s(loop.time(), len(data), shape)
                await queue.put((due_s, damaged))
        except OSError:
            return
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, name: str
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await queue.get()
            if not data:
                return
            wait_s = due_s - loop.time()
            if wait_s > 0:
                self.counts.late += 1
                await asyncio.sleep(wait_s)
            self.counts.held += getattr(self, name).is_held
            while getattr(self, name).is_held:  # noqa: ASYNC110  a poll is enough
                await asyncio.sleep(HOLD_POLL_S)
            writer.write(data)
            await writer.drain()


async def obey(proxy: Proxy, command: dict[str, Any]) -> dict[str, Any]:
    """One order."""
    match command["do"]:
        case "map":
            return {"address": await proxy.map(command["upstream"])}
        case "set":
            proxy.set(Shape(**command["up"]), Shape(**command["down"]), command["ttl_s"])
        case "clear":
            proxy.clear()
        case "reset":
            return {"cut": proxy.reset()}
        case "stats":
            return vars(proxy.counts)
        case other:
            raise ValueError(f"no such order: {other}")
    return {}


async def run(seed: int) -> None:
    proxy = Proxy(seed)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answered = await obey(proxy, json.loads(await reader.readline()))
        except (ValueError, TypeError, KeyError, OSError) as error:
            answered = {"error": str(error)}
        writer.write(json.dumps(answered).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the harness is gone
    server.close()
    await proxy.stop()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1])))
