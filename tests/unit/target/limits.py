"""The rows of tests/unit/test_limits.py for the target."""

from __future__ import annotations

_LOOKUPS = "unit/target/test_lookup_costs.py"
_RESTS = "unit/protocol/test_lookup_rests.py"
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
        f"{_LOOKUPS}::test_long_prompts_are_told_a_part_at_a_time"
    ),
    "target.local_drafts:MAX_OWED_TOKENS": (
        f"{_LOOKUPS}::test_what_passes_have_committed_is_told_at_once"
    ),
    "target.local_drafts:TURN_TOKENS": f"{_LOOKUPS}::test_backlogs_have_turns",
    "protocol.lookup_rests:FIRST_REST": f"{_RESTS}::test_trials_become_rare",
    "protocol.lookup_rests:MAX_REST": f"{_RESTS}::test_trials_become_rare",
    "protocol.lookup_rests:TRIAL_PASSES": f"{_RESTS}::test_trials_become_rare",
    "protocol.lookup_rests:MAX_SCOUTS": f"{_RESTS}::test_a_few_sequences_try",
    "protocol.lookup_rests:MAX_REST_CLASSES": f"{_RESTS}::test_classes_are_few",
    "target.sources:FIRST_TRIAL": (
        f"{_SOURCES}::test_a_loser_of_which_nothing_is_learnt_is_tried_less_and_less_often"
    ),
    "target.sources:MAX_TRIAL": (
        f"{_SOURCES}::test_a_loser_of_which_nothing_is_learnt_is_tried_less_and_less_often"
    ),
}
