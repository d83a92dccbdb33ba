"""Rows of Medusa heads in the table of limits (tests/unit/test_limits.py)."""

from __future__ import annotations

FOLDER = "unit/engine/test_medusa_folder.py"

MEDUSA_CONSTANTS: dict[str, str] = {
    "engine.checks:MAX_HEAD_CANDIDATES": "unit/engine/test_medusa.py::test_refused",
    "engine.medusa_folder:MAX_HEADS": f"{FOLDER}::test_as_many_heads_and_layers_as_there_may_be",
    "engine.medusa_folder:MAX_LAYERS": f"{FOLDER}::test_as_many_heads_and_layers_as_there_may_be",
    "engine.medusa_folder:MAX_CONFIG_BYTES": f"{FOLDER}::test_a_config_as_long_as_allowed",
    "engine.medusa_folder:MAX_OTHER_BYTES": f"{FOLDER}::test_bent",
}
