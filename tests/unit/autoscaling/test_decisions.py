"""When a need is followed: bounds, headroom, silence, replicas that start, memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.autoscaling.demand import Demand, Knobs
from paceline.autoscaling.policy import Memory, decide
from tests.unit.autoscaling.contexts import Ctx

KNOBS = Knobs()
SETTLED = Memory(target=2, num_running=2, changed_at=100.0)


def decided(
    counted: float,
    measured: float = 0.0,
    memory: Memory = SETTLED,
    complete: bool = True,
    **ctx: Any,
) -> int:
    demand = Demand(0, {"counted": counted}, {"measured": measured})
    return decide(Ctx(**ctx), demand, complete, memory, KNOBS)[0]


class TestDecisions:
    @pytest.mark.parametrize(
        ("needed", "number"),
        [(0, 0), (0.8, 1), (0.81, 2), (1.6, 2), (2.0, 2), (2.2, 2), (2.21, 3), (9, 9), (90, 10)],
    )
    def test_nothing_changes_between_full_use_and_some_headroom(
        self, needed: float, number: int
    ) -> None:
        assert decided(needed) == decided(0, needed) == number

    def test_at_least_is_enough(self) -> None:
        demand = Demand(1, {}, {"busy": 0.1})
        assert decide(Ctx(), demand, True, SETTLED, KNOBS)[0] == 1

    def test_bounds(self) -> None:
        assert decided(0, capacity_adjusted_min_replicas=2) == 2
        assert decided(5, capacity_adjusted_max_replicas=3) == 3

    def test_silence_of_a_replica_takes_none_away(self) -> None:
        assert decided(0, complete=False) == 2
        assert decided(5, complete=False) == 5

    def test_while_replicas_start_only_numbers_of_requests_add_more(self) -> None:
        starting = {"target_num_replicas": 3, "current_num_replicas": 2}
        assert decided(0, 9, **starting) == 3
        assert decided(9, 0, **starting) == 9
        assert decided(1, 1, **starting) == 2, "one that finds no place is not waited for"

    def test_what_was_measured_before_the_last_change_counts_no_more(self) -> None:
        just = Memory(num_running=2, changed_at=996.0)
        assert decided(0, 9, just) == 2
        assert decided(0, 0, just) == 2
        assert decided(9, 0, just) == 9
        assert decided(0, 9, replace(just, changed_at=995.0)) == 9
        assert decided(0, 9, Memory(num_running=1, changed_at=0.0)) == 2, "it has just changed"
        assert decided(0, 9, replace(just, changed_at=5000.0)) == 9, "the clock was set back"

    def test_a_quiet_moment_does_not_take_a_wish_back(self) -> None:
        wished = replace(SETTLED, wish=5.0, wished_at=999.0)
        assert decided(2, 0, wished) == 5
        assert decided(2, 0, replace(wished, wished_at=998.0)) == 2
        assert decided(6, 0, wished) == 6
        _, memory = decide(Ctx(), Demand(0, {"x": 7.0}, {}), True, SETTLED, KNOBS)
        assert (memory.wish, memory.wished_at) == (7.0, 1000.0)

    def test_what_a_replica_was_added_for_keeps_it(self) -> None:
        """With it nobody is crowded any more; without it they would be again."""
        crowded = Demand(0, {}, {"starvation": 3.0}, num_sequences=8.0, is_crowded=True)
        _, wished = decide(Ctx(), crowded, True, SETTLED, KNOBS)
        three = {"target_num_replicas": 3, "current_num_replicas": 3}
        _, added = decide(Ctx(**three), crowded, True, wished, KNOBS)
        later = replace(added, changed_at=0.0, wish=0.0)

        def number(num_sequences: float, now_s: float) -> int:
            relaxed = Demand(0, {}, {"busy": 0.5}, num_sequences)
            return decide(Ctx(**three, current_time=now_s), relaxed, True, later, KNOBS)[0]

        assert number(8, 1010.0) == 3
        assert number(6.5, 1010.0) == 3
        assert number(6.4, 1010.0) == 2, "4 per replica were too many, 3.2 will do"
        assert number(3.2, 1010.0) == 1
        assert number(8, 1601.0) == 1, "forgotten"
        _, not_obeyed = decide(Ctx(), crowded, True, wished, KNOBS)
        assert not_obeyed.crowd == 0

    def test_from_none_to_the_first(self) -> None:
        """Serve obeys at once when nothing runs, so every further one would skip its delay."""
        none = {"current_num_replicas": 0, "memory": Memory(num_running=0)}
        assert decided(9, target_num_replicas=0, **none) == 1
        assert decided(9, target_num_replicas=1, **none) == 1
        assert decided(0, target_num_replicas=0, **none) == 0

    def test_memory_survives_serve_and_garbage_does_not(self) -> None:
        memory = Memory(*range(10))
        assert Memory.of(memory.state()) == memory
        garbage = {"num_running": "x", "wish": math.nan, "other": 1, "decision_counter": 3}
        assert Memory.of(garbage) == Memory()
