"""Whether a lone sequence should wait for proposals, and how long. Pure.

The wait maximizes tokens per second in steady state. A pass that starts early is not lost: the
draft goes on meanwhile, and when its next token is the one that the pass commits, the next pass
finds a window. What counts is therefore the time of a whole chain, from one correction to the
next; what has arrived needs no wait and is always a candidate, so a wait not predicted to pay
never happens. It does not know sequences' tokens, threads or clocks; times are arguments in
microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.9
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0
_MIN_HIT_RATE = 0.5
_PROBE_EVERY = 16
_MIN_GAIN = 0.02
_MAX_ACCEPTANCE = 0.98  # at 1 a chain would never end
_STALE_PASS = 0.5  # of a draft pass: what is left of the one that a correction interrupts


def chain_us(acceptance: float, count: int, full: int, pass_us: float, wait_us: float) -> float:
    """Expected time from one correction to the next, when it starts with a wait for `count`.

    A pass is followed by one with `full` proposals and no wait when all its proposals and the
    draft's next token are right (a^(count+1)); else the chain ends. So it has 1 + r passes,
    r = a^(count+1) / (1 - a^(full+1)). It commits 1 / (1 - a) tokens whatever `count` is: the
    shortest chain is the best rate.
    """
    rate = min(acceptance, _MAX_ACCEPTANCE)
    followers = rate ** (count + 1) / (1.0 - rate ** (full + 1))
    return wait_us + pass_us * (1.0 + followers)


@dataclass(slots=True)
class AcceptanceEstimate:
    """Discounted per-request acceptance of one position.

    Censoring-aware: positions behind a rejection teach nothing.
    """

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
        self.draft_token_us = Average()  # what a token costs the draft
        self.arrival_us = Average()  # how far apart its tokens get here
        self.rtt_us = Average()
        self._hit_rate = 1.0
        self._skipped = 0

    @property
    def token_us(self) -> float | None:
        """Time between proposals; None before the first."""
        known = (self.draft_token_us.value, self.arrival_us.value)
        return max((value for value in known if value is not None), default=None)

    def wait_until(self, outlook: WindowOutlook, acceptance: float, now_us: int) -> int:
        """When the pass should start at the latest; <= `now_us` means now."""
        pass_us, token_us = self.pass_us.value, self.token_us
        if self.max_wait_us == 0 or not pass_us or not token_us:
            return now_us
        if outlook.have >= outlook.want or not self._may_probe():
            return now_us
        full = min(outlook.want, max(1, int(pass_us / token_us)))
        best_us = chain_us(acceptance, outlook.have, full, pass_us, 0.0) / (1.0 + _MIN_GAIN)
        best_wait = 0.0
        ready_us = outlook.since_us + self._resume_us(token_us) * outlook.is_flushed
        for count in range(outlook.have + 1, outlook.want + 1):
            ready_us += token_us
            wait_us = max(0.0, ready_us - now_us)
            total_us = chain_us(acceptance, count, full, pass_us, wait_us)
            if total_us < best_us and wait_us <= self.max_wait_us:
                best_us, best_wait = total_us, wait_us
        if best_wait == 0.0:
            return now_us
        return now_us + min(self.max_wait_us, int(best_wait * 1.25) + 200)

    def _resume_us(self, token_us: float) -> float:
        """Until the draft has heard a correction and is done with the pass that it interrupts."""
        return (self.rtt_us.value or 0.0) + _STALE_PASS * token_us

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
