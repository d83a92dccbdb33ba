"""Spans of a draft: its part of the rounds that targets trace, on the targets' clocks.

Only what carries a trace context costs anything here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from paceline.protocol.draft_table import PassItem
from paceline.protocol.messages import Verdict, Welcome
from paceline.rpc.clock import ClockOffset
from paceline.tracing.context import TraceContext
from paceline.tracing.spans import Attribute, Span, Tracer


class DraftTracer:
    """`random_bits(n)` gives span ids. One link per target's stream."""

    def __init__(
        self,
        tracer: Tracer,
        replica_id: str,
        random_bits: Callable[[int], int] = random.getrandbits,
    ) -> None:
        self._tracer = tracer
        self._replica_id = replica_id
        self._random_bits = random_bits
        self._links: dict[int, tuple[ClockOffset, int]] = {}

    def attach(self, link_id: int, clock: ClockOffset, welcome: Welcome) -> None:
        self._links[link_id] = (clock, welcome.unix_offset_us)

    def detach(self, link_id: int) -> None:
        del self._links[link_id]

    def receive(self, link_id: int, verdict: Verdict, now_us: int) -> None:
        """A verdict has come."""
        context = TraceContext.from_bytes(verdict.trace_context)
        _, target_offset_us = self._links[link_id]
        if context is not None and verdict.sent_us and target_offset_us:
            received_us = self._unix_us(link_id, now_us)
            sent_us = min(received_us, verdict.sent_us + target_offset_us)
            self._emit("wire_back", context, sent_us, received_us)

    def end_pass(self, items: Iterable[PassItem], started_us: int, ended_us: int) -> None:
        """One pass over main texts and branches: a span for each sequence that is traced."""
        served: dict[tuple[int, int], PassItem] = {}
        for item in items:
            if item.trace_context:
                served.setdefault(item.key, item)
        for (link_id, _), item in served.items():
            context = TraceContext.from_bytes(item.trace_context)
            if context is None or link_id not in self._links:
                continue
            begin_us, end_us = self._unix_us(link_id, started_us), self._unix_us(link_id, ended_us)
            received_us = item.work.received_us
            if received_us:
                self._emit("rewind", context, self._unix_us(link_id, received_us), begin_us)
            self._emit("draft", context, begin_us, end_us, item.work.num_rows)

    def _unix_us(self, link_id: int, monotonic_us: int) -> int:
        """By the target's clock; by our own, where that is not known (yet)."""
        clock, target_offset_us = self._links[link_id]
        if clock.offset_us is None or not target_offset_us:
            return monotonic_us + self._tracer.unix_offset_us
        return monotonic_us + clock.offset_us + target_offset_us

    def _emit(
        self, name: str, context: TraceContext, begin_us: int, end_us: int, num_tokens: int = 0
    ) -> None:
        if not context.is_sampled:
            return
        attributes: dict[str, Attribute] = {"paceline.draft_replica_id": self._replica_id}
        if num_tokens:
            attributes["paceline.num_tokens"] = num_tokens
        span_id = self._random_bits(64) or 1
        ids = (context.trace_id, span_id, context.span_id)
        self._tracer.emit(Span(name, *ids, begin_us, end_us, attributes))
