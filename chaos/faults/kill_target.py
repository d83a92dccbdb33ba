"""One target dies with what it was writing."""

from chaos.faults.signals import Kill


class KillTarget(Kill):
    name = "kill_target"
    deployment = "TargetReplica"
