"""The command line's rows of the table of limits (tests/unit/test_limits.py)."""

from __future__ import annotations

TRACE = "unit/cli/test_trace"

CLI_CONSTANTS: dict[str, str] = {
    "cli.chat_session:MAX_TURNS": (
        "unit/cli/test_chat.py::test_the_oldest_turns_are_forgotten_in_pairs"
    ),
    "cli.chat_session:MAX_SPECULATION": (
        "unit/cli/test_chat.py::test_commands_of_the_conversation"
    ),
    "cli.console:MAX_TOLD_CHARS": "unit/cli/test_console.py::test_somebody_elses_words",
    "cli.chat_talk:MAX_PROMPT_CHARS": "unit/cli/test_chat.py::test_errors_are_one_line_and_exit_1",
    "cli.distill:MAX_STUDENT_BYTES": "unit/cli/test_distill.py::test_a_students_config",
    "cli.distill_options:MAX_MEDUSA_HEADS": (
        "unit/cli/test_distill.py::test_options_that_do_not_go_together"
    ),
    **dict.fromkeys(
        ("engine.chat_files:MAX_CHATS_BYTES", "engine.chat_files:MAX_TEXT_BYTES"),
        "unit/engine/test_chat_files.py::test_files_that_cannot_be_read",
    ),
    **dict.fromkeys(
        (
            *("engine.rejection_files:MAX_FILES", "engine.rejection_files:MAX_TOTAL_BYTES"),
            *("engine.rejection_files:MAX_LINE_BYTES", "engine.rejection_files:MAX_TOP"),
            *("engine.rejection_files:MAX_CONTEXT_TOKENS", "engine.rejection_files:MAX_NAME_CHARS"),
            *("engine.rejection_files:MAX_FOLDERS", "engine.rejection_files:MAX_DEPTH"),
        ),
        "unit/engine/test_rejection_files.py::test_limits",
    ),
    "engine.self_chats:MAX_ENDED_AT_ONCE": (
        "unit/engine/test_self_chats.py"
        "::test_a_target_that_ends_every_turn_at_once_does_not_run_forever"
    ),
    "engine.draft_card:MAX_SPEEDUP_TOKENS": (
        "unit/engine/test_draft_card.py::test_the_best_number_is_the_best"
    ),
    "cli.doctor_facts:MAX_PORTS_TRIED": (
        "unit/cli/test_doctor_checks.py::test_no_more_ports_are_tried_than_make_sense"
    ),
    "cli.top:MAX_METRICS_BYTES": (
        "unit/cli/test_top.py::test_what_is_no_metrics_page_gives_no_rates"
    ),
    "cli.top_data:MAX_HISTORY": "unit/cli/test_top.py::test_history_is_bounded",
    "cli.top_view:MAX_ROWS": "unit/cli/test_top.py::test_a_large_fleet_is_cut",
    "cli.trace_files:MAX_FILES": f"{TRACE}_files.py::test_files_of_a_folder_are_bounded",
    "cli.trace_files:MAX_LAST_BYTES": f"{TRACE}_files.py::test_only_the_end_of_a_huge_file",
    "cli.trace_files:MAX_LINE_BYTES": f"{TRACE}_files.py::test_a_line_without_end_is_bounded",
    "cli.trace_files:MAX_SPANS": f"{TRACE}_files.py::test_spans_of_a_trace_are_bounded",
    "cli.trace_lanes:MAX_LANE_ROWS": (
        f"{TRACE}_model.py::test_blocks_that_overlap_have_rows_of_their_own"
    ),
    "cli.trace_builder:MAX_PARTS": f"{TRACE}_model.py::test_spans_of_a_round_are_bounded",
    "cli.trace_page:MAX_PAGE_MARKS": f"{TRACE}_page.py::test_marks_are_bounded",
    "cli.trace_page:MAX_PAGE_ROUNDS": f"{TRACE}_page.py::test_rounds_are_bounded",
    "cli.trace_spans:MAX_COUNT": f"{TRACE}_model.py::test_absurd_counts_cost_nothing",
    "cli.trace_view:MAX_MARKS": f"{TRACE}.py::test_marks_are_bounded",
    "cli.trace_view:MAX_ROWS": f"{TRACE}.py::test_the_middle_of_many_rounds_is_left_out",
}
