"""Rows beyond what pays, so that what is not verified is not believed bad for ever. Pure.

It goes by a counter: neither chance nor what is proposed has a say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.protocol.lookahead_types import SequenceLookahead, Window

PROBE_TOKENS = 2  # proposals of a sequence that probes for its resting class

_EXPLORE_EVERY = 32  # windows that hold more than is wanted: one of so many gets one more


class RowExplorer:
    """Of one target."""

    def __init__(self) -> None:
        self._num_explorable = 0

    def add(
        self,
        windows: Sequence[Window],
        counts: list[int],
        left: int,
        ceiling: Callable[[SequenceLookahead], int],
    ) -> None:
        """Probing sequences get theirs; one window in 32 that holds more gets one row more."""
        for index, window in enumerate(windows):
            count, lookahead = counts[index], window.lookahead
            if left < 1:
                return
            if count >= window.have or lookahead.is_fixed or count >= ceiling(lookahead):
                continue
            if lookahead.probe_until:
                more = min(window.have, ceiling(lookahead), PROBE_TOKENS) - count
                counts[index] += max(0, min(more, left))
                left -= max(0, more)
            elif count and lookahead.cap:
                self._num_explorable += 1
                if self._num_explorable % _EXPLORE_EVERY == 0:
                    counts[index] += 1
                    left -= 1
