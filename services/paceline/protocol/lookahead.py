"""How many proposals to verify, and whether a lone sequence should wait for them. Pure.

First cut of the controller of `math.md` 2h: K is fixed (deployment default, request cap), and the
wait follows `math.md` 2g: verify `count` proposals when committed tokens per second,
E(count) / (pass time + time until they are here), is largest. `count` = what has arrived needs no
wait and is always a candidate, so a wait that is not predicted to pay never happens.
It does not know sequences' tokens, threads or clocks; times are arguments in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0
_MIN_HIT_RATE = 0.5
_PROBE_EVERY = 16


def expected_tokens(acceptance: float, count: int) -> float:
    """E = 1 + a + a^2 + ... + a^count: tokens of a pass that verifies `count` proposals."""
    total, survival = 1.0, 1.0
    for _ in range(count):
        survival *= acceptance
        total += survival
    return total


@dataclass(slots=True)
class AcceptanceEstimate:
    """Discounted per-request acceptance of one position (censoring-aware: `math.md` 2h)."""

    accepted: float = 0.0
    rejected: float = 0.0

    def update(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        if num_draft_tokens == 0:
            return
        self.accepted = self.accepted * _DECAY + num_accepted_tokens
        self.rejected = self.rejected * _DECAY + (num_accepted_tokens < num_draft_tokens)

    @property
    def rate(self) -> float:
        seen = self.accepted + self.rejected
        return (self.accepted + _PRIOR_WEIGHT * _PRIOR_ACCEPTANCE) / (seen + _PRIOR_WEIGHT)


@dataclass(slots=True)
class Average:
    """Exponential moving average; None before the first sample."""

    value: float | None = None
    weight: float = 0.2

    def update(self, sample: float) -> None:
        old = self.value
        self.value = sample if old is None else old + self.weight * (sample - old)


@dataclass(frozen=True, slots=True)
class WindowOutlook:
    """What is known about one sequence's window when a pass could start.

    `have` proposals are here, `want` is the most this pass could verify, `since_us` when the
    next proposal became computable at the draft as seen from here (last verdict or last arrival)
    and `is_flushed` whether a round trip is due before the draft can go on.
    """

    have: int
    want: int
    since_us: int
    is_flushed: bool


class LonePolicy:
    """Decides the bounded wait of a lone sequence; every other pass starts at once."""

    def __init__(self, max_wait_us: int) -> None:
        self.max_wait_us = max_wait_us
        self.pass_us = Average()
        self.draft_token_us = Average()
        self.rtt_us = Average()
        self._hit_rate = 1.0
        self._skipped = 0

    def wait_until(self, outlook: WindowOutlook, acceptance: float, now_us: int) -> int:
        """When the pass should start at the latest; <= `now_us` means now."""
        pass_us, token_us = self.pass_us.value, self.draft_token_us.value
        if self.max_wait_us == 0 or pass_us is None or token_us is None:
            return now_us
        if outlook.have >= outlook.want or not self._may_probe():
            return now_us
        trip_us = (self.rtt_us.value or 0.0) if outlook.is_flushed else 0.0
        best_rate, best_wait = expected_tokens(acceptance, outlook.have) / pass_us, 0.0
        for count in range(outlook.have + 1, outlook.want + 1):
            ready_us = outlook.since_us + trip_us + (count - outlook.have) * token_us
            wait_us = max(0.0, ready_us - now_us)
            rate = expected_tokens(acceptance, count) / (pass_us + wait_us)
            if rate > best_rate and wait_us <= self.max_wait_us:
                best_rate, best_wait = rate, wait_us
        if best_wait == 0.0:
            return now_us
        return now_us + min(self.max_wait_us, int(best_wait * 1.25) + 200)

    def _may_probe(self) -> bool:
        """Waits that keep missing are tried only now and then."""
        if self._hit_rate >= _MIN_HIT_RATE:
            return True
        self._skipped += 1
        if self._skipped < _PROBE_EVERY:
            return False
        self._skipped = 0
        return True

    def record_wait(self, hit: bool) -> None:
        """Whether a wait ended because proposals arrived (True) or by its deadline."""
        self._hit_rate += 0.2 * ((1.0 if hit else 0.0) - self._hit_rate)
