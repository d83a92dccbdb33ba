"""Ids and contexts between processes, and who is sampled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from paceline.tracing.context import MASK_64, TraceContext, child_id, is_sampled

trace_ids = st.integers(1, 2**128 - 1)
span_ids = st.integers(1, MASK_64)
contexts = st.builds(TraceContext, trace_ids, span_ids, st.booleans())
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@given(contexts)
def test_bytes_round_trip(context: TraceContext) -> None:
    data = context.to_bytes()
    assert len(data) == 25
    assert TraceContext.from_bytes(data) == context


@given(st.binary(max_size=30))
def test_any_bytes_are_a_context_or_none(data: bytes) -> None:
    context = TraceContext.from_bytes(data)
    if context is not None:
        assert len(data) == 25
        assert context.trace_id
        assert context.span_id


def test_a_traceparent() -> None:
    context = TraceContext.parse(f"00-{TRACE}-{SPAN}-01")
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), True)
    unsampled = TraceContext.parse(f"00-{TRACE}-{SPAN}-02")
    assert unsampled is not None
    assert not unsampled.is_sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        f"01-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{TRACE}-{SPAN}-xx",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{SPAN}-1-01",
    ],
)
def test_no_traceparent(header: str) -> None:
    assert TraceContext.parse(header) is None


@given(span_ids, st.sets(st.integers(0, 2**40), min_size=2, max_size=40))
def test_children_have_ids_of_their_own(parent_id: int, numbers: set[int]) -> None:
    children = {child_id(parent_id, number) for number in numbers}
    assert len(children) == len(numbers)
    assert all(0 < child <= MASK_64 for child in children)
    assert {child_id(parent_id, number) for number in numbers} == children


@given(trace_ids, st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0))
def test_the_ratio_is_opentelemetrys(trace_id: int, ratio: float) -> None:
    result = TraceIdRatioBased(ratio).should_sample(None, trace_id, "x")
    assert is_sampled(trace_id, ratio) == (result.decision is Decision.RECORD_AND_SAMPLE)


@given(trace_ids, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_who_is_sampled_at_a_ratio_is_so_at_every_larger_one(
    trace_id: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert is_sampled(trace_id, high) or not is_sampled(trace_id, low)


def test_none_and_all() -> None:
    assert not is_sampled(2**127, 0.0)
    assert is_sampled(2**128 - 1, 1.0)
