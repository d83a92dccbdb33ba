"""The table of a link's states: every pair of state and event, legal or not."""

import pytest

from paceline.errors import LocalProtocolError
from paceline.protocol.link import TRANSITIONS, LinkEvent, LinkState, next_state

LOST, OPENING = LinkState.LOST, LinkState.OPENING
STREAMING, CLOSED = LinkState.STREAMING, LinkState.CLOSED

# Written out by hand from the design: OPENING -> STREAMING -> LOST -> OPENING, any -> CLOSED.
LEGAL = {
    (LOST, LinkEvent.REOPEN): OPENING,
    (LOST, LinkEvent.CLOSE): CLOSED,
    (OPENING, LinkEvent.ACCEPTED): STREAMING,
    (OPENING, LinkEvent.REFUSED): LOST,
    (OPENING, LinkEvent.OPEN_TIMEOUT): LOST,
    (OPENING, LinkEvent.PEER_LOST): LOST,
    (OPENING, LinkEvent.CLOSE): CLOSED,
    (STREAMING, LinkEvent.PEER_LOST): LOST,
    (STREAMING, LinkEvent.CLOSE): CLOSED,
}
ALL = [(state, event) for state in LinkState for event in LinkEvent]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair in LEGAL])
def test_legal_moves(state, event):
    assert next_state(state, event) is LEGAL[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair not in LEGAL])
def test_illegal_moves_are_our_bug(state, event):
    with pytest.raises(LocalProtocolError) as caught:
        next_state(state, event)
    assert str(caught.value) == f"link cannot take {event} in state {state}"
    assert caught.value.__cause__ is None


def test_the_table_holds_no_other_move():
    assert TRANSITIONS == LEGAL


def test_nothing_leaves_closed():
    assert not [state for state, _ in TRANSITIONS if state is CLOSED]


def test_every_state_can_be_left_for_closed_and_reached():
    assert {s for s, e in TRANSITIONS if e is LinkEvent.CLOSE} == set(LinkState) - {CLOSED}
    assert set(TRANSITIONS.values()) == set(LinkState)
