"""How long a sequence waits for its draft before it is taken away. Pure.

The clock runs only while the draft could draft: it has been opened, its credit is not used up,
and nothing of use has come since. It holds up nothing: passes go on without proposals meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 5


@dataclass(slots=True)
class Patience:
    """`due_since_us`: since when the draft owes us a proposal, None while it does not.

    `num_stalls` in a row double what is waited for, so that a draft that is merely busy with a
    long prompt gets to its end. `is_proven`: the present draft has sent something of use.
    """

    due_since_us: int | None = None
    num_stalls: int = 0
    is_proven: bool = False
    _is_overdue: bool = False

    def start(self, now_us: int, has_credit: bool) -> None:
        """A draft has taken the sequence."""
        self.is_proven = False
        self._restart(now_us, has_credit)

    def reward(self, now_us: int, has_credit: bool) -> None:
        """Proposals of use have come."""
        self.is_proven, self.num_stalls = True, 0
        self._restart(now_us, has_credit)

    def grant(self, now_us: int, has_credit: bool) -> None:
        """A verdict has gone out. A draft that owes us something already is not excused by it."""
        if not has_credit or self.due_since_us is None:
            self._restart(now_us, has_credit)

    def _restart(self, now_us: int, has_credit: bool) -> None:
        self.due_since_us = now_us if has_credit else None
        self._is_overdue = False

    def is_due(self, limit_us: int, now_us: int) -> bool:
        """Whether something has been due for so long."""
        since_us = self.due_since_us
        limit_us <<= min(self.num_stalls, _MAX_DOUBLINGS)
        return since_us is not None and now_us - since_us >= limit_us

    def is_over(self, limit_us: int, now_us: int) -> bool:
        """Whether that has been so twice in a row.

        Twice, because this process itself may have stood still: what has come in meanwhile is
        read before the next look.
        """
        if not self.is_due(limit_us, now_us):
            return False
        was_overdue, self._is_overdue = self._is_overdue, True
        return was_overdue
