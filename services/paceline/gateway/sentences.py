"""What is wrong with a field, in words that do not show what we check it with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

# The kinds of error that our bodies can have; {braces} are pydantic's figures.
REASONS: Mapping[str, str] = {
    "string_type": "It must be a string",
    "int_type": "It must be an integer",
    "float_type": "It must be a number",
    "finite_number": "It must be a finite number",
    "bool_type": "It must be true or false",
    "list_type": "It must be a list",
    "model_type": "It must be an object",
    "greater_than": "It must be greater than {gt}",
    "greater_than_equal": "It must be at least {ge}",
    "less_than_equal": "It must be at most {le}",
    "literal_error": "It must be {expected}",
    "too_short": "It must have at least {min_length} items",
    "too_long": "It must have at most {max_length} items",
    "string_too_long": "It must have at most {max_length} characters",
    "string_pattern_mismatch": "It must be 1 to 64 letters, digits, '_' or '-'",
    "dict_type": "It must be an object",
}
# Whatever a new field brings that the table does not know yet.
UNKNOWN_REASON = "It has a wrong type or value"
_PYDANTIC_KINDS = frozenset(get_args(ErrorType))


def reason(details: ErrorDetails) -> str:
    """One sentence without its full stop; those of our own validators stay as they are."""
    kind = details["type"]
    if kind not in _PYDANTIC_KINDS:
        return details["msg"].removesuffix(".")
    figures = {name: _figure(value) for name, value in details.get("ctx", {}).items()}
    return REASONS.get(kind, UNKNOWN_REASON).format(**figures)


def _figure(value: Any) -> Any:
    """2.0 reads as 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
