"""Files of OTLP/JSON: what OpenTelemetry's own encoder says, bounded in size and number."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource

from paceline.tracing.json_lines import MAX_FILES, JsonLinesFile, span_json
from paceline.tracing.lanes import OtlpSink
from paceline.tracing.spans import Span

IDS = ("traceId", "spanId", "parentSpanId")
texts = st.text(st.characters(codec="utf-8"), max_size=8)
values = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.lists(texts, max_size=3).map(tuple)
)
ids = st.integers(1, 2**64 - 1)
spans = st.builds(
    Span,
    name=texts,
    trace_id=st.integers(1, 2**128 - 1),
    span_id=ids,
    parent_id=st.just(0) | ids,
    begin_us=st.integers(0, 2**53),
    end_us=st.integers(0, 2**53),
    attributes=st.dictionaries(st.text("abc._", min_size=1, max_size=5), values, max_size=4),
    links=st.lists(st.tuples(ids, ids), max_size=2).map(tuple),
    is_server=st.booleans(),
    error=texts,
)


def in_base64(node: Any) -> Any:
    """The same with ids as protobuf's own JSON has them; OTLP's are hexadecimal."""
    if isinstance(node, list):
        return [in_base64(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        key: base64.b64encode(bytes.fromhex(one)).decode() if key in IDS else in_base64(one)
        for key, one in node.items()
    }


def simple(request: ExportTraceServiceRequest) -> Any:
    """As a dict, without the flags that OTLP/JSON readers can do without."""
    found = MessageToDict(request)
    for span in found["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for each in (span, *span.get("links", ())):
            each.pop("flags", None)
        if not span.get("status"):
            span.pop("status", None)
    return found


def parsed(line: str) -> ExportTraceServiceRequest:
    return ParseDict(in_base64(json.loads(line)), ExportTraceServiceRequest())


@given(spans)
def test_a_line_says_what_opentelemetrys_encoder_says(span: Span) -> None:
    line = (
        '{"resourceSpans":[{"resource":{"attributes":[]},"scopeSpans":'
        f'[{{"scope":{{"name":"paceline"}},"spans":[{span_json(span)}]}}]}}]}}'
    )
    readable = OtlpSink(None, Resource({}))._readable(span)  # type: ignore[arg-type]
    assert simple(parsed(line)) == simple(encode_spans([readable]))


def a_span(number: int, **fields: Any) -> Span:
    return Span(f"span {number}", 7, number, 0, 1_000 + number, 2_000 + number, **fields)


def names(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    groups = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in lines]
    return [span["name"] for group in groups for span in group]


def test_a_file_of_a_process(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path / "new", "svc", {"service.name": "svc"}, 1 << 20)
    file.write([a_span(number) for number in range(1, 40)])
    file.write([a_span(40)])
    file.close()
    assert file.path == tmp_path / "new" / f"svc-{os.getpid()}.jsonl"
    assert names(file.path) == [f"span {number}" for number in range(1, 41)]
    (first, _) = file.path.read_text().splitlines()
    (pair,) = json.loads(first)["resourceSpans"][0]["resource"]["attributes"]
    assert pair == {"key": "service.name", "value": {"stringValue": "svc"}}


def test_a_full_file_is_put_aside_once(tmp_path: Path) -> None:
    """Two files at most, and no line is torn."""
    file = JsonLinesFile(tmp_path, "svc", {}, 1_000)
    for number in range(1, 30):
        file.write([a_span(number)])
    file.close()
    old = tmp_path / f"svc-{os.getpid()}.1.jsonl"
    assert sorted(tmp_path.iterdir()) == sorted([file.path, old])
    assert max(file.path.stat().st_size, old.stat().st_size) <= 1_000
    left = names(old) + names(file.path)
    assert left == [f"span {number}" for number in range(30 - len(left), 30)]


def test_a_line_longer_than_a_file_may_be_has_one_for_itself(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path, "svc", {}, 300)
    for number in (1, 2):
        file.write([a_span(number, attributes={"x": "y" * 400})])
    file.close()
    assert names(file.path) == ["span 2"]


def test_files_of_one_service_are_bounded(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 5):
        path = tmp_path / f"svc-{10_000_000 + number}.jsonl"
        path.touch()
        os.utime(path, (number, number))
    (tmp_path / "other-1.jsonl").touch()
    JsonLinesFile(tmp_path, "svc", {}, 1_000).close()
    left = {path.name for path in tmp_path.glob("svc-*.jsonl")}
    assert len(left) == MAX_FILES
    assert f"svc-{10_000_000 + MAX_FILES + 4}.jsonl" in left
    assert "svc-10000000.jsonl" not in left
    assert (tmp_path / "other-1.jsonl").exists()


def test_files_of_processes_that_live_stay(tmp_path: Path) -> None:
    """And those of another service, whose name begins like ours."""
    kept = [f"svc-{os.getpid()}.1.jsonl", f"svc-{os.getppid()}.jsonl", "svc-b-10000000.jsonl"]
    for number, name in enumerate(kept):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    for number in range(MAX_FILES + 5):
        (tmp_path / f"svc-{10_000_000 + number}.jsonl").touch()
    JsonLinesFile(tmp_path, "svc", {}, 1_000).close()
    assert all((tmp_path / name).exists() for name in kept)
    assert len(list(tmp_path.glob("svc-*.jsonl"))) == MAX_FILES + 1


def test_a_file_that_another_process_removes_meanwhile(tmp_path: Path) -> None:
    """A link to nowhere looks like that: it is listed, and not there."""
    (tmp_path / "svc-10000000.jsonl").symlink_to(tmp_path / "gone")
    JsonLinesFile(tmp_path, "svc", {}, 1_000).close()
