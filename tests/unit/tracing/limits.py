"""Rows of `tests/unit/test_limits.py` about what processes write down: traces, rejections."""

from __future__ import annotations

_TRACING, _TARGET = "unit/tracing", "unit/target"
_REJECTIONS = "rpc/test_rejection_log.py"

TRACING_LIMITS: dict[str, str] = {
    "tracing.max_file_bytes": f"{_TRACING}/test_json_lines.py::test_a_full_file_is_put_aside_once",
    "tracing.max_queue_size": f"{_TRACING}/test_lanes.py::test_a_full_queue_refuses_and_counts",
    "rejection_log.max_file_bytes": f"{_REJECTIONS}::test_a_full_file_is_put_aside_once",
    "rejection_log.max_queue_size": f"{_REJECTIONS}::test_a_full_queue_drops_and_counts",
    "rejection_log.context_tokens": f"{_REJECTIONS}::test_no_text_unless_it_is_allowed",
}

TRACING_NOT_A_LIMIT: dict[str, str] = {
    "tracing.sample_ratio": "share",
    "tracing.slow_request_s": "switch",
    "tracing.otlp_endpoint": "address",
    "tracing.otlp_protocol": "kind",
    "tracing.file_dir": "folder",
    "rejection_log.file_dir": "folder",
    "rejection_log.sample_ratio": "share",
}

TRACING_CONSTANTS: dict[str, str] = {
    "target.rejection_log:MAX_HOST_CHARS": f"{_REJECTIONS}::test_a_files_name_tells_hosts_apart",
    "target.rejection_log:NUM_TOP": (
        f"{_REJECTIONS}::test_each_rejection_is_a_line_that_names_its_place"
    ),
    "target.rejection_log:CLOSE_TIMEOUT_S": (
        f"{_REJECTIONS}::test_closing_is_bounded_where_the_disk_does_not_answer"
    ),
    **dict.fromkeys(
        ("target.round_clock:MAX_ROUND_ARRIVALS", "target.round_clock:MAX_ROUND_PASSES"),
        f"{_TARGET}/test_round_clock.py::test_a_flood_of_messages_or_passes_is_bounded",
    ),
    "target.traces:MAX_KEPT_ROUNDS": f"{_TARGET}/test_traces.py::test_kept_rounds_are_bounded",
    "target.traces:MAX_WAITING_ROUNDS": (
        f"{_TARGET}/test_traces.py::test_rounds_that_wait_to_become_spans_are_bounded"
    ),
    "target.traces:MAX_FLUSH_ROUNDS": (
        f"{_TARGET}/test_traces.py::test_kept_rounds_become_spans_some_at_a_time"
    ),
    "target.traces:MAX_PASS_LINKS": (
        f"{_TARGET}/test_traces.py::test_a_pass_is_one_span_for_all_rounds_in_it"
    ),
    "tracing.json_lines:MAX_FILES": (
        f"{_TRACING}/test_json_lines.py::test_files_of_one_service_are_bounded"
    ),
    "tracing.lanes:MAX_BATCH_SPANS": (
        f"{_TRACING}/test_lanes.py::test_a_batch_is_no_longer_than_its_limit"
    ),
    "tracing.guard:LOG_INTERVAL_S": (
        f"{_TRACING}/test_lanes.py::test_what_is_not_exported_is_counted_and_said_once"
    ),
    "tracing.process:SHUTDOWN_TIMEOUT_S": (
        f"{_TRACING}/test_lanes.py::test_closing_is_bounded_where_nobody_answers"
    ),
}
