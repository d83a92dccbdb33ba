"""The bounded wait of a lone sequence for its draft, as `target/lone_hold.py` has it."""

from __future__ import annotations

from typing import Protocol

from paceline.protocol.lone_wait import WindowOutlook
from paceline.simulate.decider import Decider
from paceline.simulate.places import NO_DRAFT, Places


class Hold(Protocol):
    """Who says whether the pass of a lone sequence waits."""

    def until_us(self, place: int, now_us: float) -> float | None:
        """Until when; None: it starts now. Asked again whenever proposals arrive."""


class LoneHold:
    """Of one target. It decides nothing: the policy's `lone` does."""

    def __init__(self, places: Places, decider: Decider) -> None:
        self._places, self._decider = places, decider
        self._until_us = 0.0  # 0: nobody waits
        self._have = 0

    def until_us(self, place: int, now_us: float) -> float | None:
        """Until when the pass of the only sequence waits; None: it starts now."""
        until_us = self._decide(place, now_us)
        if until_us is None:
            self._until_us = 0.0
        return until_us

    def _decide(self, place: int, now_us: float) -> float | None:
        places, lone = self._places, self._decider.lone
        lookahead = self._decider.lookahead(place)
        if lone is None or lookahead is None or not lookahead.cap:
            return None
        if places.draft_id[place] == NO_DRAFT:
            return None
        chain_fits = places.arrived_chain[place] == places.chain[place]
        committed = int(places.committed[place])
        have = max(0, int(places.arrived[place]) - committed) if chain_fits else 0
        if self._until_us:
            if have > self._have:
                lone.record_wait(hit=True)
            elif now_us >= self._until_us:
                lone.record_wait(hit=False)
                return None
        end_len = int(places.end_len[place])
        limit = min(committed + int(places.credit[place]), end_len - 1)
        want = min(lookahead.cap, limit - committed)
        # Nothing here after a flush: the draft must hear our last verdict before it can go on.
        is_flushed = not chain_fits or int(places.arrived[place]) < committed
        is_due = is_flushed and have == 0
        ready_us = float(places.last_us[place])
        arrived_us = float(places.last_draft_us[place])
        since_us = ready_us if is_due else arrived_us or ready_us
        outlook = WindowOutlook(have, want, int(since_us), is_due)
        rate, survivals = lookahead.posterior.rate, lookahead.survivals
        until = lone.wait_until(outlook, rate, int(now_us), survivals)
        until_us = min(float(until), ready_us + lone.max_wait_us)
        if until_us <= now_us:
            return None
        self._until_us, self._have = until_us, have
        return until_us
