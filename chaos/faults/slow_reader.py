"""Clients that ask for long streams and read almost nothing of them."""

import asyncio
import contextlib
import json

from chaos.faults.base import Attack

NUM_READERS = 3
PAUSE_S = 0.5


class SlowReader(Attack):
    """Raw sockets with a small receive window: what is not read stays at the service."""

    name = "slow_reader"

    async def attack(self) -> None:
        await asyncio.gather(*(self._read_slowly() for _ in range(NUM_READERS)))

    async def _read_slowly(self) -> None:
        body = {
            "model": "toy",
            "prompt": "slow",
            "max_tokens": 400,
            "ignore_eos": True,
            "logprobs": 5,
            "stream": True,
            "seed": self.rng.randrange(2**31),
        }
        host, _, port = self.cluster.url.removeprefix("http://").rpartition(":")
        raw = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        try:
            writer.write(head.encode() + raw)
            await writer.drain()
            self.num_fired += bool(await reader.read(64))
            while await reader.read(16):  # noqa: ASYNC110  slow on purpose
                await asyncio.sleep(PAUSE_S)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
