"""What a client has of one request, and whether and how another target goes on with it.

Pure: knows no clock, no event loop and no target; the gateway and the simulator drive it. A try is
one target's work on the request. What is lost with a target was never received, and the next
target starts behind what was: so every token goes to the client exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.errors import OverloadedError, RequestError
from paceline.generation import GenerateRequest, Resumption, RoundDelta

# The target is silent, unreachable or going away: the request has nothing to do with it.
TARGET_LOST = "target_lost"
# The request may be why. Most often something else is (a kill, a lost rank), but what breaks
# whatever computes it must not go from target to target.
TARGET_DIED = "target_died"
ENGINE_BROKEN = "engine_broken"
# It waited too long for a place.
QUEUE_TIMEOUT = "queue_timeout"
SUSPECT_CODES = frozenset({TARGET_DIED, ENGINE_BROKEN})
RETRIED_CODES = SUSPECT_CODES | {TARGET_LOST}

# In a row, without a token in between: so two targets at most.
MAX_SUSPECT_RETRIES = 1
# Of one request, whatever came in between: a token now and then must not cost the whole fleet.
MAX_SUSPECT_RETRIES_IN_ALL = 4
# Of one request, whatever they bring: more than the largest gateway.max_retries + 1.
MAX_TRIES = 16
# Waits before the second, third, ... try in a row that follows one without a token; the first is
# made at once, because most often another replica is there.
RETRY_PAUSES_S = (0.1, 0.3, 1.0)


def target_lost() -> RequestError:
    return RequestError("The target was lost; try again.", None, TARGET_LOST, 503, 1)


def target_died() -> RequestError:
    return RequestError(
        "The target's process ended under the request; try again.", None, TARGET_DIED, 503, 1
    )


def has_let_go(error: RequestError | None) -> bool:
    """Whether the error says that nothing of the request is left at its target."""
    let_go = SUSPECT_CODES | {QUEUE_TIMEOUT}
    return isinstance(error, OverloadedError) or (error is not None and error.code in let_go)


@dataclass(frozen=True, slots=True)
class Try:
    """The next try: `request` for any target, after a pause of `pause_s`."""

    request: GenerateRequest
    pause_s: float


class Failover:
    """All tries of one request. Feed it the deltas of the newest try only."""

    def __init__(self, request: GenerateRequest, max_retries: int) -> None:
        self._request = request
        self._max_retries = max_retries
        self._outputs: list[list[int]] = [[] for _ in range(request.n)]
        self._open = set(range(request.n))
        # Per choice: the number of its last round, None before the first.
        self._last_rounds: list[int | None] = [None] * request.n
        self._num_tries = 1
        self._num_suspect_failures_in_all = 0
        # Since the last token.
        self._num_failures = 0
        self._num_suspect_failures = 0

    def receive(self, delta: RoundDelta) -> RoundDelta:
        """The delta as the client shall see it: rounds are counted over all tries."""
        choice = delta.choice
        if delta.token_ids and choice in self._open:
            self._outputs[choice].extend(delta.token_ids)
            self._num_failures = self._num_suspect_failures = 0
        if delta.finish_reason:
            self._open.discard(choice)
        # Counted here, so that it does not matter where a target begins to count.
        last = self._last_rounds[choice]
        number = delta.round if last is None else last + 1
        self._last_rounds[choice] = number
        return delta if number == delta.round else replace(delta, round=number)

    def end_choice(self, choice: int) -> None:
        """The gateway ended it (a stop string): no other target shall go on with it."""
        self._open.discard(choice)

    def next_try(self, error: RequestError) -> Try | None:
        """What to do about the error that ended a try. None: nothing; it is the client's."""
        if not self._open or not self._is_retried(error):
            return None
        self._num_failures += 1
        self._num_suspect_failures += error.code in SUSPECT_CODES
        self._num_suspect_failures_in_all += error.code in SUSPECT_CODES
        if (
            self._num_failures > self._max_retries
            or self._num_suspect_failures > MAX_SUSPECT_RETRIES
            or self._num_suspect_failures_in_all > MAX_SUSPECT_RETRIES_IN_ALL
            or self._num_tries >= MAX_TRIES
        ):
            return None
        # Under its own name the abort of the lost try, which may still be on its way to the
        # targets, would hit this one.
        request = replace(
            self._request,
            request_id=f"{self._request.request_id}~{self._num_tries}",
            resumption=self._resumption(),
        )
        self._num_tries += 1
        return Try(request, self._pause_s())

    def _is_retried(self, error: RequestError) -> bool:
        if error.code in RETRIED_CODES:
            return True
        # Full targets refuse new requests. A client that has begun to read cannot come back
        # later, so the gateway does, for what a lost target left.
        is_refusal = isinstance(error, OverloadedError) or error.code == QUEUE_TIMEOUT
        return is_refusal and self._num_failures > 0 and self._has_begun

    @property
    def _has_begun(self) -> bool:
        return any(self._outputs) or len(self._open) < self._request.n

    def _resumption(self) -> Resumption | None:
        """None while nothing has come: such a request is simply sent again."""
        if not self._has_begun:
            return None
        outputs = (
            tuple(output) if choice in self._open else None
            for choice, output in enumerate(self._outputs)
        )
        return Resumption(self._num_tries, tuple(outputs))

    def _pause_s(self) -> float:
        if self._num_failures == 1:
            return 0.0
        return RETRY_PAUSES_S[min(self._num_failures - 2, len(RETRY_PAUSES_S) - 1)]
