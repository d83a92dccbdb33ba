"""Bodies, headers and prompts far over the limits: each is refused and costs nobody anything."""

import asyncio

import httpx

from chaos.faults.base import Attack
from chaos.traffic import client

REFUSALS = range(400, 500)


class Oversize(Attack):
    """Counts the refusals; an answer outside 4xx is not one."""

    name = "oversize"

    async def attack(self) -> None:
        async with client(self.cluster.url) as http:
            while True:
                for body in self._bodies():
                    await self._send(http, body)
                await asyncio.sleep(0.2)

    def _bodies(self) -> list[dict[str, object]]:
        size = self.cluster.config.gateway.max_body_bytes
        return [
            {"model": "toy", "prompt": "x" * (size + 1)},
            {"model": "toy", "prompt": "x" * 4000},
            {"model": "toy", "prompt": [65] * 4000, "max_tokens": 16},
            {"model": "toy", "prompt": "x", "n": 10**6},
            {"model": "toy", "prompt": "x", "max_tokens": 2**31 - 1},
            {"model": "toy", "prompt": "x", "stop": ["y" * 10_000]},
            {"model": "toy", "prompt": "x", "logit_bias": {str(i): 1 for i in range(2000)}},
        ]

    async def _send(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        try:
            response = await http.post("/v1/completions", json=body)
        except httpx.WriteError:  # refused while we were still sending
            self.num_fired += 1
            return
        self.num_fired += response.status_code in REFUSALS
