"""How long to wait before dialling again. Pure: knows no clock, and chance is injected."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """Pauses that double from `min_s` up to `max_s`, each shortened by up to half.

    The jitter keeps the drafts of a restarted target from dialling it in step. `uniform` returns
    a number in [0, 1).
    """

    def __init__(self, min_s: float, max_s: float, uniform: Callable[[], float]) -> None:
        if not 0 < min_s <= max_s:
            raise ValueError(f"need 0 < min_s <= max_s, got {min_s} and {max_s}")
        self.min_s = min_s
        self.max_s = max_s
        self._uniform = uniform
        self._ceiling_s = min_s  # Invariant: min_s <= _ceiling_s <= max_s.

    def next_s(self) -> float:
        """The pause before the next attempt."""
        pause_s = self._ceiling_s * (1.0 - self._uniform() / 2.0)
        self._ceiling_s = min(self._ceiling_s * 2.0, self.max_s)
        return pause_s

    def reset(self) -> None:
        """A stream was established: the next failure starts from `min_s` again."""
        self._ceiling_s = self.min_s
