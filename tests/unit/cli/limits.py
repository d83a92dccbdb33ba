"""The command line's rows of the table of limits (tests/unit/test_limits.py)."""

from __future__ import annotations

CLI_CONSTANTS: dict[str, str] = {
    "cli.chat_session:MAX_TURNS": (
        "unit/cli/test_chat.py::test_the_oldest_turns_are_forgotten_in_pairs"
    ),
    "cli.chat_session:MAX_SPECULATION": (
        "unit/cli/test_chat.py::test_commands_of_the_conversation"
    ),
    "cli.chat_talk:MAX_PROMPT_CHARS": "unit/cli/test_chat.py::test_errors_are_one_line_and_exit_1",
    "cli.doctor_facts:MAX_PORTS_TRIED": (
        "unit/cli/test_doctor_checks.py::test_no_more_ports_are_tried_than_make_sense"
    ),
    "cli.top:MAX_METRICS_BYTES": (
        "unit/cli/test_top.py::test_what_is_no_metrics_page_gives_no_rates"
    ),
    "cli.top_data:MAX_HISTORY": "unit/cli/test_top.py::test_history_is_bounded",
    "cli.top_view:MAX_ROWS": "unit/cli/test_top.py::test_a_large_fleet_is_cut",
}
