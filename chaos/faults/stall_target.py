"""One target hangs."""

from chaos.faults.signals import Stop


class StallTarget(Stop):
    name = "stall_target"
    deployment = "TargetReplica"
