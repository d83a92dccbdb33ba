"""Clients that come in crowds and leave after a few events, or before the first one."""

import asyncio

import httpx

from chaos.faults.base import Attack
from chaos.traffic import Request, client, send

CROWD = 6
PAUSE_S = 0.25


class DisconnectStorm(Attack):
    name = "disconnect_storm"

    async def attack(self) -> None:
        async with client(self.cluster.url) as http:
            while True:
                await asyncio.gather(*(self._visit(http) for _ in range(CROWD)))
                await asyncio.sleep(PAUSE_S)

    async def _visit(self, http: httpx.AsyncClient) -> None:
        body = {
            "model": "toy",
            "prompt": "bye",
            "max_tokens": 300,
            "ignore_eos": True,
            "seed": self.rng.randrange(2**31),
            "stream": True,
        }
        leaves_after = self.rng.randrange(1, 4)
        if self.rng.random() < 0.3:
            # Away before the first event.
            visit = asyncio.create_task(send(http, Request(-1, "/v1/completions", body)))
            await asyncio.wait({visit}, timeout=self.rng.uniform(0.0, 0.03))
            self.num_fired += not visit.done()
            visit.cancel()
            await asyncio.gather(visit, return_exceptions=True)
            return
        outcome = await send(http, Request(-1, "/v1/completions", body, leaves_after))
        self.num_fired += outcome.has_left
