"""JSON files of a model's folder, read with a bound. Knows nothing of what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

# The largest tokenizer.json of today's models has 35 MB.
MAX_JSON_BYTES = 1 << 28


def read_json(path: Path, fix: str = "download the model again") -> Any:
    """What the file holds; `ConfigError` with `fix` when it cannot be read, is no JSON, or has more
    than `MAX_JSON_BYTES`."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file: {fix}")  # a device would never end
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise ConfigError(f"{path} has more than {MAX_JSON_BYTES} bytes: {fix}")
        return json.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): {fix}") from error
