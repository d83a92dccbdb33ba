"""A breaker per draft: the table, how long it stays dark, who may probe, what is remembered."""

import pytest

from paceline.config import RpcConfig
from paceline.errors import LocalProtocolError
from paceline.target import breaker as module
from paceline.target.breaker import (
    TRANSITIONS,
    Breaker,
    BreakerEvent,
    Breakers,
    BreakerState,
    next_state,
)

SECOND = 1_000_000
CONFIG = RpcConfig(breaker_failures=3, breaker_min_s=1, breaker_max_s=8)
CLOSED, DARK, PROBING = BreakerState


@pytest.fixture
def breaker():
    return Breaker(CONFIG)


@pytest.fixture
def dark():
    """Dark from 0 until second 1."""
    made = Breaker(CONFIG)
    made.trip(0)
    return made


class TestTable:
    @pytest.mark.parametrize("state", BreakerState)
    @pytest.mark.parametrize("event", BreakerEvent)
    def test_a_move_is_in_the_table_or_our_bug(self, state, event):
        if (state, event) in TRANSITIONS:
            assert next_state(state, event) in BreakerState
            return
        with pytest.raises(LocalProtocolError, match=f"cannot take {event} in state {state}"):
            next_state(state, event)

    def test_only_a_probe_leads_out_of_the_dark(self):
        assert {e for (s, e), after in TRANSITIONS.items() if s is DARK and after is not DARK} == {
            BreakerEvent.PROBE
        }


class TestTrip:
    def test_failures_in_a_row(self, breaker):
        assert [breaker.fail(1, now) for now in range(3)] == [False, False, True]
        assert breaker.state is DARK

    def test_a_kept_proposal_starts_the_count_anew(self, breaker):
        breaker.fail(1, 0)
        breaker.fail(2, 0)
        assert not breaker.keep(0)
        assert [breaker.fail(1, 1) for _ in range(3)] == [False, False, True]

    def test_failures_in_the_dark_are_no_news(self, dark):
        assert not any(dark.fail(number, SECOND // 2) for number in range(9))
        assert dark.may_open(SECOND)

    def test_a_broken_rule_in_the_dark_is(self, dark):
        dark.trip(SECOND // 2)
        assert not dark.may_open(SECOND // 2 + 2 * SECOND - 1)
        assert dark.may_open(SECOND // 2 + 2 * SECOND)


class TestProbe:
    def test_one_when_the_time_is_over(self, dark):
        assert not dark.may_open(SECOND - 1)
        assert dark.may_open(SECOND)
        assert dark.open(7)
        assert dark.state is PROBING
        assert not dark.may_open(100 * SECOND), "one is enough"

    def test_a_closed_one_needs_none(self, breaker):
        assert breaker.may_open(0)
        assert not breaker.open(7)
        assert breaker.state is CLOSED

    def test_kept(self, dark):
        dark.open(7)
        assert dark.keep(SECOND)
        assert dark.state is CLOSED
        assert not dark.fail(7, SECOND), "one failure is forgiven again"

    def test_an_old_sequences_proposal_does_as_well(self, dark):
        assert not dark.keep(0), "but not before the probe: it is dark for its time"
        assert dark.state is DARK
        dark.open(7)
        assert dark.keep(SECOND)

    def test_failed(self, dark):
        dark.open(7)
        assert dark.fail(7, 5 * SECOND)
        assert dark.state is DARK
        assert [dark.may_open(now * SECOND) for now in (6, 7)] == [False, True]

    def test_failures_of_others_say_nothing(self, dark):
        dark.open(7)
        assert not dark.fail(8, SECOND)
        assert dark.state is PROBING

    def test_the_loss_of_the_stream_does(self, dark):
        dark.open(7)
        assert dark.fail(None, SECOND)

    def test_abandoned(self, dark):
        dark.open(7)
        dark.release(8)
        assert dark.state is PROBING
        dark.release(7)
        assert dark.state is DARK
        assert dark.may_open(SECOND), "the next one may at once"

    def test_released_after_its_answer(self, dark):
        dark.open(7)
        dark.keep(SECOND)
        dark.release(7)
        assert dark.state is CLOSED


class TestPause:
    def pauses(self, breaker, count, now=0):
        out = []
        for _ in range(count):
            breaker.trip(now)
            start = now
            while not breaker.may_open(now):
                now += SECOND // 2
            out.append((now - start) // SECOND)
            breaker.open(1)
        return out

    def test_doubles_up_to_a_limit(self, breaker):
        assert self.pauses(breaker, 6) == [1, 2, 4, 8, 8, 8]

    @pytest.mark.parametrize(("healthy_s", "pause"), [(7, 4), (8, 1)])
    def test_goes_on_doubling_unless_it_was_well_for_long(self, breaker, healthy_s, pause):
        assert self.pauses(breaker, 2) == [1, 2]
        breaker.keep(3 * SECOND)
        assert self.pauses(breaker, 1, (3 + healthy_s) * SECOND) == [pause]


class TestBreakers:
    def test_the_same_for_the_same_replica(self):
        breakers = Breakers(CONFIG)
        first = breakers.get("a")
        assert breakers.get("b") is not first
        assert breakers.get("a") is first

    def test_bounded(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_BREAKERS", 3)
        breakers = Breakers(CONFIG)
        made = {name: breakers.get(name) for name in "abc"}
        breakers.get("a")
        breakers.get("d")
        assert len(breakers) == 3
        assert breakers.get("a") is made["a"]
        assert breakers.get("c") is made["c"]
        assert breakers.get("b") is not made["b"], "the one asked for longest ago"
