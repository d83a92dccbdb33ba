"""A changed link between drafts and targets: the proxy does it, until healed or TTL_S is over."""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

from chaos.faults.base import TTL_S, Fault
from chaos.shape import Shape

PLAIN = Shape()


class Link(Fault):
    """`up` is what drafts say, `down` what targets say; `evidence` the proxy's counter of it."""

    up: ClassVar[Shape] = PLAIN
    down: ClassVar[Shape] = PLAIN
    evidence: ClassVar[str] = "late"

    async def inject(self) -> None:
        self._before = (await self.cluster.order_proxy(do="stats"))[self.evidence]
        await self.cluster.order_proxy(
            do="set", up=asdict(self.up), down=asdict(self.down), ttl_s=TTL_S
        )

    async def heal(self) -> None:
        counts = await self.cluster.order_proxy(do="stats")
        await self.cluster.order_proxy(do="clear")
        self.num_fired = counts[self.evidence] - self._before
