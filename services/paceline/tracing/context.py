"""Which trace and which span something belongs to, and who is sampled. Pure.

Ids are numbers here: 128 bits of a trace, 64 of a span. Ids of children are made from their
parent's and a number, so that nobody has to remember or tell them.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocol.messages import TRACE_CONTEXT_BYTES

MASK_64 = (1 << 64) - 1
_SAMPLED = 0x01
_TRACEPARENT_CHARS = 55


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Invariant: neither id is zero."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @staticmethod
    def parse(traceparent: str) -> TraceContext | None:
        """Of version 00; None for anything else."""
        if len(traceparent) != _TRACEPARENT_CHARS or not traceparent.startswith("00-"):
            return None
        try:
            trace_id, span_id, flags = (int(part, 16) for part in traceparent[3:].split("-"))
        except ValueError:
            return None
        if not trace_id or not span_id:
            return None
        return TraceContext(trace_id & (1 << 128) - 1, span_id & MASK_64, bool(flags & _SAMPLED))

    @staticmethod
    def from_bytes(data: bytes) -> TraceContext | None:
        """As in messages between drafts and targets; None for an empty or impossible one."""
        if len(data) != TRACE_CONTEXT_BYTES:
            return None
        trace_id = int.from_bytes(data[:16], "big")
        span_id = int.from_bytes(data[16:24], "big")
        if not trace_id or not span_id:
            return None
        return TraceContext(trace_id, span_id, bool(data[24] & _SAMPLED))

    def to_bytes(self) -> bytes:
        trace, span = self.trace_id.to_bytes(16, "big"), self.span_id.to_bytes(8, "big")
        return trace + span + (b"\x01" if self.is_sampled else b"\x00")


def child_id(parent_id: int, number: int) -> int:
    """The id of a span's child number `number`: one round of splitmix64, never zero."""
    z = (parent_id + (number + 1) * 0x9E3779B97F4A7C15) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return (z ^ (z >> 31)) or 1


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Head sampling by the trace's id, as OpenTelemetry's TraceIdRatioBased: every process of any
    service that asks with the same ratio gets the same answer."""
    return trace_id & MASK_64 < round(ratio * (1 << 64))
