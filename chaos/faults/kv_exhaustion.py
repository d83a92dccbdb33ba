"""More long texts at once than the KV cache holds: sequences give way and are computed again."""

import asyncio
import random

import httpx

from chaos.cluster import Cluster
from chaos.faults.base import Attack
from chaos.traffic import Request, client, send

NUM_LONG = 18
PROMPT_TOKENS = 320
MAX_TOKENS = 180


class KvExhaustion(Attack):
    """Fires when a target really preempts."""

    name = "kv_exhaustion"

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._before = 0

    async def attack(self) -> None:
        self._before = await self._preemptions()
        async with client(self.cluster.url) as http:
            await asyncio.gather(*(self._ask(http) for _ in range(NUM_LONG)))

    async def _ask(self, http: httpx.AsyncClient) -> None:
        while True:
            body = {
                "model": "toy",
                "prompt": [self.rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)],
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "seed": self.rng.randrange(2**31),
            }
            outcome = await send(http, Request(-1, "/v1/completions", body))
            if outcome.has_failed:
                await asyncio.sleep(0.5)  # refused for being too many: that is allowed

    async def heal(self) -> None:
        if self._task is not None:
            self.num_fired = await self._preemptions() - self._before
        await super().heal()

    async def _preemptions(self) -> int:
        targets = await self.cluster.stats("TargetReplica")
        return sum(int(target["scheduler"]["num_preemptions"]) for target in targets)
