"""What a recorder makes of known requests: rates, percentiles, goodput, the timeline."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.bench import recorder as module
from paceline.bench.client import Ask, Outcome
from paceline.bench.events import Chunk
from paceline.bench.recorder import Recorder, Slo


def outcome(
    due_s: float = 0.0,
    ttft_s: float | None = 0.1,
    gap_s: float = 0.05,
    num_gaps: int = 4,
    category: str = "",
    **fields: Any,
) -> Outcome:
    """One token, then `num_gaps` chunks of two tokens, `gap_s` apart."""
    made = Outcome(Ask(0, "/", {}, category=category), due_s, due_s)
    if ttft_s is not None:
        made.first_s = due_s + ttft_s
        made.last_s = made.first_s + gap_s * num_gaps
        made.gaps = [(gap_s, 2)] * num_gaps
        made.num_tokens = 1 + 2 * num_gaps
        made.num_rounds, made.num_proposed, made.num_accepted = 1 + num_gaps, 8, num_gaps
        made.num_rejections = 1
    made.end_s = (made.last_s or due_s) + 0.01
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def record(*outcomes: Outcome, slo: Slo | None = None, until_s: float = 10.0) -> Recorder:
    recorder = Recorder(slo)
    recorder.resume(0.0)
    for item in outcomes:
        recorder.begin(item.sent_s)
        recorder.end(item)
    recorder.pause(until_s)
    return recorder


def test_rates_and_latencies() -> None:
    summary = record(outcome(), outcome(ttft_s=0.3)).summary()
    assert (summary["num_ok"], summary["output_tokens"], summary["duration_s"]) == (2, 18, 10.0)
    assert (summary["tokens_per_s"], summary["requests_per_s"]) == (1.8, 0.2)
    assert summary["ttft_ms"] | {"p90": 0, "p99": 0} == {
        **{"count": 2, "mean": 200.0, "p50": 200.0, "max": 300.0},
        **{"p90": 0, "p99": 0},
    }
    # 50 ms between chunks of two tokens are 25 ms a token.
    assert (summary["itl_ms"]["count"], summary["itl_ms"]["mean"]) == (8, 50.0)
    assert (summary["itl_token_ms"]["count"], summary["itl_token_ms"]["mean"]) == (16, 25.0)
    # 200 ms behind the first token, eight tokens.
    assert summary["tpot_ms"]["p50"] == 25.0
    assert summary["e2e_ms"]["max"] == pytest.approx(510)
    assert summary["speculation"] == {
        **{"rounds": 10, "proposed": 16, "accepted": 8},
        **{"acceptance_rate": 0.5, "mean_acceptance_length": 1.8},
        "token_acceptance_rate": 0.8,
    }


def test_latency_counts_from_when_the_request_was_due() -> None:
    late = outcome(due_s=1.0, ttft_s=0.5, sent_s=1.4)
    summary = record(late).summary()
    assert summary["ttft_ms"]["mean"] == 500.0
    assert summary["start_lag_ms"]["mean"] == 400.0
    # 0.5 s to the first token, 0.2 s of gaps, 10 ms to the end.
    assert summary["e2e_ms"]["mean"] == pytest.approx(710)


def test_failures_are_counted_by_code_and_have_no_latency() -> None:
    refused = outcome(ttft_s=None, error="queue_full", message="429: wait")
    broken = outcome(error="incomplete", message="cut")
    summary = record(refused, refused, broken, outcome()).summary()
    assert (summary["num_requests"], summary["num_ok"], summary["num_failed"]) == (4, 1, 3)
    assert summary["errors"] == {"queue_full": 2, "incomplete": 1}
    assert summary["example_errors"]["queue_full"] == "429: wait"
    assert (summary["output_tokens"], summary["e2e_ms"]["count"]) == (9, 1)


def test_error_codes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ERROR_CODES", 2)
    failed = [outcome(ttft_s=None, error=code) for code in ("a", "b", "c", "d", "a")]
    assert record(*failed).summary()["errors"] == {"a": 2, "b": 1, "other": 2}


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [(Slo(150), 3), (Slo(None, 30), 3), (Slo(150, 30), 2), (Slo(99, 1), 0), (Slo(900, 900), 4)],
)
def test_goodput_counts_requests_that_meet_both(slo: Slo, num_good: int) -> None:
    found = record(
        outcome(),
        outcome(num_gaps=0),  # one token has no time per token
        outcome(ttft_s=0.2),
        outcome(gap_s=0.2),
        outcome(ttft_s=None, error="http_503"),
        slo=slo,
    )
    found.skip()
    goodput = found.summary()["goodput"]
    assert goodput["requests_per_s"] == pytest.approx(num_good / 10)
    # Failed and skipped ones are among those that were asked for.
    assert goodput["share"] == pytest.approx(num_good / 6, abs=1e-6)


def test_no_slo_no_goodput() -> None:
    assert record(outcome()).summary()["goodput"] is None


def test_categories_have_their_own_acceptance() -> None:
    coder = outcome(category="code", num_proposed=10, num_accepted=9)
    found = record(coder, coder, outcome(category="poems")).summary()["categories"]
    assert list(found) == ["code", "poems"]
    assert (found["code"]["num_ok"], found["code"]["acceptance_rate"]) == (2, 0.9)
    assert found["poems"]["acceptance_rate"] == 0.5


def test_the_timeline_has_a_row_a_second() -> None:
    recorder = Recorder()
    recorder.resume(50.0)
    recorder.begin(50.5)
    recorder.chunk(Chunk("a", 3, 4, 2, 1, [4]), 51.2)
    recorder.begin(52.0)
    recorder.chunk(Chunk("b", 2, 0, 0, 0, [2, 0]), 52.1)
    recorder.end(outcome(due_s=50.5, end_s=52.5))
    recorder.end(outcome(due_s=52.0, end_s=53.25, error="timeout"))
    recorder.pause(53.5)
    rows = recorder.timeline()
    assert [row["second"] for row in rows] == [0, 1, 2, 3]
    # The last second was measured for half of one: two requests for .25 s and .75 s each, of .5 s.
    assert [row["running"] for row in rows] == [0.5, 1.0, 1.5, 0.5]
    assert [row["tokens_per_s"] for row in rows] == [0, 3, 2, 0]
    assert [row["num_speculative_tokens"] for row in rows] == [None, 4, 1, None]
    assert [row["acceptance_rate"] for row in rows] == [None, 0.5, None, None]
    assert [(row["finished"], row["failed"]) for row in rows] == [(0, 0), (0, 0), (1, 0), (0, 1)]
    assert recorder.max_running == 2


def test_time_stands_still_between_blocks() -> None:
    recorder = Recorder()
    recorder.resume(10.0)
    recorder.chunk(Chunk("a", 1), 11.5)
    recorder.pause(12.0)
    recorder.resume(100.0)
    recorder.chunk(Chunk("a", 5), 100.5)
    recorder.pause(101.0)
    assert [row["tokens_per_s"] for row in recorder.timeline()] == [0, 1, 5]
    assert recorder.elapsed_s == 3.0


def test_the_timeline_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BINS", 5)
    recorder = Recorder()
    recorder.resume(0.0)
    for second in range(20):
        recorder.chunk(Chunk("a", 1), second + 0.5)
    recorder.pause(20.0)
    assert len(recorder.timeline()) == 5
    assert recorder.num_received_tokens == 20
