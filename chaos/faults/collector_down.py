"""The collector of traces is dead."""

from chaos.faults.base import Fault


class CollectorDown(Fault):
    name = "collector_down"
    why_not = "its configuration traces nowhere; tests/rpc/test_traces.py has a dead collector"

    async def inject(self) -> None:
        raise NotImplementedError(self.why_not)
