"""Every draft dies at once."""

from chaos.faults.signals import Kill


class KillAllDrafts(Kill):
    name = "kill_all_drafts"
    deployment = "DraftReplica"
    everyone = True
