"""States of one sequence's link to its draft, as a table. A move that is not here is our bug.

This file does not know which draft, which transport or what time it is.
"""

from __future__ import annotations

from enum import StrEnum

from paceline.errors import LocalProtocolError


class LinkState(StrEnum):
    LOST = "lost"  # no draft serves the sequence: every pass is a plain decode step
    OPENING = "opening"  # OpenSession sent, Opened not yet here
    STREAMING = "streaming"
    CLOSED = "closed"  # the sequence has ended


class LinkEvent(StrEnum):
    REOPEN = "reopen"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    OPEN_TIMEOUT = "open_timeout"
    PEER_LOST = "peer_lost"
    CLOSE = "close"


TRANSITIONS: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (LinkState.LOST, LinkEvent.REOPEN): LinkState.OPENING,
    (LinkState.OPENING, LinkEvent.ACCEPTED): LinkState.STREAMING,
    (LinkState.OPENING, LinkEvent.REFUSED): LinkState.LOST,
    (LinkState.OPENING, LinkEvent.OPEN_TIMEOUT): LinkState.LOST,
    (LinkState.OPENING, LinkEvent.PEER_LOST): LinkState.LOST,
    (LinkState.STREAMING, LinkEvent.PEER_LOST): LinkState.LOST,
    (LinkState.LOST, LinkEvent.CLOSE): LinkState.CLOSED,
    (LinkState.OPENING, LinkEvent.CLOSE): LinkState.CLOSED,
    (LinkState.STREAMING, LinkEvent.CLOSE): LinkState.CLOSED,
}


def next_state(state: LinkState, event: LinkEvent) -> LinkState:
    """The state after `event`. Raises `LocalProtocolError` for a move that is not in the table."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise LocalProtocolError(f"link cannot take {event} in state {state}") from None
