"""Spans as a request: rounds, their times, whose they are, and what is said of gaps."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.cli import trace_builder
from paceline.cli.trace_builder import request_of
from paceline.cli.trace_lanes import MAX_LANE_ROWS, lanes_of
from paceline.cli.trace_model import Request, Round, request_json
from paceline.cli.trace_page import page
from paceline.cli.trace_spans import MAX_COUNT, Span, spans_of
from paceline.cli.trace_view import show_request
from paceline.round_times import STAGE_OF_SPAN, Stage
from tests.unit.cli.trace_lines import CLIENT_SPAN, TRACE_ID, Made, line_of, make_trace

KEYS = (
    *("round", "wall_ms", "draft_ms", "wire_out_ms", "window_ms", "queue_ms", "verify_ms"),
    *("sample_ms", "wire_back_ms", "rewind_ms", "source", "proposed", "accepted"),
)
TIMES = KEYS[2:10]


def spans_in(made: Made) -> list[Span]:
    return [span for _, line in made.lines() for span in spans_of(line.encode())[0]]


def read(made: Made) -> Request:
    found = request_of(spans_in(made))
    assert found is not None
    return found


def one_round(*parts: tuple[str, float, float], begins: float = 10.0, **given: Any) -> Request:
    """A request from 0 to 60 ms with one round from `begins` to 50, made of `parts`."""
    made = Made()
    gateway = made.span("gateway", "chat toy", CLIENT_SPAN, 0, 60, kind=2)
    session = made.span("target", "session", gateway, begins, 50, paceline__choice=0)
    whole = {"paceline__round": 1, "paceline__k": 4, "paceline__proposed": 4}
    span = made.span("target", "round", session, begins, 50, **(whole | given))
    for name, began, ended in parts:
        made.span("target", name, span, began, ended)
    return read(made)


def times(item: Round) -> dict[str, float]:
    return {stage.span_name: item.ms(stage) for stage in STAGE_OF_SPAN.values() if item.ms(stage)}


def test_json_is_exactly_what_was_agreed() -> None:
    request = one_round(
        ("wire_back", 10, 11), ("rewind", 11, 13), ("draft", 13, 20), ("wire_out", 20, 24),
        ("window", 24, 25), ("queue", 25, 27), ("verify", 27, 49), ("sample", 49, 50),
        paceline__accepted=3,
    )  # fmt: skip
    assert request_json(request, request.rounds) == {
        "trace_id": TRACE_ID,
        "request_ms": 60.0,
        "rounds": [
            {
                "round": 1,
                "wall_ms": 50.0,
                "draft_ms": 7.0,
                "wire_out_ms": 4.0,
                "window_ms": 1.0,
                "queue_ms": 12.0,
                "verify_ms": 22.0,
                "sample_ms": 1.0,
                "wire_back_ms": 1.0,
                "rewind_ms": 2.0,
                "source": "",
                "proposed": 4,
                "accepted": 3,
            }
        ],
    }
    assert tuple(request_json(request, request.rounds)["rounds"][0]) == KEYS


def test_what_is_before_the_target_is_queue() -> None:
    request = one_round(("verify", 10, 50))
    assert times(request.rounds[0]) == {"queue": 10.0, "verify": 40.0}
    assert request.rounds[0].wall_ms == 50.0


def test_overlap_belongs_to_the_later_stage_and_gaps_to_the_window() -> None:
    request = one_round(
        ("draft", 12, 30), ("draft", 20, 45), ("wire_out", 28, 32), ("verify", 40, 60)
    )
    found = times(request.rounds[0])
    assert found == {"queue": 10, "window": 2, "draft": 24, "wire_out": 4, "verify": 10}
    assert sum(found.values()) == request.rounds[0].wall_ms


@pytest.mark.parametrize("num_choices", [1, 3])
def test_the_eight_add_up_to_the_round_and_the_rounds_to_the_request(num_choices: int) -> None:
    request = read(make_trace(num_rounds=20, num_choices=num_choices))
    data = request_json(request, request.rounds)
    assert len(data["rounds"]) == 20 * num_choices
    for item in data["rounds"]:
        assert sum(item[name] for name in TIMES) == pytest.approx(item["wall_ms"], abs=1e-6)
    for choice in range(num_choices):
        rounds = [item for item in data["rounds"] if item.get("choice", 0) == choice]
        assert [item["round"] for item in rounds] == list(range(1, 21))
        total = sum(item["wall_ms"] for item in rounds)
        assert total == pytest.approx(data["request_ms"], rel=0.05)
    assert not request.problems


def test_choices_are_told_apart_only_when_there_are_several() -> None:
    request = read(make_trace(num_rounds=3, num_choices=2))
    rounds = request_json(request, request.rounds)["rounds"]
    assert sorted((item["choice"], item["round"]) for item in rounds) == [
        (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3),
    ]  # fmt: skip
    begins = [item.began_ns for item in request.rounds]
    assert begins == sorted(begins)
    alone = read(make_trace(num_rounds=3))
    assert all("choice" not in item for item in request_json(alone, alone.rounds)["rounds"])


def test_a_draft_that_goes_on_into_the_next_round_counts_there_too() -> None:
    made = Made()
    gateway = made.span("gateway", "chat toy", CLIENT_SPAN, 0, 60, kind=2)
    session = made.span("target", "session", gateway, 0, 60)
    first = made.span("target", "round", session, 0, 20, paceline__round=1)
    second = made.span("target", "round", session, 20, 50, paceline__round=2)
    made.span("target", "round", session, 50, 60, paceline__round=3)
    made.span("target", "verify", first, 0, 20)
    made.span("draft", "draft", first, 15, 28)
    made.span("target", "verify", second, 30, 55)
    request = read(made)
    assert [times(item) for item in request.rounds] == [
        {"verify": 20.0},
        {"draft": 8.0, "window": 2.0, "verify": 20.0},
        {"verify": 5.0, "window": 5.0},
    ]
    [lane] = [lane for lane in lanes_of(request, request.rounds) if lane.name == "draft"]
    assert len(lane.blocks) == 1


def test_a_choice_that_went_on_at_another_target() -> None:
    made = Made()
    gateway = made.span("gateway", "chat toy", CLIENT_SPAN, 0, 100, kind=2)
    for begins in (5, 60):
        session = made.span("target", "session", gateway, begins, begins + 35)
        span = made.span("target", "round", session, begins, begins + 35, paceline__round=1)
        made.span("target", "verify", span, begins, begins + 35)
    request = read(made)
    assert [times(item) for item in request.rounds] == [
        {"queue": 5.0, "verify": 35.0},
        {"queue": 20.0, "verify": 35.0},
    ]
    assert not request.problems


def test_rounds_that_nobody_kept_are_no_wait() -> None:
    """A target keeps only the last rounds of a request that is not sampled."""
    made = make_trace(num_rounds=6)
    target = made.spans["paceline-target"]
    for gone in [span for span in target if span["name"] == "round"][:3]:
        target.remove(gone)
        for spans in made.spans.values():
            spans[:] = [span for span in spans if span["parentSpanId"] != gone["spanId"]]
    whole, request = read(make_trace(num_rounds=6)), read(made)
    assert [item.times for item in request.rounds] == [item.times for item in whole.rounds[3:]]
    assert request.problems == (
        "3 rounds are in no file: of a request that only turned out to be slow the last ones "
        "are kept",
    )


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"paceline__accepted": 4, "paceline__num_tokens": 5}, "bonus"),
        ({"paceline__accepted": 2, "paceline__num_tokens": 3}, "recovered"),
        ({"paceline__proposed": 0, "paceline__num_tokens": 1}, "plain"),
        ({"paceline__accepted": 3, "paceline__num_tokens": 3}, ""),
        # A tree, followed to a leaf.
        (
            {
                "paceline__accepted": 2,
                "paceline__num_tokens": 3,
                "paceline__own_token": "bonus",
            },
            "bonus",
        ),
        (
            {
                "paceline__accepted": 4,
                "paceline__num_tokens": 5,
                "paceline__own_token": "<b>",
            },
            "bonus",
        ),
    ],
)
def test_what_became_of_the_tokens(given: dict[str, Any], own: str) -> None:
    [item] = one_round(**given).rounds
    accepted, proposed = given.get("paceline__accepted", 0), given.get("paceline__proposed", 4)
    kinds = ["accepted"] * accepted + ["rejected"] * (proposed - accepted) + [own] * bool(own)
    assert item.tokens(16) == kinds
    assert item.tokens(2) == kinds[:2]
    assert item.own_token == own


def test_absurd_counts_cost_nothing() -> None:
    [item] = one_round(
        paceline__proposed=10**30, paceline__accepted=10**18, paceline__num_tokens=-3
    ).rounds
    assert item.num_tokens == 0
    # More than 20 digits are no number of OTLP's.
    assert item.proposed == 0
    [item] = one_round(paceline__proposed=10**19, paceline__accepted=10**19).rounds
    assert item.proposed == item.accepted == MAX_COUNT
    assert len(item.tokens(16)) == 16


def test_two_requests_of_two_clients_are_no_orphans() -> None:
    """A conversation in one trace: each request has a parent of its own, in nobody's file."""
    first, second = make_trace(num_rounds=2), make_trace(num_rounds=2, seed=2, began_ms=1.9e12)
    second.spans["paceline-gateway"][0]["parentSpanId"] = "1" * 16
    request = request_of([*spans_in(first), *spans_in(second)])
    assert request is not None
    assert len(request.problems) == 1
    assert "2 requests" in request.problems[0]


def test_a_gateway_whose_clock_is_behind() -> None:
    """Its span ends before its session does; it is the same request all the same."""
    made = make_trace(num_rounds=3)
    span = made.spans["paceline-gateway"][0]
    for name in ("startTimeUnixNano", "endTimeUnixNano"):
        span[name] = str(int(span[name]) - 50_000_000)
    request = read(made)
    assert request.ms == read(make_trace(num_rounds=3)).ms
    assert request.rounds[0].ms(Stage.QUEUE) > 50
    assert not request.problems


def test_the_newest_request_of_a_trace_with_several() -> None:
    spans = [
        *spans_in(make_trace(num_rounds=2, seed=1)),
        *spans_in(make_trace(num_rounds=3, seed=2, began_ms=1_800_000_000_000.0)),
    ]
    request = request_of(spans)
    assert request is not None
    assert len(request.rounds) == 3
    assert request.problems == ("the trace has 2 requests; this is the one that ended last",)


def without(made: Made, name: str) -> Made:
    for service, spans in made.spans.items():
        made.spans[service] = [span for span in spans if span["name"] != name]
    return made


def test_without_the_gateway_the_request_is_its_sessions() -> None:
    made = make_trace(num_rounds=3, num_choices=2)
    del made.spans["paceline-gateway"]
    request = read(made)
    assert len(request.rounds) == 6
    assert [problem.split(":")[0] for problem in request.problems] == [
        "no file has the gateway's span"
    ]
    assert request.ms < read(make_trace(num_rounds=3, num_choices=2)).ms


def test_rounds_without_their_session_are_still_the_requests() -> None:
    """As after a target that was killed: its rounds were written, its session never ended."""
    request = read(without(make_trace(num_rounds=4), "session"))
    assert [item.number for item in request.rounds] == [1, 2, 3, 4]
    assert request.problems == (
        "no file has a session of the request",
        "4 spans name a parent that no file has (round): "
        "a process is missing, or has not written it yet",
    )


def test_drafts_without_their_round_are_counted() -> None:
    made = make_trace(num_rounds=4)
    lost = made.spans["paceline-target"]
    gone = [span for span in lost if span["name"] == "round"][-1]
    lost.remove(gone)
    num_lost = sum(span["parentSpanId"] == gone["spanId"] for span in made.all())
    request = read(made)
    assert len(request.rounds) == 3
    [problem] = request.problems
    assert problem.startswith(f"{num_lost} spans name a parent that no file has (draft, ")


def test_unknown_spans_are_left_alone() -> None:
    made = make_trace(num_rounds=3)
    before = request_json(read(made), read(made).rounds)
    rounds = made.named("round")
    made.span("target", "engine.pass", rounds[0]["spanId"], 0, 500)
    made.span("gateway", "POST", rounds[1]["parentSpanId"], 0, 500)
    assert request_json(read(made), read(made).rounds) == before


def test_no_request() -> None:
    made = make_trace(num_rounds=2)
    assert request_of([]) is None
    assert request_of([span for span in spans_in(made) if span.name == "round"]) is None


def test_parents_in_a_circle() -> None:
    made = Made()
    made.span("target", "session", f"{2:016x}", 0, 10)
    made.span("target", "session", f"{1:016x}", 0, 9)
    assert not read(made).rounds


def test_spans_of_a_round_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_builder, "MAX_PARTS", 3)
    parts = [("draft", float(at), at + 1.0) for at in range(20, 25)]
    request = one_round(*parts)
    assert request.problems == ("of round 1 only the first 3 spans are shown",)
    assert request.rounds[0].ms(Stage.DRAFT) == 3.0


def test_blocks_that_overlap_have_rows_of_their_own() -> None:
    parts = [("wire_out", 12.0 + at, 30.0) for at in range(MAX_LANE_ROWS + 2)]
    request = one_round(*parts, ("wire_back", 31, 32))
    [wire] = [lane for lane in lanes_of(request, request.rounds) if lane.name == "wire"]
    assert wire.num_rows == MAX_LANE_ROWS
    assert [block.row for block in wire.blocks] == [0, 1, 2, 3, 3, 3, 0]


# ---------------------------------------------------------------------------------- any spans


def any_spans() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Few ids, so that parents are found, missing, or go in circles."""
    names = st.sampled_from(["chat toy", "session", "round", *STAGE_OF_SPAN, "other"])
    ids = st.integers(1, 12).map(lambda number: f"{number:016x}")
    moments = st.integers(0, 50) | st.sampled_from([2**63, 2**64 - 1])

    def span(item: tuple[str, str, str, int, int, int, int]) -> dict[str, Any]:
        name, span_id, parent, kind, one, other, count = item
        keys = ("round", "proposed", "accepted", "num_tokens", "choice")
        return {
            "traceId": TRACE_ID, "spanId": span_id, "parentSpanId": parent, "name": name,
            "kind": kind, "startTimeUnixNano": str(min(one, other)),
            "endTimeUnixNano": str(max(one, other)),
            "attributes": [
                {"key": f"paceline.{key}", "value": {"intValue": str(count)}} for key in keys
            ],
        }  # fmt: skip

    counts = st.integers(-2, 5) | st.just(2**62)
    parts = st.tuples(names, ids, ids, st.integers(1, 2), moments, moments, counts)
    return st.lists(parts.map(span), max_size=40)


@given(any_spans(), st.sampled_from(["paceline-gateway", "paceline-target"]))
def test_whatever_the_spans_the_times_add_up(spans: list[dict[str, Any]], service: str) -> None:
    found, num_bad = spans_of(line_of(service, spans).encode())
    assert num_bad == 0
    request = request_of(found)
    if request is None:
        # Of several spans with one id the last counts.
        last = {span["spanId"]: span for span in spans}
        assert not any(is_root(list(last.values()), service))
        return
    assert request.ms >= 0
    for item in request.rounds:
        times_ns = [round(item.ms(stage) * 1e6) for stage in STAGE_OF_SPAN.values()]
        assert min(times_ns) >= 0
        assert sum(times_ns) == pytest.approx(item.ended_ns - item.began_ns)
    json.dumps(request_json(request, request.rounds), allow_nan=False)
    page(request, request.rounds)
    show_request(Console(file=io.StringIO()), request, request.rounds)


def is_root(spans: list[dict[str, Any]], service: str) -> Iterable[bool]:
    for span in spans:
        is_server = span["kind"] == 2 and service == "paceline-gateway"
        yield is_server or span["name"] == "session"
