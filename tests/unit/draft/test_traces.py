"""Spans of a draft on the clocks of its targets."""

import itertools
from dataclasses import dataclass

import pytest

from paceline.draft.traces import DraftTracer
from paceline.protocol.draft_table import DraftTable
from paceline.protocol.draft_work import WorkResult
from paceline.protocol.messages import OpenSession, Verdict, Welcome
from paceline.rpc.clock import ClockOffset
from paceline.sampling.params import SamplingParams, VerificationMode
from paceline.tracing.context import TraceContext

GREEDY = SamplingParams(temperature=0.0)
TARGET_UNIX_US = 1_700_000_000_000_000
OWN_UNIX_US = 1_700_000_000_000_999
AHEAD_US = 3_600_000_000  # of the target's clock, before ours
FIRST, SECOND = (TraceContext(7, number, True) for number in (11, 12))


class Spans(list):
    unix_offset_us = OWN_UNIX_US

    def emit(self, span):
        self.append(span)

    @property
    def told(self):
        """By the target's monotonic clock."""
        return [
            (s.name, s.parent_id, s.begin_us - TARGET_UNIX_US, s.end_us - TARGET_UNIX_US)
            for s in self
        ]


@dataclass
class Rig:
    spans: Spans
    tracer: DraftTracer
    clock: ClockOffset
    table: DraftTable

    def open(self, context=FIRST):
        data = b"" if context is None else context.to_bytes()
        opened = OpenSession(
            1, 1, 2, (5, 6), GREEDY, VerificationMode.GREEDY, 20, fan_out=2, trace_context=data
        )
        self.table.receive(1, opened, 1_000)

    def pass_(self, began_us, token_id=9):
        items = self.table.begin_pass(100)
        wanted = [item.work.num_runner_ups for item in items]
        results = [WorkResult(token_id, runner_ups=(1, 2)[:number]) for number in wanted]
        self.table.end_pass(items, results, 50, None, began_us)
        self.tracer.end_pass(items, began_us, began_us + 50)
        return [d for drafts in self.table.take_drafts(began_us + 60).values() for d in drafts]

    def verdict(self, start, token_ids, now_us, context=SECOND, number=1):
        data = b"" if context is None else context.to_bytes()
        verdict = Verdict(
            1, 1, start, token_ids, 0, 30, number, data, fan_out=2, sent_us=now_us + AHEAD_US - 100
        )
        self.table.receive(1, verdict, now_us)
        self.tracer.receive(1, verdict, now_us)


@pytest.fixture
def rig():
    spans, ids = Spans(), itertools.count(100)
    made = Rig(
        spans,
        DraftTracer(spans, "draft-1", lambda bits: next(ids)),
        ClockOffset(),
        DraftTable(max_sessions=4, max_len=100, session_idle_us=10**9),
    )
    made.clock.receive_pong(0, AHEAD_US + 5, 10)
    made.tracer.attach(1, made.clock, Welcome(1, "b", "t", "m", 9, "h", TARGET_UNIX_US))
    return made


def test_a_round_as_the_draft_sees_it(rig):
    rig.open()
    rig.pass_(2_000)
    rig.verdict(2, (9, 9), 2_500)
    (draft,) = rig.pass_(2_600)
    assert rig.spans.told == [
        ("draft", 11, AHEAD_US + 2_000, AHEAD_US + 2_050),
        ("wire_back", 12, AHEAD_US + 2_400, AHEAD_US + 2_500),
        ("rewind", 12, AHEAD_US + 2_500, AHEAD_US + 2_600),
        ("draft", 12, AHEAD_US + 2_600, AHEAD_US + 2_650),
    ]
    assert {span.trace_id for span in rig.spans} == {7}
    assert rig.spans[0].attributes["paceline.draft_replica_id"] == "draft-1"
    assert (draft.began_us, draft.received_us) == (2_600, 2_500)


def test_only_the_first_pass_after_a_verdict_is_behind_a_rewind(rig):
    rig.open()
    rig.verdict(2, (9,), 2_500)
    first, second = rig.pass_(2_600), rig.pass_(2_700)
    assert [span.name for span in rig.spans] == ["wire_back", "rewind", "draft", "draft"]
    assert [draft.received_us for draft in (first[0], second[0])] == [2_500, 0]
    assert [draft.began_us for draft in (first[0], second[0])] == [2_600, 2_700]


def test_branches_are_part_of_their_sequences_pass(rig):
    rig.open()
    for began_us in (2_000, 2_100, 2_200):
        rig.pass_(began_us)
    assert len(rig.table.begin_pass(100)) > 1  # there are branches by now
    assert [span.name for span in rig.spans] == ["draft"] * 3


def test_nothing_is_told_of_what_is_not_traced(rig):
    rig.open(context=None)
    rig.pass_(2_000)
    rig.verdict(2, (9,), 2_500, context=None)
    rig.pass_(2_600)
    assert rig.spans == []


def test_a_context_that_is_not_sampled_is_none(rig):
    rig.open(TraceContext(7, 11, False))
    rig.pass_(2_000)
    assert rig.spans == []


def test_without_the_targets_clock_it_is_our_own(rig):
    """Before the first pong, or from a target that does not say."""
    rig.tracer.attach(1, ClockOffset(), Welcome(1, "b", "t", "m", 9, "h", TARGET_UNIX_US))
    rig.open()
    rig.pass_(2_000)
    rig.tracer.attach(1, rig.clock, Welcome(1, "b", "t", "m", 9, "h"))
    rig.pass_(2_100)
    assert [span.begin_us - OWN_UNIX_US for span in rig.spans] == [2_000, 2_100]
    rig.verdict(2, (9,), 2_500)
    assert [span.name for span in rig.spans] == ["draft", "draft"]


def test_a_link_that_is_gone_costs_its_spans_only(rig):
    rig.open()
    items = rig.table.begin_pass(100)
    rig.tracer.detach(1)
    rig.tracer.end_pass(items, 1, 2)
    assert rig.spans == []


def test_a_pass_that_was_under_way_when_the_correction_came_dates_nothing(rig):
    rig.open()
    items = rig.table.begin_pass(100)
    rig.verdict(2, (8,), 2_500)
    rig.table.end_pass(items, [WorkResult(9)], 900, None, 2_000)
    assert rig.table.take_drafts(2_900) == {}
    (draft,) = rig.pass_(2_950)
    assert (draft.began_us, draft.received_us) == (2_950, 2_500)


def test_tokens_that_a_correction_dropped_do_not_date_those_after_it(rig):
    rig.open()
    items = rig.table.begin_pass(100)
    rig.table.end_pass(items, [WorkResult(9)], 50, None, 2_000)
    rig.verdict(2, (8,), 2_500)
    (draft,) = rig.pass_(2_600)
    assert (draft.began_us, draft.received_us) == (2_600, 2_500)
