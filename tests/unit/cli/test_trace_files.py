"""Trace files: which trace is found, and what is said of what cannot be read."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import models
from paceline.cli import trace_files
from paceline.cli.trace_builder import request_of
from paceline.cli.trace_files import (
    Reading,
    files_in,
    lines_from_end,
    read_last,
    read_trace,
    traces_dir,
)
from paceline.cli.trace_spans import spans_of
from paceline.errors import PacelineError
from tests.unit.cli.trace_lines import BEGAN_MS, TRACE_ID, line_of, make_trace

OLD_ID = "0af7651916cd43dd8448eb211c80319c"


def write_two(folder: Path) -> None:
    """An older trace, then a newer one, in files of three processes."""
    make_trace(num_rounds=3, trace_id=OLD_ID).write(folder)
    make_trace(num_rounds=5, seed=2, began_ms=BEGAN_MS + 60_000).write(folder)


def num_rounds(reading: Reading) -> int:
    request = request_of(reading.spans)
    return len(request.rounds) if request else 0


def test_the_last_request_over_all_files(tmp_path: Path) -> None:
    write_two(tmp_path)
    reading = read_last(files_in(tmp_path))
    assert {span.trace_id for span in reading.spans} == {TRACE_ID}
    assert len(reading.spans) == len(make_trace(num_rounds=5, seed=2).all())
    assert num_rounds(reading) == 5
    assert reading.problems == []


def test_one_trace_by_its_id(tmp_path: Path) -> None:
    write_two(tmp_path)
    assert num_rounds(read_trace(files_in(tmp_path), OLD_ID)) == 3
    assert read_trace(files_in(tmp_path), "1" * 32).spans == []


def test_a_session_newer_than_any_gateway_span_is_the_last(tmp_path: Path) -> None:
    """Its gateway has not written yet."""
    write_two(tmp_path)
    newer = make_trace(num_rounds=2, trace_id="1" * 32, seed=3, began_ms=BEGAN_MS + 120_000)
    del newer.spans["paceline-gateway"]
    newer.write(tmp_path)
    assert num_rounds(read_last(files_in(tmp_path))) == 2


def test_ids_in_upper_case(tmp_path: Path) -> None:
    write_two(tmp_path)
    for path in files_in(tmp_path):
        path.write_text(path.read_text().replace(OLD_ID, OLD_ID.upper()))
    assert num_rounds(read_trace(files_in(tmp_path), OLD_ID)) == 3


def test_rotated_files_belong_to_the_folder(tmp_path: Path) -> None:
    make_trace(num_rounds=4).write(tmp_path)
    target = tmp_path / "paceline-target-7.jsonl"
    lines = target.read_text().splitlines(keepends=True)
    (tmp_path / "paceline-target-7.1.jsonl").write_text("".join(lines[:1]))
    target.write_text("".join(lines[1:]))
    (tmp_path / "notes.txt").write_text("no trace")
    (tmp_path / "folder.jsonl").mkdir()
    assert len(files_in(tmp_path)) == 4
    assert num_rounds(read_last(files_in(tmp_path))) == 4


def test_files_of_a_folder_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_FILES", 2)
    for number in range(4):
        path = tmp_path / f"{number}.jsonl"
        path.touch()
        os.utime(path, (number, number))
    assert [path.name for path in files_in(tmp_path)] == ["3.jsonl", "2.jsonl"]


def test_no_folder_and_no_files(tmp_path: Path) -> None:
    assert files_in(tmp_path / "none") == []
    assert read_last([]).spans == []


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, pattern: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refuse)
    with pytest.raises(PacelineError, match=r"cannot read .*: Permission denied"):
        files_in(tmp_path)


def test_the_folder_follows_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(models.CACHE_ENV, raising=False)
    assert traces_dir() == Path("~/.cache/paceline/traces").expanduser()
    monkeypatch.setenv(models.CACHE_ENV, "/data/paceline")
    assert traces_dir() == Path("/data/paceline/traces")


# ---------------------------------------------------------------------------------- broken files


def test_a_line_that_is_being_written_and_lines_that_are_none(tmp_path: Path) -> None:
    write_two(tmp_path)
    target, gateway = (tmp_path / f"paceline-{name}-7.jsonl" for name in ("target", "gateway"))
    whole = target.read_bytes()
    line = line_of("paceline-target", make_trace(num_rounds=1).all())
    target.write_bytes(whole + line.encode()[: len(line) // 2])
    gateway.write_bytes(
        b'\xff\xfe "session"\n' + gateway.read_bytes() + b'{"session": "session"}\n'
    )
    reading = read_last(files_in(tmp_path))
    assert num_rounds(reading) == 5
    assert sorted(reading.problems) == [
        f"{gateway}: some lines are no OTLP/JSON and are left out",
        f"{target}: its last line is not whole and is left out",
    ]


def test_spans_that_make_no_sense_are_counted(tmp_path: Path) -> None:
    made = make_trace(num_rounds=2)
    made.span("target", "round", "", 9.0, 8.0)
    made.span("target", "round", "", 1.0, 2.0)
    made.spans["paceline-target"][-1]["spanId"] = "short"
    made.write(tmp_path)
    reading = read_last(files_in(tmp_path))
    path = tmp_path / "paceline-target-7.jsonl"
    assert num_rounds(reading) == 2
    assert reading.problems == [f"{path}: 2 spans without a proper id or time are left out"]


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    make_trace(num_rounds=2).write(tmp_path)
    gone = tmp_path / "gone.jsonl"
    reading = read_last([*files_in(tmp_path), gone])
    assert num_rounds(reading) == 2
    assert reading.problems == [f"cannot read {gone}: No such file or directory"]


def test_only_the_end_of_a_huge_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_two(tmp_path)
    target = tmp_path / "paceline-target-7.jsonl"
    size = len("".join(line for name, line in make_trace(num_rounds=5, seed=2).lines()
                       if name == "paceline-target"))  # fmt: skip
    monkeypatch.setattr(trace_files, "MAX_LAST_BYTES", size + 10)
    reading = read_last(files_in(tmp_path))
    assert num_rounds(reading) == 5
    assert f"{target}: only its last {size + 10} bytes were looked at" in reading.problems
    # By its id a trace is looked for everywhere.
    assert num_rounds(read_trace(files_in(tmp_path), OLD_ID)) == 3


def test_a_line_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trace(num_rounds=2).write(tmp_path)
    longest = max(
        len(line) for path in files_in(tmp_path) for line in path.read_text().splitlines(True)
    )
    monkeypatch.setattr(trace_files, "MAX_LINE_BYTES", longest)
    monkeypatch.setattr(trace_files, "CHUNK_BYTES", 1000)
    target = tmp_path / "paceline-target-7.jsonl"
    target.write_text(target.read_text() + "x" * longest + "\n")
    reading = read_last(files_in(tmp_path))
    assert num_rounds(reading) == 2
    assert reading.problems == [f"{target}: a line longer than {longest} bytes is left out"]


def test_spans_of_a_trace_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trace(num_rounds=9).write(tmp_path)
    monkeypatch.setattr(trace_files, "MAX_SPANS", 40)
    reading = read_last(files_in(tmp_path))
    assert len(reading.spans) == 40
    assert reading.problems == ["the trace has more than 40 spans; the rest is left out"]


@given(st.lists(st.binary(max_size=12)), st.integers(1, 9), st.integers(0, 60))
def test_lines_from_the_end_are_the_lines(parts: list[bytes], chunk: int, floor: int) -> None:
    data = b"\n".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_files, "CHUNK_BYTES", chunk)
        found = list(lines_from_end(io.BytesIO(data), len(data), min(floor, len(data))))
    begins, expected = 0, []
    for line in data.split(b"\n"):
        text = data[begins : begins + len(line) + 1]
        # A line at the floor may be the end of one: only what surely begins there counts.
        if text and (begins > floor or floor == 0):
            expected.append(text)
        begins += len(line) + 1
    assert found == expected[::-1]


# ---------------------------------------------------------------------------------- any bytes


@given(st.binary(max_size=300))
def test_any_bytes_are_no_line(line: bytes) -> None:
    with pytest.raises(ValueError):
        spans_of(line)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["resourceSpans", "resource", "scopeSpans", "spans", "attributes", "key", "value"]
            )
            | st.sampled_from(
                ["traceId", "spanId", "parentSpanId", "name", "kind", "status", "code"]
            )
            | st.sampled_from(["startTimeUnixNano", "stringValue", "intValue", "arrayValue"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)


@given(JSON, st.sampled_from(["spans", "attributes", "all"]))
def test_any_json_is_spans_or_none(value: object, where: str) -> None:
    good = make_trace(num_rounds=1).all()[0]
    whole: object = value
    if where != "all":
        span = good | {"attributes": value} if where == "attributes" else value
        whole = {"resourceSpans": [{"scopeSpans": [{"spans": [good, span]}]}]}
    try:
        spans, _ = spans_of(json.dumps(whole).encode())
    except ValueError:
        assert where == "all"
        return
    request_of(spans)


@given(st.data())
def test_a_file_with_any_damage_is_read(data: st.DataObject) -> None:
    text = "".join(line for _, line in make_trace(num_rounds=2).lines()).encode()
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 200)))
    damaged = text[:begin] + data.draw(st.binary(max_size=30)) + text[end:]
    for line in lines_from_end(io.BytesIO(damaged), len(damaged)):
        assert line is not None
        try:
            spans, _ = spans_of(line)
        except ValueError:
            continue
        request_of(spans)


def test_json_nested_without_end() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        spans_of(b"[" * 1_000_000)
