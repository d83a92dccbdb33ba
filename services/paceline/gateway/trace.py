"""W3C Trace Context: which trace a request belongs to.

Pure; random digits are an argument. Level 1 of the recommendation, read strictly: a header that
breaks a rule is as none at all, never an error. What becomes of it is in `spans`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TRACEPARENT_HEADER = b"traceparent"
TRACE_ID_HEADER = b"x-paceline-trace-id"
# Version 00 has exactly these fields; a later one may go on behind another dash.
_TRACEPARENT = re.compile(
    rb"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    rb"-(?P<flags>[0-9a-f]{2})(?P<rest>-.*)?",
    re.DOTALL,
)
_SAMPLED = 0x01
# A header of a later version may be longer than ours, but not endless.
MAX_TRACEPARENT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """`trace_id` has 32 hexadecimal digits, `span_id` 16; neither is all zeros. `has_parent`: the
    span is somebody's, who sent it."""

    trace_id: str
    span_id: str
    is_sampled: bool = False
    has_parent: bool = field(default=False, compare=False)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{_SAMPLED * self.is_sampled:02x}"


def begin_trace(values: Sequence[bytes], random_hex: Callable[[], str]) -> Trace:
    """The trace that the `traceparent` headers name, or a new one. `random_hex` gives 32 digits,
    not all zeros."""
    known = parse_traceparent(values)
    if known is not None:
        return known
    return Trace(random_hex(), random_hex()[:16])


def parse_traceparent(values: Sequence[bytes]) -> Trace | None:
    """None unless there is exactly one header and it is right in every character."""
    if len(values) != 1 or len(values[0]) > MAX_TRACEPARENT_BYTES:
        return None
    found = _TRACEPARENT.fullmatch(values[0])
    if found is None or found["version"] == b"ff" or (found["version"] == b"00" and found["rest"]):
        return None
    trace_id, span_id = found["trace"].decode(), found["span"].decode()
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    # Of a later version's flags only this one is known to mean the same.
    is_sampled = bool(int(found["flags"], 16) & _SAMPLED)
    return Trace(trace_id, span_id, is_sampled, has_parent=True)
