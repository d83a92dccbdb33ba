"""Every connection between drafts and targets is reset, three times in a row."""

import asyncio

from chaos.faults.base import Attack

PAUSE_S = 0.7


class LinkReset(Attack):
    name = "link_reset"

    async def attack(self) -> None:
        for _ in range(3):
            self.num_fired += (await self.cluster.order_proxy(do="reset"))["cut"]
            await asyncio.sleep(PAUSE_S)
