"""The rows of tests/unit/test_limits.py for benchmarks."""

from __future__ import annotations

BENCH = "unit/bench"

BENCH_CONSTANTS: dict[str, str] = {
    "bench.statistics:MAX_SAMPLES": (
        f"{BENCH}/test_statistics.py::test_samples_are_bounded_and_stay_a_fair_sample"
    ),
    "bench.load:MAX_REQUESTS": (
        f"{BENCH}/test_live.py::test_what_cannot_be_run_is_refused_before_anything_is_sent"
    ),
    "bench.live:MAX_CONCURRENCY": (
        f"{BENCH}/test_live.py::test_what_cannot_be_run_is_refused_before_anything_is_sent"
    ),
    "bench.live:MAX_DURATION_S": (
        f"{BENCH}/test_live.py::test_what_cannot_be_run_is_refused_before_anything_is_sent"
    ),
    "bench.recorder:MAX_BINS": f"{BENCH}/test_live_recorder.py::test_the_timeline_is_bounded",
    "bench.recorder:MAX_ERROR_CODES": (
        f"{BENCH}/test_live_recorder.py::test_error_codes_are_bounded"
    ),
    "bench.events:MAX_EVENT_BYTES": (
        f"{BENCH}/test_live_events.py::test_a_line_without_end_is_bounded"
    ),
    "bench.events:MAX_CODE_CHARS": f"{BENCH}/test_live_events.py::test_an_endless_code_is_cut",
    "bench.prompts:MAX_PROMPTS": (f"{BENCH}/test_live_prompts.py::test_files_that_cannot_be_read"),
    "bench.prompts:MAX_FILE_BYTES": (
        f"{BENCH}/test_live_prompts.py::test_files_that_cannot_be_read"
    ),
}
