"""The collector of traces is dead."""

from chaos.faults.base import Fault


class CollectorDown(Fault):
    name = "collector_down"
    why_not = "nothing is sent to a collector yet (traces come with issue 7)"

    async def inject(self) -> None:
        raise NotImplementedError(self.why_not)
