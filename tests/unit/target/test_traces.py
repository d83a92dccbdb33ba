"""Spans of a target from its rounds' records: bounded, linked, and only where somebody asked."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from paceline.errors import RequestError
from paceline.generation import GenerateRequest, Resumption, RoundDelta, TokenOrigin
from paceline.protocol.messages import DraftTokens
from paceline.sampling.params import SamplingParams
from paceline.target import endings
from paceline.target.round_clock import PassRecord, PassTimes, RoundClock
from paceline.target.traces import (
    MAX_FLUSH_ROUNDS,
    MAX_KEPT_ROUNDS,
    MAX_PASS_LINKS,
    MAX_WAITING_ROUNDS,
    TargetTracer,
)
from paceline.tracing.context import TraceContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UNIX_US = 1_700_000_000_000_000
GREEDY = SamplingParams(temperature=0.0)


class Spans(list):
    """A `Tracer` that keeps everything."""

    unix_offset_us = UNIX_US

    def emit(self, span):
        self.append(span)

    def named(self, name):
        return [span for span in self if span.name == name]


@pytest.fixture
def spans():
    return Spans()


def tracer_of(spans, slow_request_s=30.0):
    ids = itertools.count(1)
    return TargetTracer(spans, "target-1", slow_request_s, lambda bits: next(ids))


def request(flags="01", **fields):
    traceparent = f"00-{TRACE}-{SPAN}-{flags}"
    return GenerateRequest("r", (1, 2), 10, GREEDY, traceparent=traceparent, **fields)


def record_of(number, record=None, draft=None):
    """Round `number` lasts from 1000 * (number - 1) to 1000 * number, its pass from the middle."""
    end_us = 1000 * number
    clock = RoundClock()
    clock.start(end_us - 1000)
    if draft is not None:
        clock.arrive(draft, end_us - 600, 0)
    clock.ready_us = end_us - 550
    times = PassTimes(end_us - 500, end_us, end_us - 100)
    clock.passed(record or PassRecord(times, 1, 5))
    return clock.close(end_us)


def delta_of(record, number, finish_reason=None, choice=0):
    return RoundDelta(
        number,
        (5, 6),
        (TokenOrigin.ACCEPTED, TokenOrigin.BONUS),
        1,
        1,
        4,
        window_ms=record.times().window / 1000,
        finish_reason=finish_reason,
        choice=choice,
    )


def flush_all(tracer):
    while tracer.has_waiting:
        tracer.flush()


def end(trace, now_us, error):
    trace.end(now_us, error)
    flush_all(trace._tracer)


def play(choice, num_rounds, *, finishes=True, draft=None):
    for number in range(1, num_rounds + 1):
        record = record_of(number, draft=draft)
        reason = "length" if finishes and number == num_rounds else None
        choice.end_round(record, delta_of(record, number, reason))


def test_a_round_says_who_made_its_proposals(spans):
    trace = tracer_of(spans).begin(request(), 0)
    for number, source in ((1, "ngram"), (2, "")):
        record = record_of(number)
        delta = replace(delta_of(record, number, "length" if number == 2 else None), source=source)
        trace.choices[0].end_round(record, delta)
    end(trace, 2_500, None)
    told = [span.attributes.get("paceline.source") for span in spans.named("round")]
    assert told == ["ngram", None]


@pytest.mark.parametrize(
    ("origins", "told"),
    [
        ((TokenOrigin.ACCEPTED, TokenOrigin.BONUS), "bonus"),
        ((TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED), "recovered"),
        ((TokenOrigin.PLAIN,), "plain"),
        ((TokenOrigin.ACCEPTED,), None),
    ],
)
def test_a_round_says_what_the_target_s_own_token_is(spans, origins, told):
    """Of 4 proposals in a tree, too: the counts could not tell."""
    trace = tracer_of(spans).begin(request(), 0)
    record = record_of(1)
    delta = replace(
        delta_of(record, 1, "length"),
        token_ids=tuple(range(len(origins))),
        origins=origins,
        num_draft_tokens=4,
    )
    trace.choices[0].end_round(record, delta)
    end(trace, 1_500, None)
    assert [span.attributes.get("paceline.own_token") for span in spans.named("round")] == [told]


def test_a_sampled_request_is_told_as_it_goes(spans):
    tracer = tracer_of(spans)
    trace = tracer.begin(request(), 0)
    play(trace.choices[0], 2)
    assert spans == []  # not while others wait for their verdicts
    tracer.flush()
    assert Counter(span.name for span in spans) == {
        "round": 2, "queue": 2, "verify": 2, "sample": 2, "window": 2, "engine.pass": 2
    }  # fmt: skip
    end(trace, 2_500, None)
    (session,) = spans.named("session")
    assert (session.begin_us, session.end_us) == (UNIX_US, UNIX_US + 2_000)
    assert (session.trace_id, session.parent_id) == (int(TRACE, 16), int(SPAN, 16))
    assert {span.parent_id for span in spans.named("round")} == {session.span_id}
    assert session.attributes["paceline.num_rounds"] == 2
    assert session.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert session.error == ""


def test_the_context_of_a_round_is_that_of_its_span(spans):
    tracer = tracer_of(spans)
    choice = tracer.begin(request(), 0).choices[0]
    contexts = [TraceContext.from_bytes(choice.context(number)) for number in (1, 2)]
    play(choice, 2)
    tracer.flush()
    expected = [TraceContext(int(TRACE, 16), s.span_id, True) for s in spans.named("round")]
    assert contexts == expected


def test_children_tile_the_round(spans):
    tracer = tracer_of(spans)
    choice = tracer.begin(request(), 0).choices[0]
    play(choice, 1)
    tracer.flush()
    parts = [s for s in spans if s.name in ("queue", "verify", "sample", "window")]
    line = sorted((s.begin_us - UNIX_US, s.end_us - UNIX_US, s.name) for s in parts)
    assert line == [
        (0, 450, "window"), (450, 500, "queue"), (500, 900, "verify"), (900, 1000, "sample")
    ]  # fmt: skip


def test_a_quick_request_that_was_not_sampled_leaves_nothing(spans):
    trace = tracer_of(spans).begin(request("00"), 0)
    play(trace.choices[0], 3)
    assert trace.choices[0].context(1) == b""
    end(trace, 29_999_999, None)
    assert spans == []


@pytest.mark.parametrize(
    ("now_us", "error"),
    [(30_000_001, None), (5_000, endings.engine_error()), (5_000, endings.target_lost())],
)
def test_a_slow_or_failed_one_is_told_afterwards(spans, now_us, error):
    trace = tracer_of(spans).begin(request("00"), 0)
    play(trace.choices[0], 3, finishes=False)
    end(trace, now_us, error)
    (session,) = spans.named("session")
    assert session.error == ("" if error is None else error.code)
    rounds = sorted(spans.named("round"), key=lambda span: span.attributes["paceline.round"])
    assert [span.attributes["paceline.round"] for span in rounds] == [1, 2, 3, 4]
    assert rounds[-1].attributes["paceline.aborted"]
    assert rounds[-1].begin_us == UNIX_US + 3_000


@pytest.mark.parametrize("error", [endings.aborted(), RequestError("no", None, "bad", 400)])
def test_what_the_client_did_is_no_failure(spans, error):
    trace = tracer_of(spans).begin(request("00"), 0)
    play(trace.choices[0], 1, finishes=False)
    end(trace, 5_000, error)
    assert spans == []


def test_nothing_is_kept_of_a_request_that_nobody_will_ask_for(spans):
    assert tracer_of(spans, slow_request_s=0).begin(request("00"), 0) is None
    assert tracer_of(spans).begin(GenerateRequest("r", (1,), 1, GREEDY), 0) is None


def test_kept_rounds_are_bounded(spans):
    trace = tracer_of(spans).begin(request("00"), 0)
    play(trace.choices[0], MAX_KEPT_ROUNDS + 5)
    end(trace, 40_000_000, None)
    told = [span.attributes["paceline.round"] for span in spans.named("round")]
    assert told == list(range(6, MAX_KEPT_ROUNDS + 6))
    assert spans.named("session")[0].attributes["paceline.num_rounds"] == MAX_KEPT_ROUNDS + 5


def test_the_drafts_part_is_told_from_its_messages(spans):
    draft = DraftTokens(1, 1, 3, 0, (5,), 0, 80, 370, began_us=250, received_us=200)
    trace = tracer_of(spans).begin(request("00"), 0)
    play(trace.choices[0], 1, draft=draft)
    end(trace, 31_000_000, None)
    told = {s.name: s for s in spans if s.name in ("rewind", "draft", "wire_out")}
    assert {name: (s.begin_us - UNIX_US, s.end_us - UNIX_US) for name, s in told.items()} == {
        "rewind": (200, 250), "draft": (250, 330), "wire_out": (370, 400)
    }  # fmt: skip
    assert "paceline.reconstructed" not in told["wire_out"].attributes
    assert told["draft"].attributes["paceline.reconstructed"]
    windows = [(s.begin_us - UNIX_US, s.end_us - UNIX_US) for s in spans.named("window")]
    assert windows == [(0, 200), (330, 370), (400, 450)]


def test_a_draft_that_lies_about_its_times_stays_within_the_round(spans):
    draft = DraftTokens(1, 1, 3, 0, (5,), 0, 2**50, 2**52, began_us=1, received_us=1)
    trace = tracer_of(spans).begin(request("00"), 0)
    play(trace.choices[0], 1)
    record = record_of(2, draft=draft)
    trace.choices[0].end_round(record, delta_of(record, 2, "length"))
    end(trace, 31_000_000, None)
    second = spans.named("round")[1]
    children = [s for s in spans if s.parent_id == second.span_id]
    assert all(second.begin_us <= s.begin_us <= s.end_us <= second.end_us for s in children)


def test_a_pass_is_one_span_for_all_rounds_in_it(spans):
    tracer = tracer_of(spans)
    shared = PassRecord(PassTimes(500, 1000, 900), 40, 120)
    for _ in range(MAX_PASS_LINKS + 8):
        record = record_of(1, shared)
        tracer.begin(request(), 0).choices[0].end_round(record, delta_of(record, 1))
    tracer.flush()
    (pass_,) = spans.named("engine.pass")
    assert len(pass_.links) == MAX_PASS_LINKS
    assert (pass_.attributes["paceline.batch_size"], pass_.attributes["paceline.num_rows"]) == (
        40,
        120,
    )
    assert {span.links for span in spans.named("verify")} == {((pass_.trace_id, pass_.span_id),)}
    assert (pass_.begin_us, pass_.end_us) == (UNIX_US + 500, UNIX_US + 1000)


def test_another_try_has_spans_of_its_own(spans):
    """The gateway's span is the parent of all tries, each on another target under another name:
    of one that brought nothing, and of one that brought a token."""
    tracer = tracer_of(spans)
    first = tracer.begin(request(), 0)
    unbegun = tracer.begin(replace(request(), request_id="r~1"), 0)
    resumed = request(resumption=Resumption(2, ((7,),)))
    again = tracer.begin(replace(resumed, request_id="r~2"), 0)
    choices = tracer.begin(request(n=3), 0).choices
    contexts = [trace.choices[0].context(1) for trace in (first, unbegun, again)]
    contexts += [choices[index].context(1) for index in (1, 2)]
    assert len(set(contexts)) == 5
    assert choices[0].context(1) == contexts[0]


def test_a_prompts_choices_are_the_answers(spans):
    tracer = tracer_of(spans)
    tracer.begin(request(n=2, first_choice=6), 0).end(1, None)
    tracer.flush()
    assert [span.attributes["paceline.choice"] for span in spans.named("session")] == [6, 7]


def test_only_choices_that_run_are_told(spans):
    wanted = request(n=2, resumption=Resumption(1, (None, (7,))))
    trace = tracer_of(spans).begin(wanted, 0)
    assert list(trace.choices) == [1]


def test_a_round_that_ends_after_its_request_is_not_told_twice(spans):
    """It was in a pass when its client left, and is told as the open one."""
    tracer = tracer_of(spans)
    trace = tracer.begin(request(), 0)
    play(trace.choices[0], 1, finishes=False)
    end(trace, 1_200, None)
    late = record_of(2)
    trace.choices[0].end_round(late, delta_of(late, 2))
    tracer.flush()
    assert [s.attributes["paceline.round"] for s in spans.named("round")] == [1, 2]
    assert len({span.span_id for span in spans}) == len(spans)


def test_a_seed_that_no_attribute_can_hold_is_text(spans):
    for seed, shown in ((2**63 - 1, 2**63 - 1), (2**63, str(2**63))):
        sampling = SamplingParams(temperature=0.5, seed=seed)
        traceparent = f"00-{TRACE}-{SPAN}-01"
        wanted = GenerateRequest("r", (1,), 1, sampling, traceparent=traceparent)
        end(tracer_of(spans).begin(wanted, 0), 1, None)
        assert spans[-1].attributes["gen_ai.request.seed"] == shown


def end_slowly(tracer, num_requests=1, **fields):
    for _ in range(num_requests):
        trace = tracer.begin(request("00", **fields), 0)
        for choice in trace.choices.values():
            play(choice, MAX_KEPT_ROUNDS)
        trace.end(40_000_000, None)


def test_kept_rounds_become_spans_some_at_a_time(spans):
    """The loop that flushes is the one that starts passes."""
    tracer = tracer_of(spans)
    end_slowly(tracer, n=2)
    assert spans == []
    told = [0]
    while tracer.has_waiting:
        tracer.flush()
        told.append(len(spans.named("round")))
        assert told[-1] - told[-2] <= MAX_FLUSH_ROUNDS
    assert told[-1] == 2 * MAX_KEPT_ROUNDS


def test_rounds_that_wait_to_become_spans_are_bounded(spans):
    tracer = tracer_of(spans)
    end_slowly(tracer, MAX_WAITING_ROUNDS // MAX_KEPT_ROUNDS + 3)
    flush_all(tracer)
    assert len(spans.named("round")) == MAX_WAITING_ROUNDS
    assert len(spans.named("session")) == MAX_WAITING_ROUNDS // MAX_KEPT_ROUNDS + 3


def test_a_sampled_round_does_not_wait_for_kept_ones(spans):
    tracer = tracer_of(spans)
    end_slowly(tracer)
    play(tracer.begin(request(), 0).choices[0], MAX_FLUSH_ROUNDS + 1)
    tracer.flush()
    assert len(spans.named("round")) == 2 * MAX_FLUSH_ROUNDS + 1
