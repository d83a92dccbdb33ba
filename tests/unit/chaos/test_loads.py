"""What the scenarios with a load of their own compare and judge."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chaos import alone, cpu, drafts_dead, run, traffic
from chaos.drafts_dead import Block, Pair
from chaos.overload import Phase, _judge, body
from paceline.config import ModelConfig

TIMED = ModelConfig(source="timed", toy_step_ms=5000.0)


def test_texts_of_one_engine_depend_on_the_request_alone() -> None:
    requests = [body(1, index) for index in range(3)]
    whole = alone.references(TIMED, requests)
    assert [len(outcome.texts) for outcome in whole] == [1, 1, 1]
    assert alone.references(TIMED, requests[2:])[0].texts == whole[2].texts
    assert len({outcome.texts[0] for outcome in whole}) == 3
    assert all(outcome.is_done for outcome in whole)


def test_cores_in_use() -> None:
    earlier = cpu.Reading(at_s=10.0, machine_s=100.0, own_s=50.0)
    later = cpu.Reading(at_s=14.0, machine_s=106.0, own_s=52.0)
    assert earlier.until(later) == f"0.5 of {cpu.NUM_CORES} cores (with others 1.5)"


# -- drafts_dead --------------------------------------------------------------------------------


def pairs(ratios: Sequence[float], accepted: int) -> list[Pair]:
    def block(seconds: float, num_accepted: int) -> Block:
        outcome = traffic.Outcome(
            traffic.Request(0, "", {}), is_done=True, num_tokens=10, num_accepted=num_accepted
        )
        return Block([outcome], seconds)

    return [Pair(block(1.0 / ratio, accepted), block(1.0, 0)) for ratio in ratios]


BEFORE = pairs((2.0, 2.1, 2.05), 5)
DEAD = pairs((1.0, 0.9, 0.98), 0)


def verdict(before: list[Pair], dead: list[Pair], back: list[Pair]) -> list[str]:
    result = run.Result("drafts_dead", 1, "")
    drafts_dead._compare(result, before, dead, back)
    return result.violations


def test_drafts_that_die_and_return() -> None:
    assert verdict(BEFORE, DEAD, pairs((1.9, 2.0, 1.5), 5)) == []


@pytest.mark.parametrize(
    ("dead", "back", "said"),
    [
        (
            pairs((0.96, 0.955, 0.96), 0),
            BEFORE,
            "with dead drafts 0.960 of the speed without drafts",
        ),
        (pairs((1.0, 1.0), 1), BEFORE, "proposals were accepted although all drafts were dead"),
        (DEAD, pairs((1.8, 1.8, 2.0), 5), "speed did not return: 0.878 of what it was"),
        (DEAD, pairs((2.0, 2.0, 2.0), 4), "acceptance did not return"),
    ],
)
def test_drafts_that_do_not(dead: list[Pair], back: list[Pair], said: str) -> None:
    assert verdict(BEFORE, dead, back) == [said]


def test_healthy_blocks_that_differ_cannot_judge_closely() -> None:
    assert verdict(pairs((2.0, 2.4, 2.0), 5), DEAD, pairs((1.7, 1.7, 1.7), 5)) == []


def test_the_error_of_a_median() -> None:
    assert drafts_dead.error([1.0, 1.0, 1.0, 1.0]) == 0.0
    assert drafts_dead.error([0.9, 1.0, 1.1, 1.2]) == pytest.approx(1.85 * 0.1 / 2)
    assert verdict(BEFORE, pairs((0.96, 0.9, 1.0), 0), BEFORE) == []  # too few to tell


# -- overload -----------------------------------------------------------------------------------


def phase(
    goodput: float, refusal_s: float = 0.01, retry_after: str = "1", cheapest_s: float = 0.01
) -> Phase:
    done = traffic.Outcome(body(1, 0), is_done=True, ended_s=2.0)
    refused = traffic.Outcome(
        body(1, 1),
        status=429,
        error="too_many_requests",
        retry_after=retry_after,
        ended_s=refusal_s,
    )
    return Phase([done, refused], goodput, 1.0, "", [cheapest_s])


@pytest.mark.parametrize(
    ("flood", "said"),
    [
        (phase(91.0), []),
        (phase(89.0), []),  # the peaks themselves differ by 2 % from their mean
        (phase(87.0), ["goodput fell to 0.87 of the peak"]),
        (phase(91.0, refusal_s=0.3), ["refusals take 0.30 s"]),
        (phase(91.0, refusal_s=0.3, cheapest_s=0.2), []),
        (phase(91.0, refusal_s=0.5, cheapest_s=0.2), ["refusals take 0.50 s"]),
        (phase(91.0, retry_after=""), ["1 refusals without 429/503 and Retry-After"]),
    ],
)
def test_a_flood(flood: Phase, said: list[str]) -> None:
    result = run.Result("overload", 1, "")
    _judge(result, [phase(98.0), phase(102.0)], flood, [o for o in flood.outcomes if o.has_failed])
    assert result.violations == said


def test_a_flood_that_is_none() -> None:
    result = run.Result("overload", 1, "")
    _judge(result, [phase(100.0), phase(100.0)], phase(100.0), [])
    assert result.violations == ["nothing was refused: no overload"]
