"""Which tries a request gets, and that what passes through all of them is one undisturbed text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import OverloadedError, RequestError
from paceline.gateway.failover import MAX_SUSPECT_RETRIES_IN_ALL, MAX_TRIES, Failover, Try
from paceline.generation import GenerateRequest, Resumption, RoundDelta, TokenOrigin
from paceline.sampling.params import SamplingParams


def error_of(code: str) -> RequestError:
    return RequestError("gone", None, code, 503, 1)


LOST, DIED, BROKEN = (error_of(code) for code in ("target_lost", "target_died", "engine_broken"))
FULL = OverloadedError("full", None, "queue_full", 429, 1)


def request_of(n: int = 1, max_tokens: int = 20) -> GenerateRequest:
    return GenerateRequest("id", (1, 2), max_tokens, SamplingParams(), n=n)


def delta_of(*token_ids: int, number: int = 0, choice: int = 0, ends: bool = False) -> RoundDelta:
    return RoundDelta(
        number,
        token_ids,
        (TokenOrigin.PLAIN,) * len(token_ids),
        choice=choice,
        finish_reason="length" if ends else None,
    )


def try_after(failover: Failover, error: RequestError = LOST) -> Try:
    attempt = failover.next_try(error)
    assert attempt is not None
    return attempt


def test_a_request_without_a_token_is_sent_again_as_it_was() -> None:
    request = request_of()
    failover = Failover(request, 3)
    failover.receive(delta_of())
    assert try_after(failover) == Try(replace(request, request_id="id~1"), 0.0)
    assert try_after(failover) == Try(replace(request, request_id="id~2"), 0.1)
    failover.receive(delta_of(5))
    resumed = replace(request, request_id="id~3", resumption=Resumption(3, ((5,),)))
    assert try_after(failover) == Try(resumed, 0.0)


def test_outputs_of_all_tries_add_up() -> None:
    failover = Failover(request_of(n=3), 2)
    for delta in (delta_of(5, 6), delta_of(7, choice=2), delta_of(8, number=1)):
        assert failover.receive(delta) is delta
    first = try_after(failover).request
    assert first.resumption == Resumption(1, ((5, 6, 8), (), (7,)))
    # The rounds of the next target count from 0 again; the client sees them go on.
    assert failover.receive(delta_of(9)) == delta_of(9, number=2)
    assert failover.receive(delta_of(10, choice=1)) == delta_of(10, choice=1)
    assert failover.receive(delta_of(11, number=1)) == delta_of(11, number=3)
    second = try_after(failover).request
    assert second.resumption == Resumption(2, ((5, 6, 8, 9, 11), (10,), (7,)))
    assert (first.request_id, second.request_id) == ("id~1", "id~2")
    assert failover.receive(delta_of(12, choice=2)) == delta_of(12, number=1, choice=2)


def test_ended_choices_are_not_run_again() -> None:
    failover = Failover(request_of(n=3), 2)
    failover.receive(delta_of(5, ends=True))
    failover.receive(delta_of(6, choice=1))
    failover.end_choice(1)
    # What the target sends before it hears of the end changes nothing, and is no progress.
    assert try_after(failover).pause_s == 0.0
    failover.receive(delta_of(7, choice=1, number=1))
    attempt = try_after(failover)
    assert attempt.pause_s == 0.1
    assert attempt.request.resumption == Resumption(2, (None, None, ()))
    failover.end_choice(2)
    assert failover.next_try(LOST) is None


@pytest.mark.parametrize(
    ("max_retries", "pauses"),
    [(0, []), (1, [0.0]), (2, [0.0, 0.1]), (6, [0.0, 0.1, 0.3, 1.0, 1.0, 1.0])],
)
@pytest.mark.parametrize("has_begun", [False, True])
def test_tries_without_a_token_end(max_retries: int, pauses: list[float], has_begun: bool) -> None:
    failover = Failover(request_of(), max_retries)
    if has_begun:
        failover.receive(delta_of(5))
    assert [try_after(failover).pause_s for _ in pauses] == pauses
    assert failover.next_try(LOST) is None


def test_a_token_of_any_choice_is_progress_and_an_empty_round_is_none() -> None:
    failover = Failover(request_of(n=2), 1)
    for choice in (0, 1, 0):
        assert try_after(failover).pause_s == 0.0
        failover.receive(delta_of(5, choice=choice))
    try_after(failover)
    failover.receive(delta_of())
    assert failover.next_try(LOST) is None


@pytest.mark.parametrize("first", [DIED, BROKEN])
@pytest.mark.parametrize("last", [DIED, BROKEN])
@pytest.mark.parametrize("num_lost", [0, 1, 2])
def test_no_more_than_two_targets_die_of_it(
    first: RequestError, last: RequestError, num_lost: int
) -> None:
    """Who was merely on a target that is lost cannot have broken it: those tries do not count."""
    failover = Failover(request_of(), 10)
    failover.receive(delta_of(5))
    try_after(failover, first)
    for _ in range(num_lost):
        try_after(failover)
    assert failover.next_try(last) is None


def test_progress_forgives_a_dead_target() -> None:
    failover = Failover(request_of(), 2)
    for token_id in range(3):
        try_after(failover, DIED)
        failover.receive(delta_of(token_id))
    try_after(failover, BROKEN)
    assert failover.next_try(DIED) is None


def test_all_tries_together_end_too() -> None:
    failover = Failover(request_of(), 10)
    for token_id in range(MAX_TRIES - 1):
        failover.receive(delta_of(token_id))
        try_after(failover)
    failover.receive(delta_of(99))
    assert failover.next_try(LOST) is None


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no", "prompt", "x", 400),
        RequestError("down", None, "engine_error", 500),
        RequestError("aborted", None, "aborted", 499),
    ],
)
def test_other_errors_are_the_clients(error: RequestError) -> None:
    failover = Failover(request_of(), 2)
    assert failover.next_try(error) is None
    failover.receive(delta_of(5))
    assert failover.next_try(error) is None


def test_a_full_target_refuses_only_who_has_nothing_yet() -> None:
    """A client that has begun to read cannot come back later; one that has nothing can."""
    assert Failover(request_of(), 2).next_try(FULL) is None
    failover = Failover(request_of(), 2)
    failover.receive(delta_of(5))
    assert try_after(failover, LOST).pause_s == 0.0
    assert try_after(failover, FULL).pause_s == 0.1
    assert failover.next_try(FULL) is None
    # Nor is it a refusal once the try has brought something.
    failover = Failover(request_of(), 2)
    failover.receive(delta_of(5))
    assert failover.next_try(FULL) is None


# A target's law: choice i of a request is this text, whoever writes it from wherever.
texts = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=12), min_size=1, max_size=3)


def written_by_target(
    request: GenerateRequest, whole: list[list[int]], sizes: list[int], order: list[int]
) -> Iterator[RoundDelta]:
    """One try to its end: rounds of these sizes, choices in this order of turns."""
    done: dict[int, int] = {}
    for choice in range(request.n):
        output = request.resumption.outputs[choice] if request.resumption else ()
        if output is not None:
            assert list(output) == whole[choice][: len(output)]
            done[choice] = len(output)
    rounds = dict.fromkeys(done, 0)
    turn = 0
    while done:
        choice = sorted(done)[order[turn % len(order)] % len(done)]
        start, end = done[choice], done[choice] + sizes[turn % len(sizes)]
        ends = end >= len(whole[choice])
        yield delta_of(*whole[choice][start:end], number=rounds[choice], choice=choice, ends=ends)
        rounds[choice] += 1
        turn += 1
        if ends:
            del done[choice]
        else:
            done[choice] = end


@given(
    whole=texts,
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    order=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 8), max_size=6),
    errors=st.lists(st.sampled_from([LOST, DIED, BROKEN]), min_size=6, max_size=6),
)
def test_every_token_once_whatever_is_lost(
    whole: list[list[int]],
    sizes: list[int],
    order: list[int],
    cuts: list[int],
    errors: list[RequestError],
) -> None:
    """Each cut is how many rounds of that try arrive; the try after the last cut runs to its end.

    Where there are too many failures without a token, the client has a beginning of its text.
    """
    request = request_of(len(whole))
    failover = Failover(request, 6)
    seen: list[list[int]] = [[] for _ in whole]
    numbers: list[list[int]] = [[] for _ in whole]
    names = []
    gave_up = False
    limits: list[int | None] = [*cuts, None]
    for number, limit in enumerate(limits):
        names.append(request.request_id)
        for index, delta in enumerate(written_by_target(request, whole, sizes, order)):
            if index == limit:
                break
            shown = failover.receive(delta)
            seen[shown.choice] += shown.token_ids
            numbers[shown.choice].append(shown.round)
        if limit is None or seen == whole:
            break
        attempt = failover.next_try(errors[number])
        if attempt is None:
            gave_up = True
            break
        request = attempt.request
    assert numbers == [list(range(len(rounds))) for rounds in numbers]
    assert len(set(names)) == len(names) <= MAX_TRIES
    for got, wanted in zip(seen, whole, strict=True):
        assert got == wanted[: len(got)]
    assert gave_up or seen == whole
    if all(errors[number] is LOST for number in range(len(cuts))):
        assert seen == whole


@pytest.mark.parametrize("refusal", [FULL, error_of("queue_timeout")])
def test_a_full_target_does_not_end_a_stream_that_has_begun(refusal: RequestError) -> None:
    failover = Failover(request_of(), 2)
    failover.receive(delta_of(5))
    assert failover.next_try(LOST) is not None
    assert try_after(failover, refusal).request.resumption == Resumption(2, ((5,),))
    fresh = Failover(request_of(), 2)
    assert fresh.next_try(refusal) is None


def test_a_request_that_writes_and_kills_in_turn_is_stopped() -> None:
    failover = Failover(request_of(), 10)
    num_killed = 0
    while num_killed < MAX_TRIES:
        failover.receive(delta_of(5))
        num_killed += 1
        if failover.next_try(DIED) is None:
            break
    assert num_killed == MAX_SUSPECT_RETRIES_IN_ALL + 1
