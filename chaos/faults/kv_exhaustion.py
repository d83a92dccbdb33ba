"""More long texts at once than the KV cache holds: sequences give way and are computed again."""

import asyncio
import contextlib
import random

import httpx

from chaos.cluster import Cluster
from chaos.faults.base import Attack
from chaos.scenarios import SHED
from chaos.traffic import Request, client, send

NUM_LONG = 18
PROMPT_TOKENS = 320
MAX_TOKENS = 180
FULL_TIMEOUT_S = 20.0  # below the time-to-live of the attack
POLL_S = 0.3


class KvExhaustion(Attack):
    """Fires when a target really preempts, or refuses a text because too many wait."""

    name = "kv_exhaustion"

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        super().__init__(cluster, rng)
        self._before: dict[str, int] = {}
        self._num_refused = 0

    async def inject(self) -> None:
        """Until the cache has really been full, however slow the machine is."""
        self._before = await self._preemptions()
        await super().inject()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FULL_TIMEOUT_S):
                while not await self._count():  # noqa: ASYNC110  others count
                    await asyncio.sleep(POLL_S)

    async def attack(self) -> None:
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
            if outcome.has_failed:  # refused for being too many: that is allowed
                self._num_refused += outcome.error in SHED
                await asyncio.sleep(0.5)

    async def heal(self) -> None:
        if self._task is not None:
            self.num_fired = await self._count()
        await super().heal()

    async def _count(self) -> int:
        """A target that does not answer, or is new, counts what is known of it."""
        now = await self._preemptions()
        return self._num_refused + sum(now[name] - self._before.get(name, 0) for name in now)

    async def _preemptions(self) -> dict[str, int]:
        targets = await self.cluster.stats("TargetReplica")
        return {t["replica_id"]: int(t["scheduler"]["num_preemptions"]) for t in targets}
