"""Rows of `tests/unit/test_limits.py` about local proposers and the comparison of methods."""

from __future__ import annotations

_HERE = "unit/proposers"

PROPOSER_LIMITS: dict[str, str] = {
    **dict.fromkeys(
        ("speculation.prompt_lookup_min", "speculation.prompt_lookup_max"),
        f"{_HERE}/test_ngram.py::test_runs_of_the_two_lengths_and_those_between",
    ),
    "speculation.suffix_decoding_max_tree_depth": (
        f"{_HERE}/test_suffix.py::test_a_match_is_shorter_than_the_tree_is_deep"
    ),
    "speculation.suffix_decoding_max_cached_tokens": (
        f"{_HERE}/test_recent_outputs.py::test_the_oldest_go_first"
    ),
    "speculation.suffix_decoding_max_spec_factor": (
        f"{_HERE}/test_suffix.py::test_as_many_as_the_match_allows"
    ),
    "speculation.suffix_decoding_min_token_prob": (
        f"{_HERE}/test_suffix.py::test_what_is_too_rare_ends_a_proposal"
    ),
    "speculation.max_lookup_memory_mib": (
        "unit/target/test_lookup_memory.py::test_recent_outputs_go_first"
    ),
    "speculation.medusa_max_nodes": f"{_HERE}/test_tree.py::test_no_more_nodes_than_allowed",
}

PROPOSER_CONSTANTS: dict[str, str] = {
    "proposers.recent_outputs:MAX_NAMESPACES": (
        f"{_HERE}/test_recent_outputs.py::test_namespaces_are_bounded"
    ),
    "proposers.recent_outputs:MAX_PENDING_TOKENS": (
        f"{_HERE}/test_recent_outputs.py::test_outputs_that_wait_are_bounded"
    ),
    "proposers.suffix:MAX_TOKEN_BYTES": (
        f"{_HERE}/test_recent_outputs.py::test_no_text_takes_more_memory_than_stated"
    ),
    "bench.methods:MAX_ROUNDS": "unit/bench/test_methods.py::test_rounds_are_bounded",
    "bench.methods:DRAFT_WAIT_S": (
        "unit/bench/test_methods.py::test_a_draft_that_never_joins_is_waited_for_once_a_set"
    ),
    "proposers.ngram:MAX_RUN_BYTES": f"{_HERE}/test_ngram.py::test_memory_of_a_token",
}
