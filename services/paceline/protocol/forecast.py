"""What the policy expects of the passes that it plans, summed up: to compare with what came. Pure.

Tokens and the time of each pass are predictions, made from the proposals that were there when it
was planned; the time between passes is measured, as nobody predicts how long clients and threads
take. Passes with prompts are left out. Times are microseconds.
"""

from __future__ import annotations

from paceline.protocol.lookahead_types import PassRecord


class Forecast:
    """Sums since start: what was expected, and what the same passes brought and took."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.us = 0.0
        self.num_committed = 0
        self.took_us = 0
        self._next: tuple[float, float] | None = None

    def plan(self, tokens: float, pass_us: float | None) -> None:
        """The next pass is expected to bring so much in so much time (None: not known)."""
        self._next = None if pass_us is None else (tokens, pass_us)

    def end(self, record: PassRecord) -> None:
        """A pass is done, the one that was planned last."""
        planned, self._next = self._next, None
        if planned is None or record.num_prefill_rows or record.idle_us is None:
            return
        self.tokens += planned[0]
        self.us += planned[1] + record.idle_us
        self.num_committed += record.num_committed
        self.took_us += record.ended_us - record.started_us + record.idle_us

    @property
    def tokens_per_s(self) -> float:
        """Predicted, over all passes that were counted; 0 before the first."""
        return 1e6 * self.tokens / self.us if self.us else 0.0
