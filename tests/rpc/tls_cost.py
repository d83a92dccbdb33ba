"""What TLS costs: proposals and verdicts ping-pong over loopback, with it and without, in one run.

    python -m tests.rpc.tls_cost --rounds 400 --blocks 20

Plain and TLS blocks alternate, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from paceline.config import RpcConfig
from paceline.rpc.client import dial
from paceline.rpc.stream import DraftStream
from tests.rpc import authority, wire
from tests.rpc import messages as m


async def block_us(stream: DraftStream, num_rounds: int) -> float:
    """Microseconds of a round trip, the mean of so many one after another."""
    began = time.perf_counter()
    for _ in range(num_rounds):
        stream.send(m.DRAFT_TOKENS)
        assert await stream.receive() == [m.VERDICT]
    return (time.perf_counter() - began) / num_rounds * 1e6


async def dial_ms(address: str, config: RpcConfig) -> float:
    """Milliseconds from nothing to an established stream."""
    began = time.perf_counter()
    async with dial(address, config, m.HELLO):
        return (time.perf_counter() - began) * 1e3


async def measure(num_rounds: int, num_blocks: int, folder: Path) -> None:
    configs = {"plain": wire.CONFIG, "tls": authority.both_roles(folder, authority.Authority())}
    rounds: dict[str, list[float]] = {name: [] for name in configs}
    dials: dict[str, list[float]] = {name: [] for name in configs}
    async with AsyncExitStack() as stack:
        streams, addresses = {}, {}
        for name, config in configs.items():
            server = await stack.enter_async_context(wire.serving(wire.echo, config))
            addresses[name] = server.address
            dialled = dial(server.address, config, m.HELLO)
            _, streams[name] = await stack.enter_async_context(dialled)
            await block_us(streams[name], num_rounds)  # warm
        for _ in range(num_blocks):
            for name, config in configs.items():
                rounds[name].append(await block_us(streams[name], num_rounds))
                dials[name].append(await dial_ms(addresses[name], config))
    for what, unit, figures in (("round trip", "us", rounds), ("dial", "ms", dials)):
        plain, tls = (statistics.median(figures[name]) for name in configs)
        ratios = [b / a for a, b in zip(figures["plain"], figures["tls"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{what}: plain {plain:.1f} {unit}, TLS {tls:.1f} {unit} (medians of {num_blocks}); "
            f"ratio {middle:.3f} (quartiles {low:.3f} .. {high:.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="round trips in a block")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each kind")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments.rounds, arguments.blocks, Path(folder)))


if __name__ == "__main__":
    main()
