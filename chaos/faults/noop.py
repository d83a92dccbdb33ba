"""Nothing happens: what the checks say of a healthy service. Its runs count one fault."""

from chaos.faults.base import Fault


class Noop(Fault):
    name = "noop"

    async def inject(self) -> None:
        self.num_fired += 1
