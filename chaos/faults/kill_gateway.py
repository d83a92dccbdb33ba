"""One of the gateways dies with its clients' connections."""

from chaos.faults.signals import Kill


class KillGateway(Kill):
    name = "kill_gateway"
    deployment = "Gateway"
