"""Whether a lone sequence should wait for proposals, and how long. Pure.

The wait maximizes tokens per second in steady state. A pass that starts early is not lost: the
draft goes on meanwhile, and when its next token is the one that the pass commits, the next pass
finds a window. What counts is therefore the time of a whole chain, from one correction to the
next; what has arrived needs no wait and is always a candidate, and so is what the target itself
has to offer: a wait not predicted to gain more never happens. It does not know sequences' tokens,
threads or clocks; times are arguments in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from paceline.protocol.acceptance_model import Survivals

_DECAY = 0.5 ** (1 / 15)  # half-life 15 rounds
_MAX_EVIDENCE = 48.0  # positions: long windows must not make it slower
_RECENT_DECAY = 0.5 ** (1 / 4)  # half-life 4 rounds
_MAX_RECENT = 8.0  # positions
_CHANGE = 2.5**2  # standard deviations, squared: farther apart, and only the recent ones count
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 6.0
_MIN_HIT_RATE = 0.5
_PROBE_EVERY = 16
_MIN_GAIN = 0.02
_MAX_ACCEPTANCE = 0.98  # at 1 a chain would never end
_STALE_PASS = 0.5  # of a draft pass: what is left of the one that a correction interrupts


@dataclass(frozen=True, slots=True)
class LocalOffer:
    """What a pass could verify at once instead of the window: `count` proposals made inside the
    target, of which `expected` will be accepted."""

    count: int
    expected: float


@dataclass(frozen=True, slots=True)
class Chain:
    """From one correction to the next. `survivals[k]`: probability that k proposals and all before
    them are right ([0] is 1); `sums[k]`: expected accepted tokens of k. A pass with k proposals
    takes `pass_us` + `row_us` * k."""

    survivals: tuple[float, ...]
    sums: tuple[float, ...]
    pass_us: float
    row_us: float = 0.0

    def _pass(self, count: int) -> tuple[float, float, float]:
        """Of a pass with `count` proposals: its tokens, its time, and the probability that all
        of them and the draft's next token are right."""
        follows = min(self.survivals[count + 1], _MAX_ACCEPTANCE)
        return 1.0 + self.sums[count], self.pass_us + self.row_us * count, follows

    def rate(self, count: int, second: int, full: int, wait_us: float) -> float:
        """Tokens per microsecond of a chain that starts with a wait for `count`.

        While it goes on the next pass finds `second` proposals, and those behind it `full`, with
        no wait; else the chain ends.
        """
        tokens, us = self._sums(*self._pass(count), second, full)
        return tokens / (wait_us + us)

    def offered_rate(self, offer: LocalOffer, num_come: int, full: int) -> float:
        """The same of one that starts at once with an offer, while the draft goes on: `num_come` of
        its proposals will be here at the pass's end, of use if they say what the pass commits.

        Never less than with fewer of the offer right: that it overtakes the draft, whose window is
        then of no use, is no reason to wait for that window.
        """
        whole = int(offer.expected)
        sums = [self._offered_sums(offer, right, num_come, full) for right in range(whole + 2)]
        (few, few_us), (more, more_us) = sums[-2:]
        part = offer.expected - whole
        mixed = (few + part * (more - few)) / (few_us + part * (more_us - few_us))
        return max(mixed, *(tokens / us for tokens, us in sums[:-1]))

    def _offered_sums(
        self, offer: LocalOffer, right: int, num_come: int, full: int
    ) -> tuple[float, float]:
        tokens, us = 1 + right, self.pass_us + self.row_us * offer.count
        is_of_use = tokens <= num_come and tokens < len(self.survivals)
        follows = min(self.survivals[tokens], _MAX_ACCEPTANCE) if is_of_use else 0.0
        return self._sums(tokens, us, follows, min(full, max(0, num_come - tokens)), full)

    def _sums(
        self, tokens: float, us: float, follows: float, second: int, full: int
    ) -> tuple[float, float]:
        """Tokens and time of a whole chain."""
        next_tokens, next_us, next_follows = self._pass(second)
        full_tokens, full_us, full_follows = self._pass(full)
        rest = next_follows / (1.0 - full_follows)
        return (
            tokens + follows * (next_tokens + rest * full_tokens),
            us + follows * (next_us + rest * full_us),
        )


def even_chain(acceptance: float, length: int, pass_us: float, row_us: float = 0.0) -> Chain:
    """Every position is accepted with the same probability."""
    survivals = tuple(acceptance**k for k in range(length + 2))
    return Chain(survivals, tuple(accumulate(survivals[1:], initial=0.0)), pass_us, row_us)


@dataclass(slots=True)
class AcceptanceEstimate:
    """Discounted per-request acceptance of one position, forgotten at once after a change.

    Censoring-aware: positions behind a rejection teach nothing. `prior` is what is expected of a
    sequence of which nothing is known: the mean of its class. `recent_` are the last few rounds.
    """

    accepted: float = 0.0
    rejected: float = 0.0
    prior: float = _PRIOR_ACCEPTANCE
    recent_accepted: float = 0.0
    recent_rejected: float = 0.0

    def update(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        if num_draft_tokens == 0:
            return
        right, wrong = num_accepted_tokens, int(num_accepted_tokens < num_draft_tokens)
        self.accepted = self.accepted * _DECAY + right
        self.rejected = self.rejected * _DECAY + wrong
        self.forget(_MAX_EVIDENCE)
        recent_accepted = self.recent_accepted * _RECENT_DECAY + right
        recent_rejected = self.recent_rejected * _RECENT_DECAY + wrong
        scale = min(1.0, _MAX_RECENT / (recent_accepted + recent_rejected))
        self.recent_accepted = scale * recent_accepted
        self.recent_rejected = scale * recent_rejected
        if self._has_changed():
            self.accepted, self.rejected = self.recent_accepted, self.recent_rejected

    def _has_changed(self) -> bool:
        """Whether the last rounds differ from those before by more than chance explains."""
        recent = self.recent_accepted + self.recent_rejected
        old = max(0.0, self.accepted + self.rejected - recent)
        if not recent or not old:
            return False
        rate = (max(0.0, self.accepted - self.recent_accepted) + 0.5) / (old + 1.0)
        far = self.recent_accepted / recent - rate
        return far * far > _CHANGE * rate * (1.0 - rate) * (1.0 / recent + 1.0 / old)

    def forget(self, most: float) -> None:
        """Let what was seen count for `most` positions at most."""
        seen = self.accepted + self.rejected
        if seen > most:
            self.accepted *= most / seen
            self.rejected *= most / seen

    @property
    def rate(self) -> float:
        seen = self.accepted + self.rejected
        return (self.accepted + _PRIOR_WEIGHT * self.prior) / (seen + _PRIOR_WEIGHT)


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
    and `is_flushed` whether a round trip is due before the draft can go on. `offer`: what a pass
    that starts now would verify of the target's own.
    """

    have: int
    want: int
    since_us: int
    is_flushed: bool
    offer: LocalOffer | None = None


class LonePolicy:
    """Decides the bounded wait of a lone sequence; every other pass starts at once.

    `last_count`: the proposals that the last wait was for; 0: the last pass started at once.
    """

    def __init__(self, max_wait_us: int) -> None:
        self.max_wait_us = max_wait_us
        self.pass_us = Average()
        self.num_draft_tokens = Average()  # of the passes that `pass_us` averages
        self.row_us = 0.0  # what a row costs beside a lone sequence
        self.draft_token_us = Average()  # what a token costs the draft
        self.arrival_us = Average()  # how far apart its tokens get here
        self.rtt_us = Average()
        self.last_count = 0
        self._hit_rate = 1.0
        self._skipped = 0
        self._is_held = False

    @property
    def token_us(self) -> float | None:
        """Time between proposals; None before the first."""
        draft_us, arrival_us = self.draft_token_us.value, self.arrival_us.value
        if draft_us is None or arrival_us is None:
            return draft_us or arrival_us
        return max(draft_us, arrival_us)

    def learn_pass(self, pass_us: int, num_draft_tokens: int) -> None:
        """A pass without prompts."""
        self.pass_us.update(pass_us)
        self.num_draft_tokens.update(num_draft_tokens)

    def take_held(self) -> bool:
        """Whether the pass that has just ended had been held."""
        was_held, self._is_held = self._is_held, False
        return was_held

    def wait_until(
        self,
        outlook: WindowOutlook,
        acceptance: float,
        now_us: int,
        survivals: Survivals | None = None,
    ) -> int:
        """When the pass should start at the latest; <= `now_us` means now.

        `survivals` of the sequence's proposals; without them each is accepted with the
        probability `acceptance`.
        """
        pass_us, token_us = self.pass_us.value, self.token_us
        if self.max_wait_us == 0 or not pass_us or not token_us:
            return now_us
        if outlook.have >= outlook.want or not self._may_probe():
            return now_us
        chain = self._chain(acceptance, outlook.want, pass_us, survivals)
        in_pass = int(pass_us / token_us)
        full = min(outlook.want, max(1, in_pass))
        ready_us = outlook.since_us + self._resume_us(token_us) * outlook.is_flushed
        best_wait, best_count = 0.0, outlook.have
        best = 0.0
        if outlook.offer is not None:
            late_us = max(0.0, ready_us + token_us - now_us)
            num_come = outlook.have + max(0, int((pass_us - late_us) / token_us + 1.0))
            best = chain.offered_rate(outlook.offer, num_come, full)
        for count in range(outlook.have, outlook.want + 1):
            wait_us = max(0.0, ready_us - now_us) if count > outlook.have else 0.0
            ready_us += token_us
            # What comes while the pass runs; the token that it commits itself is the first.
            late_us = max(0.0, ready_us - now_us - wait_us)
            second = min(full, max(0, int((pass_us - late_us) / token_us)))
            rate = chain.rate(count, second, full, wait_us)
            if wait_us > self.max_wait_us:
                break
            if count == outlook.have:
                best = max(best, rate)
            elif rate > best * (1.0 + _MIN_GAIN * (best_count == outlook.have)):
                best, best_wait, best_count = rate, wait_us, count
        self.last_count = best_count
        if best_wait == 0.0:
            return now_us
        self._is_held = True
        return now_us + min(self.max_wait_us, int(best_wait * 1.25) + 200)

    def _chain(
        self, acceptance: float, want: int, pass_us: float, survivals: Survivals | None
    ) -> Chain:
        row_us = min(self.row_us, pass_us)
        base_us = pass_us - row_us * (self.num_draft_tokens.value or 0.0)
        base_us = max(base_us, 0.2 * pass_us)
        if survivals is None or len(survivals.negatives) <= want + 1:
            return even_chain(acceptance, want, base_us, row_us)
        right = (1.0, *(-value for value in survivals.negatives[: want + 1]))
        return Chain(right, survivals.sums, base_us, row_us)

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
