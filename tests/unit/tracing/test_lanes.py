"""Queues and exporters: bounded, counted, and never anybody else's trouble."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.config import TracingConfig
from paceline.tracing.guard import OnceInAWhile
from paceline.tracing.lanes import MAX_BATCH_SPANS, Lane, make_lanes, traces_url
from paceline.tracing.process import ProcessTracer, open_tracer, span_counts
from paceline.tracing.spans import Span

LANES = "paceline.tracing.lanes"
SIZE = 64


def span(number: int = 1) -> Span:
    return Span("x", 7, number, 0, 1, 2)


class Sink:
    """Takes spans while its gate is open; `problem` is raised instead, if there is one."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()
        self.spans: list[Span] = []
        self.num_writes = 0
        self.is_closed = False

    def write(self, spans: Sequence[Span]) -> None:
        self.is_waiting.set()
        self.gate.wait(20)
        self.num_writes += 1
        if self.problem is not None:
            raise self.problem
        self.spans += spans

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()


def test_everything_gets_out_at_the_end() -> None:
    sink = Sink()
    lane = Lane(sink, "here", SIZE, delay_ms=60_000)
    for number in range(1, 11):
        lane.put(span(number))
    lane.close()
    assert sorted(one.span_id for one in sink.spans) == list(range(1, 11))
    assert sink.is_closed
    assert lane.num_dropped == 0


def test_a_batch_is_no_longer_than_its_limit() -> None:
    sink = Sink()
    lane = Lane(sink, "here", 4 * MAX_BATCH_SPANS, delay_ms=60_000)
    for number in range(3 * MAX_BATCH_SPANS):
        lane.put(span(number + 1))
    lane.close()
    assert len(sink.spans) == 3 * MAX_BATCH_SPANS
    assert sink.num_writes == 3


def test_a_full_queue_refuses_and_counts() -> None:
    sink = Sink()
    sink.gate.clear()
    lane = Lane(sink, "here", SIZE)
    for number in range(1, SIZE + 1):  # a full batch: the exporter takes it at once, and is stuck
        lane.put(span(number))
    assert sink.is_waiting.wait(20)
    for number in range(SIZE + 9):
        lane.put(span(1000 + number))
    assert lane.num_dropped == 9
    sink.gate.set()
    lane.close()
    assert len(sink.spans) == 2 * SIZE
    assert max(one.span_id for one in sink.spans) == 1000 + SIZE - 1  # the newest were refused
    assert lane.num_dropped == 9


def test_what_is_not_exported_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink(OSError("disk full"))
    lane = Lane(sink, "the file", SIZE, delay_ms=1)
    with caplog.at_level(logging.WARNING, LANES):
        for number in range(3 * SIZE):
            lane.put(span(number + 1))
            if (number + 1) % SIZE == 0:
                sink.is_waiting.wait(20)
                sink.is_waiting.clear()
        lane.close()
    assert sink.num_writes > 1
    assert lane.num_dropped == 3 * SIZE
    (record,) = caplog.records
    assert "the file does not take them: OSError('disk full')" in record.getMessage()


def test_after_the_end_spans_are_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    lane = Lane(Sink(), "here", SIZE)
    lane.close()
    with caplog.at_level(logging.DEBUG):
        lane.put(span())
    assert lane.num_dropped == 1
    assert caplog.records == []


def test_closing_is_bounded_where_nobody_answers() -> None:
    sink = Sink()
    sink.gate.clear()
    lane = Lane(sink, "here", SIZE, delay_ms=1)
    tracer = ProcessTracer([lane])
    tracer.emit(span())
    assert sink.is_waiting.wait(20)
    tracer.close(timeout_s=0.05)
    assert sink.is_closed


def test_a_filter_lets_one_through_in_a_while() -> None:
    now = [100.0]
    limit = OnceInAWhile(60.0, lambda: now[0])
    passed = []
    for seconds in (0, 1, 30, 29.5, 0.5, 59, 1):
        now[0] += seconds
        passed.append(limit.is_due())
    assert passed == [True, False, False, True, False, False, True]


def test_a_tracer_of_a_configuration(tmp_path: Path) -> None:
    config = TracingConfig(file_dir=str(tmp_path), sample_ratio=1.0)
    tracer = open_tracer(config, "paceline-test", {"service.instance.id": "r"})
    assert tracer is not None
    tracer.emit(span())
    tracer.close()
    (file,) = tmp_path.iterdir()
    assert '"stringValue":"paceline-test"' in file.read_text()
    assert '"key":"service.instance.id","value":{"stringValue":"r"}' in file.read_text()
    assert (tracer.num_emitted, tracer.num_dropped) == (1, 0)
    tracer.emit(span())
    assert span_counts(tracer) == {"num_spans": 2, "num_dropped_spans": 1}
    assert span_counts(None) == {"num_spans": 0, "num_dropped_spans": 0}


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tracer = open_tracer(TracingConfig(file_dir="~/traces"), "svc", {})
    assert tracer is not None
    tracer.close()
    assert len(list((tmp_path / "traces").iterdir())) == 1


def test_a_folder_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, LANES):
        assert make_lanes(TracingConfig(file_dir="/proc/nowhere"), "svc", {}) == []
    assert "no trace file in /proc/nowhere" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_where_http_posts_to(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url
