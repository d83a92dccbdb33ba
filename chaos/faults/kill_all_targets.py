"""Every target dies at once: nobody is left to go on."""

from chaos.faults.signals import Kill


class KillAllTargets(Kill):
    name = "kill_all_targets"
    deployment = "TargetReplica"
    everyone = True
