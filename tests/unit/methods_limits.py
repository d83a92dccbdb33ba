"""Rows of `test_limits` about methods of speculation."""

from __future__ import annotations

_BOUNDS = "unit/test_offered.py::test_settings_of_the_methods_are_bounded"

METHODS_LIMITS: dict[str, str] = {
    f"speculation.{name}": _BOUNDS
    for name in (
        "prompt_lookup_max",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_tokens",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "medusa_max_nodes",
    )
} | {"speculation.prompt_lookup_min": "unit/test_offered.py::test_a_lookup_needs_a_length"}

METHODS_NOT_A_LIMIT: dict[str, str] = {
    "draft.deploy": "switch",
    "target.medusa": "name",
    **dict.fromkeys(
        (f"speculation.{name}" for name in ("method", "mode", "lookahead", "hybrid_lookup")),
        "switch",
    ),
    "speculation.num_speculative_tokens": "default",
}
