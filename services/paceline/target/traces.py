"""Spans of a target: each choice a session, each of its rounds and what that was spent on.

A sampled request's rounds become spans as they end. Of the others the last rounds are kept as they
are, and become spans only if the request turns out slow or fails: then this target tells the
drafts' part, too, from what their messages said. Spans are made in `flush` alone, some at a time:
whoever calls that also starts passes.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from paceline.errors import RequestError
from paceline.generation import GenerateRequest, RoundDelta, TokenOrigin
from paceline.methods import ProposalSource
from paceline.round_times import Stage, segments
from paceline.target.intake import living_outputs
from paceline.target.round_clock import PassRecord, PassTimes, RoundRecord
from paceline.tracing.context import TraceContext, child_id
from paceline.tracing.guard import SpanGuard
from paceline.tracing.spans import Attribute, Span, Tracer, int_attribute

# Rounds of an untraced choice that are kept, the last ones.
MAX_KEPT_ROUNDS = 64
# Kept rounds of requests that are over, which wait to become spans; and how many do in one flush.
MAX_WAITING_ROUNDS = 1024
MAX_FLUSH_ROUNDS = 16
MAX_PASS_LINKS = 32

Attributes = dict[str, Attribute]


class RoundFacts(NamedTuple):
    """What a span says of a round beside its times."""

    round: int
    num_speculative_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_tokens: int
    has_window: bool
    source: ProposalSource = ""
    # The origin of the last token, where that is the target's own: of a tree counts do not tell.
    own_token: str = ""

    @staticmethod
    def of(delta: RoundDelta) -> RoundFacts:
        return RoundFacts(
            delta.round,
            delta.num_speculative_tokens,
            delta.num_draft_tokens,
            delta.num_accepted_tokens,
            len(delta.token_ids),
            delta.window_ms > 0,
            delta.source,
            _own_token(delta),
        )


def _own_token(delta: RoundDelta) -> str:
    last = delta.origins[-1] if delta.origins else TokenOrigin.ACCEPTED
    return "" if last is TokenOrigin.ACCEPTED else last.value


@dataclass(slots=True)
class _PassSpan:
    """The span of a pass, in a trace of its own. Links are to rounds whose spans are made no later
    than it: others, as that of a prompt's later part, link to the pass and not back."""

    trace_id: int
    span_id: int
    record: PassRecord
    links: list[tuple[int, int]] = field(default_factory=list)


class TargetTracer:
    """`random_bits(n)` gives ids for passes; all others are made from the request's."""

    def __init__(
        self,
        tracer: Tracer,
        replica_id: str,
        slow_request_s: float,
        random_bits: Callable[[int], int] = random.getrandbits,
    ) -> None:
        self.tracer = tracer
        self.replica_id = replica_id
        self.slow_us = int(slow_request_s * 1e6)
        self.guard = SpanGuard()
        self._random_bits = random_bits
        self._open_passes: list[_PassSpan] = []
        # What makes spans: at the next flush, as much as passes end; and of untraced requests,
        # which may be much at once, when there is time.
        self._due: deque[Callable[[], None]] = deque()
        self._waiting: deque[Callable[[], None]] = deque()

    def begin(self, request: GenerateRequest, now_us: int) -> RequestTrace | None:
        """None for a request that there will never be a span of."""
        context = TraceContext.parse(request.traceparent)
        if context is None or not (context.is_sampled or self.slow_us):
            return None
        return RequestTrace(self, context, request, now_us)

    def pass_of(self, record: PassRecord, member: tuple[int, int]) -> tuple[int, int]:
        """The ids of the pass's span, which links to this round unless it is out already."""
        span = record.span
        if not isinstance(span, _PassSpan):
            span = _PassSpan(self._random_bits(128) or 1, self._random_bits(64) or 1, record)
            record.span = span
            self._open_passes.append(span)
        if len(span.links) < MAX_PASS_LINKS:
            span.links.append(member)
        return span.trace_id, span.span_id

    def soon(self, make_spans: Callable[[], None]) -> None:
        """Call it at the next flush."""
        self._due.append(make_spans)

    def reconstruct(self, rounds: Sequence[Callable[[], None]]) -> None:
        """Call these in one of the next flushes: the last of them, if they are too many."""
        room = MAX_WAITING_ROUNDS - len(self._waiting)
        self._waiting += rounds[max(0, len(rounds) - room) :]

    @property
    def has_waiting(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._due or self._waiting)

    def flush(self) -> None:
        """Make spans of what has ended since, of some kept rounds, and of their passes."""
        while self._due:
            self._due.popleft()()
        for _ in range(min(MAX_FLUSH_ROUNDS, len(self._waiting))):
            self._waiting.popleft()()
        passes, self._open_passes = self._open_passes, []
        for each in passes:
            record, times = each.record, each.record.times
            attributes: Attributes = {
                "paceline.batch_size": record.batch_size,
                "paceline.num_rows": record.num_rows,
                "paceline.replica_id": self.replica_id,
            }
            ids = (each.trace_id, each.span_id, 0)
            self.emit("engine.pass", ids, times.started_us, times.ended_us, attributes, each.links)

    def emit(
        self,
        name: str,
        ids: tuple[int, int, int],
        begin_us: int,
        end_us: int,
        attributes: Attributes,
        links: list[tuple[int, int]] | None = None,
        error: str = "",
    ) -> None:
        """`ids`: of the trace, the span and its parent. Times are the monotonic clock's."""
        offset_us = self.tracer.unix_offset_us
        begin_us, end_us = begin_us + offset_us, end_us + offset_us
        links_ = tuple(links or ())
        self.tracer.emit(Span(name, *ids, begin_us, end_us, attributes, links_, error=error))


class RequestTrace:
    """`choices` are what the scheduler is to tell of each that runs."""

    def __init__(
        self, tracer: TargetTracer, context: TraceContext, request: GenerateRequest, now_us: int
    ) -> None:
        self._tracer = tracer
        self._begin_us = now_us
        self._is_sampled = context.is_sampled
        # Other prompts' and earlier tries' sessions have the same parent: the request's id, which
        # they do not share, tells them apart.
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
        first_id = context.span_id ^ int.from_bytes(digest)
        self.choices = {
            choice: ChoiceTrace(tracer, context, request, choice, first_id, now_us)
            for choice in living_outputs(request)
        }

    def end(self, now_us: int, error: RequestError | None) -> None:
        failed = error is not None and error.status >= 500
        is_slow = now_us - self._begin_us > self._tracer.slow_us
        if not (self._is_sampled or (self._tracer.slow_us and (failed or is_slow))):
            return
        for choice in self.choices.values():
            choice.end(now_us, error)


class ChoiceTrace:
    """One sequence's session span; a `RoundTracer`."""

    def __init__(
        self,
        tracer: TargetTracer,
        context: TraceContext,
        request: GenerateRequest,
        choice: int,
        first_id: int,
        now_us: int,
    ) -> None:
        self._tracer = tracer
        self._parent = context
        self._request = request
        self._choice = request.first_choice + choice
        self._span_id = child_id(first_id, self._choice)
        self._trace_bytes = context.trace_id.to_bytes(16, "big")
        self._begin_us = now_us
        self._end_us = 0
        self._mode = ""
        self._finish_reason = ""
        # The rounds that are over; the open one begins at `_round_us`.
        self._round_us = now_us
        self._is_over = False
        self._num_rounds = 0
        self._num_tokens = 0
        self._kept: deque[tuple[RoundRecord, RoundFacts]] = deque(maxlen=MAX_KEPT_ROUNDS)

    def context(self, round: int) -> bytes:
        if not self._parent.is_sampled:
            return b""
        return self._trace_bytes + child_id(self._span_id, round).to_bytes(8, "big") + b"\x01"

    def end_round(self, record: RoundRecord, delta: RoundDelta) -> None:
        if not self._is_over:  # else it was aborted in this round
            with self._tracer.guard:
                self._end_round(record, delta)

    def _end_round(self, record: RoundRecord, delta: RoundDelta) -> None:
        self._num_rounds += 1
        self._round_us = record.end_us
        self._num_tokens += len(delta.token_ids)
        self._mode = record.mode
        if delta.finish_reason is not None:
            self._end_us, self._finish_reason = record.end_us, delta.finish_reason
        facts = RoundFacts.of(delta)
        if self._parent.is_sampled:
            self._tracer.soon(partial(self._emit_round, record, facts, is_reconstructed=False))
        else:
            self._kept.append((record, facts))

    def end(self, now_us: int, error: RequestError | None) -> None:
        """Nothing more will come of it."""
        emit = partial(self._emit_round, is_reconstructed=True)
        self._tracer.reconstruct([partial(emit, record, facts) for record, facts in self._kept])
        self._kept.clear()
        self._is_over = True
        self._tracer.soon(partial(self._emit_session, now_us, error))

    def _emit_session(self, now_us: int, error: RequestError | None) -> None:
        if not self._finish_reason:
            self._emit_open_round(now_us)
        sampling = self._request.sampling
        attributes: Attributes = {
            "gen_ai.request.max_tokens": self._request.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": int_attribute(sampling.seed),
            "gen_ai.usage.output_tokens": self._num_tokens,
            "paceline.request_id": self._request.request_id,
            "paceline.choice": self._choice,
            "paceline.replica_id": self._tracer.replica_id,
            "paceline.mode": self._mode,
            "paceline.num_rounds": self._num_rounds,
        }
        if self._finish_reason:
            attributes["gen_ai.response.finish_reasons"] = (self._finish_reason,)
        failure = ""
        if error is not None and not self._finish_reason:
            failure = attributes["error.type"] = error.code or str(error.status)
        ids = (self._parent.trace_id, self._span_id, self._parent.span_id)
        end_us = self._end_us or now_us
        self._tracer.emit("session", ids, self._begin_us, end_us, attributes, error=failure)

    def _emit_open_round(self, now_us: int) -> None:
        """The one that never ended: a draft may have told of it."""
        number = self._num_rounds + 1
        attributes: Attributes = {
            "paceline.round": number,
            "paceline.proposed": 0,
            "paceline.accepted": 0,
            "paceline.num_tokens": 0,
            "paceline.aborted": True,
        }
        ids = (self._parent.trace_id, child_id(self._span_id, number), self._span_id)
        self._tracer.emit("round", ids, self._round_us, now_us, attributes)

    def _emit_round(
        self, record: RoundRecord, facts: RoundFacts, *, is_reconstructed: bool
    ) -> None:
        trace_id, round_id = self._parent.trace_id, child_id(self._span_id, facts.round)
        attributes: Attributes = {
            "paceline.round": facts.round,
            "paceline.k": facts.num_speculative_tokens,
            "paceline.proposed": facts.num_draft_tokens,
            "paceline.accepted": facts.num_accepted_tokens,
            "paceline.num_tokens": facts.num_tokens,
            "paceline.limit_position": record.limit_position,
            "paceline.epoch": record.epoch,
            "paceline.replica_id": self._tracer.replica_id,
        }
        if facts.source:
            attributes["paceline.source"] = facts.source
        if facts.own_token:
            attributes["paceline.own_token"] = facts.own_token
        if record.draft_replica_id:
            attributes["paceline.draft_replica_id"] = record.draft_replica_id
        if record.passes:
            last = record.passes[-1][1]
            attributes["paceline.batch_size"] = last.batch_size
            attributes["paceline.num_rows"] = last.num_rows
        ids = (trace_id, round_id, self._span_id)
        self._tracer.emit("round", ids, record.begin_us, record.end_us, attributes)
        children = _RoundChildren(self._tracer, trace_id, round_id, record)
        children.emit(facts.has_window, is_reconstructed)


class _RoundChildren:
    """What a round was spent on, each cut to the round."""

    def __init__(
        self, tracer: TargetTracer, trace_id: int, round_id: int, record: RoundRecord
    ) -> None:
        self._tracer = tracer
        self._trace_id = trace_id
        self._round_id = round_id
        self._record = record
        self._num = 0

    def emit(self, has_window: bool, is_reconstructed: bool) -> None:
        record = self._record
        for ready_us, each in record.passes:
            self._emit_pass(ready_us, each, each.times)
        for arrival in record.arrivals:
            if arrival.sent_us:
                self._child("wire_out", arrival.sent_us, arrival.arrived_us)
            if is_reconstructed:
                for stage, begin_us, end_us in arrival.intervals():
                    if stage is not Stage.WIRE_OUT:
                        told: Attributes = {"paceline.reconstructed": True}
                        self._child(stage.span_name, begin_us, end_us, told)
        if not has_window:
            return
        line = segments(record.begin_us, record.end_us, record.intervals())
        for stage, begin_us, end_us in line:
            if stage is Stage.WINDOW:
                self._child("window", begin_us, end_us)

    def _emit_pass(self, ready_us: int, record: PassRecord, times: PassTimes) -> None:
        self._child("queue", ready_us, times.started_us)
        links = [self._tracer.pass_of(record, (self._trace_id, self._round_id))]
        self._child("verify", times.started_us, times.verified_us, links=links)
        self._child("sample", times.verified_us, times.ended_us)

    def _child(
        self,
        name: str,
        begin_us: int,
        end_us: int,
        attributes: Attributes | None = None,
        links: list[tuple[int, int]] | None = None,
    ) -> None:
        begin_us, end_us = max(begin_us, self._record.begin_us), min(end_us, self._record.end_us)
        if begin_us >= end_us and not links:
            return
        self._num += 1
        ids = (self._trace_id, child_id(self._round_id, self._num), self._round_id)
        self._tracer.emit(name, ids, begin_us, end_us, attributes or {}, links)
