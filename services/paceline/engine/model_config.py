"""A model folder's config.json as the library reads it, with one sentence for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from paceline.engine.json_files import read_json
from paceline.errors import ConfigError

# What the library raises for values of wrong types, and for numbers that do not fit together.
_BENT = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, StrictDataclassError),
)


def read_model_config(folder: Path) -> Any:
    """`ConfigError` where there is none or it cannot be read. Runs no code of the folder's."""
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"cannot read the model config in {folder}: there is no config.json")
    if not isinstance(read_json(path), dict):
        raise ConfigError(f"cannot read the model config in {folder}: it is no JSON object")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _BENT as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"cannot read the model config in {folder}: {reason}") from error
