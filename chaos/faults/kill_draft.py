"""One draft dies."""

from chaos.faults.signals import Kill


class KillDraft(Kill):
    name = "kill_draft"
    deployment = "DraftReplica"
