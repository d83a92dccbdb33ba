"""One draft runs at a tenth of its speed."""

from chaos.faults.signals import Slow


class SlowDraft(Slow):
    name = "slow_draft"
    deployment = "DraftReplica"
