"""One draft hangs: its connections stay open and say nothing."""

from chaos.faults.signals import Stop


class StallDraft(Stop):
    name = "stall_draft"
    deployment = "DraftReplica"
