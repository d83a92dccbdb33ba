"""The Controller dies; the last assignment stays in force."""

from chaos.faults.signals import Kill


class KillController(Kill):
    name = "kill_controller"
    deployment = "Controller"
