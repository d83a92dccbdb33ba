"""Rogue drafts at every target: garbage, foreign ids, replays, wrong epochs, oversize messages."""

import asyncio
import contextlib

import grpc

from chaos import rogue
from chaos.faults.base import Attack

PAUSE_S = 0.05
MAX_OFFENCES = 40
REDIAL_S = 0.3


class Garbage(Attack):
    """Counts offences; each rogue dials again when its target has had enough of it."""

    name = "garbage"

    async def attack(self) -> None:
        fleet = await self.cluster.fleet()
        await asyncio.gather(*(self._offend(target["address"]) for target in fleet["targets"]))

    async def _offend(self, address: str) -> None:
        while True:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                async with rogue.calling(address, self.rng) as peer:
                    await peer.introduce()
                    await self._talk(peer)
            await asyncio.sleep(REDIAL_S)

    async def _talk(self, peer: rogue.Rogue) -> None:
        listener = asyncio.create_task(peer.listen())
        try:
            for _ in range(MAX_OFFENCES):
                if listener.done():
                    return
                await asyncio.sleep(PAUSE_S)
                await peer.offend()
                self.num_fired += 1
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
