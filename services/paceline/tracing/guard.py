"""What goes wrong while spans are made costs spans only. Knows no exporter and no OpenTelemetry."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


class OnceInAWhile(logging.Filter):
    """Lets a record pass when the last one that did is `interval_s` ago."""

    def __init__(
        self, interval_s: float = LOG_INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        return self.is_due()

    def is_due(self) -> bool:
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        return True


class SpanGuard:
    """`with guard:` around span code in a loop that must go on: an exception, which is our bug, is
    logged once in a while, and no more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = OnceInAWhile(clock=clock)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if self._limit.is_due():
            logger.error("spans lost: making them failed", exc_info=error)
        return True
