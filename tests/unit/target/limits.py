"""The rows of tests/unit/test_limits.py for the target."""

from __future__ import annotations

_HEADS = "unit/target/test_head_drafts.py"
_SOURCES = "unit/target/test_sources.py"

TARGET_CONSTANTS: dict[str, str] = {
    "protocol.target_session:MAX_UNTOLD": (
        "unit/target/test_resting.py::test_it_is_told_now_and_then_so_that_it_keeps_the_sequence"
    ),
    "target.head_drafts:MAX_HEAD_CLASSES": f"{_HEADS}::test_classes_are_few",
    "target.head_drafts:MIN_HEAD_GAIN": (
        f"{_HEADS}::test_useless_heads_are_asked_seldom_and_counted"
    ),
    "target.head_stats:MAX_HEAD_CANDIDATES": (
        f"{_HEADS}::test_no_more_candidates_than_can_be_verified"
    ),
    "target.head_stats:MAX_LOSSES": (
        f"{_HEADS}::test_they_are_left_alone_when_they_lose_and_asked_again_less_often"
    ),
    "target.head_stats:MAX_QUIET": (
        f"{_HEADS}::test_they_are_left_alone_when_they_lose_and_asked_again_less_often"
    ),
    "target.local_drafts:MAX_TOLD_TOKENS": (
        "unit/target/test_local_drafts.py::test_long_prompts_are_told_a_part_at_a_time"
    ),
    "target.sources:FIRST_TRIAL": (
        f"{_SOURCES}::test_a_loser_of_which_nothing_is_learnt_is_tried_less_and_less_often"
    ),
    "target.sources:MAX_TRIAL": (
        f"{_SOURCES}::test_a_loser_of_which_nothing_is_learnt_is_tried_less_and_less_often"
    ),
}
