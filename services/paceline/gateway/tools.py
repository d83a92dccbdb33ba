"""Tools that a request offers, and the ways in which models write calls of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# OpenAI's own bound.
MAX_TOOLS = 128
# Of a JSON schema, and of the arguments of a call in a conversation's history.
MAX_SCHEMA_DEPTH = 32


class ToolFormat(StrEnum):
    """How a model writes a call.

    HERMES: `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, any number of them, as
    Hermes and Qwen do. LLAMA3_JSON: `{"name": ..., "parameters": {...}}`, maybe behind
    `<|python_tag|>`, several separated by `;`, as Llama 3 does.
    """

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """One function; `parameters` is a JSON schema of an object, None for any arguments.

    `strict`: calls must fit the schema also where the model itself decides to call.
    """

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in a conversation's history; `arguments` is the JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]


class ToolMode(StrEnum):
    """NAMED: the client has chosen the one function that is to be called."""

    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


def is_too_deep(value: Any, max_depth: int = MAX_SCHEMA_DEPTH) -> bool:
    """Whether lists and objects are nested more than `max_depth` deep."""
    if not isinstance(value, dict | list):
        return False
    if max_depth == 0:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(is_too_deep(item, max_depth - 1) for item in items)
