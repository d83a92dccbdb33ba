"""What a draft costs and how far away it is: its step, the round trip, what fits beside a pass.

Pure. It does not know which draft serves whom: one that is slower than the others is seen in the
averages. Times are microseconds.
"""

from __future__ import annotations

from math import ceil

from paceline.protocol.lone_wait import LonePolicy
from paceline.sampling.params import VerificationMode

# Measured (paceline bench orchestration): 8 sequences gain by branches, 32 lose.
MAX_BRANCH_BATCH = 16
MAX_DEPTH = 16  # passes that a round trip may span before no credit makes up for it

COMPARING_MODES = (VerificationMode.GREEDY, VerificationMode.COUPLED)
_MIN_RETRY, _MAX_RETRY = 256, 4096  # passes until branches are tried again
_QUANTILE_WEIGHT = 0.05
_DEFAULT_CREDIT_PASSES = 2


class DraftCost:
    """Reads what the lone policy measures; adds what concerns credit and branches."""

    def __init__(self, lone: LonePolicy) -> None:
        self._lone = lone
        self._rtt_p90_us: float | None = None
        self._has_branches = True
        self._retry_pass = 0
        self._retry_after = _MIN_RETRY

    def learn_rtt(self, rtt_us: float) -> None:
        self._lone.rtt_us.update(rtt_us)
        old = self._rtt_p90_us
        if old is None:
            self._rtt_p90_us = rtt_us
            return
        # Up nine times as far as down: in balance when one sample in ten lies above.
        step = _QUANTILE_WEIGHT * max(old, self._lone.rtt_us.value or 0.0)
        self._rtt_p90_us = old + step * (0.9 if rtt_us > old else -0.1)

    @property
    def depth(self) -> int:
        """Passes until a draft's answer to a verdict can be here (>= 1)."""
        pass_us, token_us = self._lone.pass_us.value, self._lone.token_us
        if not pass_us or token_us is None:
            return 1
        trip_us = (self._lone.rtt_us.value or 0.0) + token_us
        return min(MAX_DEPTH, max(1, ceil(trip_us / pass_us)))

    def credit(self, count: int, is_lone: bool) -> int:
        """Positions beyond the committed text, when a pass may verify `count`.

        Enough that the window behind a full acceptance is full: K for the pass, and K + 1 for
        each pass until the draft has heard of it and answered. `is_lone`: the draft starts again
        for the only sequence. It gets what it can make until the next verdict is there, else that
        finds it in the middle of a step that a correction makes useless.
        """
        ahead = count + (count + 1) * self.depth
        in_pass = self.tokens_per_pass
        if is_lone and in_pass is not None:
            first = min(count, self._lone.last_count or count)
            ahead = min(ahead, max(count + 1, first + in_pass))
        return ahead

    @property
    def tokens_per_pass(self) -> int | None:
        """Draft steps that fit into a pass; None: not known."""
        pass_us, token_us = self._lone.pass_us.value, self._lone.token_us
        return int(pass_us / token_us) if pass_us and token_us else None

    def run_down_us(self, credit: int) -> float:
        """How long drafts may go on after the last verdict that gave them credit."""
        pass_us = self._lone.pass_us.value or 0.0
        token_us = self._lone.token_us
        if token_us is None:
            return _DEFAULT_CREDIT_PASSES * pass_us
        return (self._lone.rtt_us.value or 0.0) + credit * token_us

    # -- branches ---------------------------------------------------------------------------

    def fan_out(self, mode: VerificationMode, most: int, batch: int) -> int:
        """Runner-ups per position that drafts should prepare for, `batch` sequences at a time.

        In larger batches what a draft does for branches delays the main texts more than they save.
        """
        if batch > MAX_BRANCH_BATCH or mode not in COMPARING_MODES:
            return 0
        return most if self._has_branches else 0

    def update_fan_out(self, num_passes: int) -> None:
        """Branches make the draft's steps slower: by a bounded share, of which it takes care
        itself (`branch_budget`). They are given up when two steps no longer fit into a pass: then
        none would be there in time. Later they are tried again, less and less often."""
        pass_us, step_us = self._lone.pass_us.value, self._lone.draft_token_us.value
        if not pass_us or not step_us:
            return
        is_slow = 2 * step_us > pass_us
        if self._has_branches and is_slow:
            self._has_branches = False
            self._retry_pass = num_passes + self._retry_after
            self._retry_after = min(_MAX_RETRY, 2 * self._retry_after)
        elif not self._has_branches and num_passes >= self._retry_pass:
            self._has_branches = not is_slow

    def inputs(self) -> dict[str, float]:
        """What is known, by name, for `Explanation.inputs`."""
        known = {
            "draft_step_us": self._lone.draft_token_us.value,
            "arrival_us": self._lone.arrival_us.value,
            "rtt_us": self._lone.rtt_us.value,
            "rtt_p90_us": self._rtt_p90_us,
        }
        return {name: value for name, value in known.items() if value is not None}
