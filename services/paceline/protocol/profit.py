"""Whether drafting pays, measured: the ledger and the breaker of one target. Pure.

Predictions cannot see everything (drafts that take a target's cores, a cost nobody modelled). So
tokens per second with drafting are compared with those of short control stretches without, per
batch size (powers of two). A deal that loses is off until its pause is over; then it is tried
again, and pauses double while it goes on losing.

The first passes after each change are not counted: a draft first uses up its credit, and windows
are empty until it is back. The file does not know sequences, acceptance or clocks; time is an
argument (monotonic microseconds).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.errors import LocalProtocolError

FIRST_CONTROL = 20  # drafting passes before the first control stretch
CONTROL_PASSES = 4  # that are counted
MIN_INTERVAL, MAX_INTERVAL = 256, 4096  # drafting passes between control stretches
SUSPICION_INTERVAL = 48  # the same, when the deal looks bad
MAX_SETTLE_PASSES = 8
RESUME_PASSES = 2  # not counted after a control stretch
TRIAL_PASSES, MAX_TRIAL_PASSES = 16, 64
MAX_NOW_US = 1 << 62
MIN_PAUSE_US, MAX_PAUSE_US = 5_000_000, 300_000_000

_MIN_DRAFTING = 16  # passes on either side of a comparison
_MIN_CONTROL = 4
_CONFIDENCE = 2.0  # standard errors
_CORRELATION = 1.5  # full and empty windows take turns: errors are larger than of independent ones
_CLEAR_GAIN = 1.05
_DRAFTING_DECAY = 0.5 ** (1 / 256)
_RESTING_DECAY = 0.5 ** (1 / 64)
_OLD_CONTROL = 0.25  # weight of earlier control stretches
_DOUBTED_CONTROL = 0.75  # the same, after one that showed a loss
_MAX_STRETCH = 4.0  # of the mean: a longer pass (a pause of the process) counts as so long


class DealState(StrEnum):
    DRAFTING = "drafting"  # it pays, or nobody knows yet
    CONTROL = "control"  # some passes without, to compare
    OPEN = "open"  # it loses: everything rests until the pause is over
    HALF_OPEN = "half_open"  # drafting again, to find out


class DealEvent(StrEnum):
    COMPARE = "compare"
    PAID = "paid"
    LOST = "lost"
    RETRY = "retry"


TRANSITIONS: dict[tuple[DealState, DealEvent], DealState] = {
    (DealState.DRAFTING, DealEvent.COMPARE): DealState.CONTROL,
    (DealState.DRAFTING, DealEvent.LOST): DealState.OPEN,
    (DealState.CONTROL, DealEvent.PAID): DealState.DRAFTING,
    (DealState.CONTROL, DealEvent.LOST): DealState.OPEN,
    (DealState.OPEN, DealEvent.RETRY): DealState.HALF_OPEN,
    (DealState.HALF_OPEN, DealEvent.PAID): DealState.DRAFTING,
    (DealState.HALF_OPEN, DealEvent.LOST): DealState.OPEN,
}


def next_state(state: DealState, event: DealEvent) -> DealState:
    """The state after `event`. Raises `LocalProtocolError` for a move that is not in the table."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LocalProtocolError(f"deal cannot take {event} in state {state}") from None


@dataclass(slots=True)
class Rate:
    """Discounted tokens per sequence and microsecond, with its relative standard error."""

    count: float = 0.0
    tokens: float = 0.0
    us: float = 0.0
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # tt, tu, uu

    def scale(self, factor: float) -> None:
        self.count, self.tokens, self.us = (
            factor * self.count,
            factor * self.tokens,
            factor * self.us,
        )
        self._squares = [factor * value for value in self._squares]

    def add(self, tokens: float, us: float) -> None:
        if self.count >= 3:
            us = min(us, _MAX_STRETCH * self.us / self.count)
        self.count += 1.0
        self.tokens += tokens
        self.us += us
        self._squares[0] += tokens * tokens
        self._squares[1] += tokens * us
        self._squares[2] += us * us

    @property
    def value(self) -> float:
        return self.tokens / self.us if self.us else 0.0

    @property
    def error(self) -> float:
        """Relative standard error of `value`."""
        if not self.tokens:
            return 1.0
        rate = self.value
        squares = self._squares[0] - 2 * rate * self._squares[1] + rate * rate * self._squares[2]
        return float((max(0.0, squares) ** 0.5) / self.tokens)


@dataclass(slots=True)
class Deal:
    """Drafting or not, at one batch size. `now_us` is the end of a pass."""

    state: DealState = DealState.DRAFTING
    drafting: Rate = field(default_factory=Rate)
    resting: Rate = field(default_factory=Rate)
    pause_us: int = 0
    retry_us: int = 0
    closed_us: int | None = None
    interval: int = FIRST_CONTROL
    since_control: int = 0
    _num_bad: int = 0  # control stretches in a row that showed a loss, clear or not
    _num_counted: int = 0
    _num_settled: int = 0
    _settle_until_us: int = 0
    _num_skipped: int = 0  # passes that are not to be counted yet

    @property
    def is_resting(self) -> bool:
        """No proposals are to be verified."""
        return self.state in (DealState.CONTROL, DealState.OPEN)

    @property
    def may_grant(self) -> bool:
        """Credit may be given after the next pass: the last one of a control stretch is counted
        before the draft hears of it."""
        is_last = self._num_counted >= CONTROL_PASSES - 1 and not self._num_settled
        return self.state is not DealState.OPEN and (self.state is not DealState.CONTROL or is_last)

    @property
    def gain(self) -> float | None:
        """Measured speed with drafting over that without; None: not known."""
        if self.drafting.count < _MIN_DRAFTING or self.resting.count < _MIN_CONTROL:
            return None
        return self.drafting.value / self.resting.value if self.resting.value else None

    @property
    def error(self) -> float:
        drafting, resting = self.drafting.error, self.resting.error
        return _CORRELATION * float((drafting * drafting + resting * resting) ** 0.5)

    def record(
        self, tokens: float, us: float, now_us: int, is_drafting: bool, settle_us: float
    ) -> None:
        """A pass: tokens per sequence, its time with the idle time before it.

        `is_drafting`: drafts were at work for it. `settle_us`: how long a draft may go on after
        the last credit.
        """
        match self.state:
            case DealState.DRAFTING:
                self._record_drafting(tokens, us, now_us, is_drafting, settle_us)
            case DealState.CONTROL:
                self._record_control(tokens, us, now_us)
            case DealState.OPEN:
                if self._is_settled(now_us):
                    self.resting.scale(_RESTING_DECAY)
                    self.resting.add(tokens, us)
                if now_us >= self.retry_us:
                    self._move(DealEvent.RETRY)
                    self.drafting = Rate()
                    self._num_skipped = RESUME_PASSES + 1
            case DealState.HALF_OPEN:
                self._record_trial(tokens, us, now_us, is_drafting, settle_us)

    def _record_drafting(
        self, tokens: float, us: float, now_us: int, is_drafting: bool, settle_us: float
    ) -> None:
        if not self._count_drafting(tokens, us, is_drafting):
            return
        self.since_control += 1
        gain, error = self.gain, self.error
        if gain is not None and gain + _CONFIDENCE * error < 1.0:
            if self.since_control < MIN_INTERVAL:
                self._lose(now_us, settle_us)
                return
            self.interval = min(self.interval, self.since_control)
        elif gain is not None and gain < 1.0:
            self.interval = min(self.interval, SUSPICION_INTERVAL)
        if self.since_control >= self.interval:
            self._move(DealEvent.COMPARE)
            # A loss that is not clear yet: the next stretch adds to the evidence.
            self.resting.scale(_DOUBTED_CONTROL if self._num_bad else _OLD_CONTROL)
            self._settle(now_us, settle_us)

    def _count_drafting(self, tokens: float, us: float, is_drafting: bool) -> bool:
        """Whether the pass was one with drafting that counts."""
        if self._num_skipped:
            self._num_skipped -= 1
            return False
        if is_drafting:
            self.drafting.scale(_DRAFTING_DECAY)
            self.drafting.add(tokens, us)
        return is_drafting

    def _record_control(self, tokens: float, us: float, now_us: int) -> None:
        if not self._is_settled(now_us):
            return
        self.resting.add(tokens, us)
        self._num_counted += 1
        if self._num_counted < CONTROL_PASSES:
            return
        gain, error = self.gain, self.error
        self.since_control = 0
        self._num_bad = self._num_bad + 1 if gain is not None and gain < 1.0 else 0
        if gain is not None and gain + _CONFIDENCE * error < 1.0:
            self._lose(now_us, 0.0)
            return
        if gain is not None and gain - _CONFIDENCE * error > _CLEAR_GAIN:
            self.interval = min(MAX_INTERVAL, max(MIN_INTERVAL, 2 * self.interval))
        else:
            self.interval = MIN_INTERVAL
        self._move(DealEvent.PAID)
        self._num_skipped = RESUME_PASSES

    def _record_trial(
        self, tokens: float, us: float, now_us: int, is_drafting: bool, settle_us: float
    ) -> None:
        if not self._count_drafting(tokens, us, is_drafting):
            return
        gain, error = self.gain, self.error
        is_over = self.drafting.count >= 0.9 * MAX_TRIAL_PASSES
        if gain is None:
            if is_over:  # nothing to compare with: that is what control stretches are for
                self._close(now_us)
        elif gain - error > 1.0 or (is_over and gain >= 1.0):
            self._close(now_us)
        elif gain + error < 1.0 or is_over:
            self._lose(now_us, settle_us)

    def _close(self, now_us: int) -> None:
        self._move(DealEvent.PAID)
        self.closed_us, self.since_control, self.interval = now_us, 0, MIN_INTERVAL

    def _lose(self, now_us: int, settle_us: float) -> None:
        """One that loses again soon after it was closed goes on doubling its pause."""
        self._num_bad = 0
        was_closed = self.state is not DealState.HALF_OPEN
        is_soon = not was_closed or (
            self.closed_us is not None and now_us - self.closed_us < MAX_PAUSE_US
        )
        doubled = min(MAX_PAUSE_US, 2 * self.pause_us)
        self.pause_us = doubled if self.pause_us and is_soon else MIN_PAUSE_US
        self._move(DealEvent.LOST)
        self.retry_us = now_us + self.pause_us
        self._settle(now_us, settle_us)

    def _settle(self, now_us: int, settle_us: float) -> None:
        self._settle_until_us = now_us + int(settle_us)
        self._num_settled, self._num_counted = MAX_SETTLE_PASSES, 0

    def _is_settled(self, now_us: int) -> bool:
        """False for the passes in which drafts may still be at work on old credit."""
        if self._num_settled == 0:
            return True
        self._num_settled -= 1
        if now_us >= self._settle_until_us:
            # The pass that has just begun to run without them is not counted either.
            self._num_settled = min(self._num_settled, 1)
            self._settle_until_us = MAX_NOW_US
        return False

    def _move(self, event: DealEvent) -> None:
        self.state = next_state(self.state, event)


class Profit:
    """The deals of one target, one per power of two of decoding sequences (so at most 32)."""

    def __init__(self) -> None:
        self._deals: dict[int, Deal] = {}
        self._size = 1.0
        self._bits = 1

    @property
    def deal(self) -> Deal:
        """The one in force."""
        return self._deals.setdefault(self._bits, Deal())

    def record(
        self,
        num_sequences: int,
        num_committed: int,
        us: float,
        now_us: int,
        is_drafting: bool,
        settle_us: float,
    ) -> None:
        """A pass without prompts; see `Deal.record`."""
        if us <= 0 or num_sequences < 1:
            return
        self.deal.record(num_committed / num_sequences, us, now_us, is_drafting, settle_us)
        self._resize(num_sequences)

    def _resize(self, num_sequences: int) -> None:
        """Follows the batch, but not its every step: neighbors overlap by a fifth."""
        self._size += 0.25 * (num_sequences - self._size)
        low, high = 0.8 * (1 << (self._bits - 1)), 1.2 * ((1 << self._bits) - 1)
        if num_sequences == 1 or not low <= self._size <= high:
            self._bits = max(1, round(self._size)).bit_length() if num_sequences > 1 else 1
            if num_sequences == 1:
                self._size = 1.0

    def inputs(self) -> dict[str, float]:
        """What is known, by name, for `Explanation.inputs`."""
        deal = self.deal
        inputs = {"breaker_pause_us": float(deal.pause_us)}
        if deal.gain is not None:
            inputs |= {"measured_gain": deal.gain, "measured_gain_error": deal.error}
        return inputs
